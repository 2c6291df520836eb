//! Wraps the places of a template's code where the engine makes values grow without charging for it: the operands of
//! `~`, which it turns into text, and values that are stored or put into a list, map or tuple, which may come to hold each
//! other many times or themselves.
//!
//! `a ~ b` becomes `((a)|__text__) ~ ((b)|__text__)`, `[a]` becomes `(([a])|__held__)`, and so does the `e` of `set x = e`.
//! Filters cannot be redefined by a template. Knows the precedence of operators, nothing else of expressions.

use super::repr;
use minijinja::value::{Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};

const TEXT: &str = "__text__";
const HELD: &str = "__held__";
/// As `HELD`, for an attribute of a namespace.
const HELD_INSIDE: &str = "__held_inside__";
/// Deepest nesting of a stored value.
const MAX_DEPTH: usize = 200;
/// So many nodes of a stored value, or so many bytes of its strings, cost one unit of fuel.
const NODES_PER_FUEL: u64 = 8;
const BYTES_PER_FUEL: u64 = 128;

/// Registers the filters that [`wrap`] writes into the code.
pub(super) fn install(environment: &mut Environment) {
    environment.add_filter(TEXT, |state: &State, value: &Value| match value.kind() {
        ValueKind::String => Ok(value.clone()),
        _ => repr::text(state, value).map(Value::from),
    });
    environment.add_filter(HELD, |state: &State, value: &Value| {
        held(state, value, is_namespace(value))
    });
    environment.add_filter(HELD_INSIDE, |state: &State, value: &Value| held(state, value, false));
}

/// `value` as it may be stored: of bounded size and depth, without namespaces inside, no longer lazy.
fn held(state: &State, value: &Value, namespace_allowed: bool) -> Result<Value, Error> {
    if value.as_object().is_none() || namespace_allowed && value.len() == Some(0) {
        return Ok(value.clone());
    }
    let mut walk = Walk {
        state,
        nodes: 0,
        bytes: 0,
    };
    walk.value(value, 0, namespace_allowed)?;
    walk.charge()?;
    if value.kind() == ValueKind::Iterable && !value.is_tuple() {
        let items: Vec<Value> = value.try_iter()?.checked().collect::<Result<_, _>>()?;
        return Ok(Value::from(items));
    }
    Ok(value.clone())
}

fn is_namespace(value: &Value) -> bool {
    value
        .as_object()
        .is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

struct Walk<'a> {
    state: &'a State<'a, 'a>,
    nodes: u64,
    bytes: u64,
}

impl Walk<'_> {
    fn charge(&mut self) -> Result<(), Error> {
        let fuel = self.nodes / NODES_PER_FUEL + self.bytes / BYTES_PER_FUEL;
        (self.nodes, self.bytes) = (0, 0);
        self.state.consume_fuel(fuel)
    }

    fn value(&mut self, value: &Value, depth: usize, namespace_allowed: bool) -> Result<(), Error> {
        self.nodes += 1;
        self.bytes += value.as_str().map_or(0, |text| text.len() as u64);
        if self.nodes + self.bytes > 4096 {
            self.charge()?;
        }
        if value.as_object().is_none() {
            return Ok(());
        }
        if depth > MAX_DEPTH {
            return Err(invalid(format!("a value is nested deeper than {MAX_DEPTH} levels")));
        }
        if is_namespace(value) && !namespace_allowed {
            return Err(invalid("a namespace cannot be stored inside another value"));
        }
        match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => {
                for item in value.try_iter()?.checked() {
                    self.value(&item?, depth + 1, false)?;
                }
            }
            ValueKind::Map => {
                for key in value.try_iter()?.checked() {
                    let key = key?;
                    self.value(&key, depth + 1, false)?;
                    self.value(&value.get_item(&key)?, depth + 1, false)?;
                }
            }
            _ => {}
        }
        Ok(())
    }
}

fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

#[derive(Clone, Copy)]
struct Token<'a> {
    text: &'a str,
    start: usize,
    /// Open brackets around it; a bracket counts as outside of itself.
    depth: usize,
}

impl Token<'_> {
    fn end(&self) -> usize {
        self.start + self.text.len()
    }

    fn is_literal(&self) -> bool {
        self.text.starts_with(['"', '\'']) || self.text.starts_with(|c: char| c.is_ascii_digit())
    }
}

/// The code of one tag, without delimiters, white space control and the name of the `statement` (empty for an
/// expression), with its dangerous places wrapped; `None` where there are none.
pub(super) fn wrap(code: &str, statement: &str) -> Option<String> {
    let is_set = statement == "set";
    if !is_set && !code.contains(['~', '[', '{', '(']) {
        return None;
    }
    let tokens = tokens(code)?;
    let ends: Vec<bool> = (0..tokens.len()).map(|i| ends_operand(&tokens, i)).collect();
    // Position, order among insertions there, text.
    let mut insertions: Vec<(usize, usize, String)> = Vec::new();
    let mut surround = |first: usize, last: usize, order: usize, filter: &str| {
        if first <= last && !(first == last && tokens[first].is_literal()) {
            insertions.push((tokens[first].start, order, "((".to_string()));
            insertions.push((tokens[last].end(), 9 - order, format!(")|{filter})")));
        }
    };
    // What stands before is a pattern, not a value.
    let top_level = |text| {
        tokens
            .iter()
            .position(move |token| token.depth == 0 && token.text == text)
    };
    let first_value = match statement {
        "set" => top_level("=").map_or(tokens.len(), |i| i + 1),
        "for" => top_level("in").map_or(tokens.len(), |i| i + 1),
        "call" => usize::from(tokens.first().is_some_and(|token| token.text == "(")),
        _ => 0,
    };
    for i in (first_value..tokens.len()).filter(|&i| matches!(tokens[i].text, "[" | "{" | "(") && !is_value(&tokens, i))
    {
        let Some(close) = (i + 1..tokens.len()).find(|&j| tokens[j].depth == tokens[i].depth) else {
            continue;
        };
        let inside = &tokens[i + 1..close];
        let has_names = inside
            .iter()
            .any(|token| token.text.starts_with(|c: char| c.is_alphabetic() || c == '_'));
        let is_tuple = inside
            .iter()
            .any(|token| token.text == "," && token.depth == tokens[i].depth + 1);
        let is_pattern = tokens.get(close + 1).is_some_and(|token| token.text == "=");
        if has_names && !is_pattern && (tokens[i].text != "(" || is_tuple) {
            surround(i, close, 2, HELD);
        }
    }
    let mut done = None;
    for (i, token) in tokens.iter().enumerate().filter(|(_, token)| token.text == "~") {
        let outside = |j: &usize| tokens[*j].depth < token.depth || (tokens[*j].depth == token.depth && ends[*j]);
        let left = (0..i).rev().find(outside).map_or(0, |j| j + 1);
        let right = (i + 1..tokens.len()).find(outside).unwrap_or(tokens.len());
        if left >= i || right <= i + 1 {
            return None;
        }
        // The left operand of the second `~` of a chain is the right one of the first.
        if done != Some(left) {
            surround(left, i - 1, 1, TEXT);
        }
        surround(i + 1, right - 1, 1, TEXT);
        done = Some(i + 1);
    }
    if is_set && let Some(equals) = tokens.iter().position(|token| token.depth == 0 && token.text == "=") {
        let inside = tokens[..equals].iter().any(|token| token.text == ".");
        if equals + 1 < tokens.len() {
            surround(equals + 1, tokens.len() - 1, 0, if inside { HELD_INSIDE } else { HELD });
        }
    }
    if insertions.is_empty() {
        return None;
    }
    insertions.sort_by_key(|(at, order, _)| (*at, *order));
    let (mut out, mut copied) = (String::with_capacity(code.len() * 2), 0);
    for (at, _, text) in insertions {
        out.push_str(&code[copied..at]);
        out.push_str(&text);
        copied = at;
    }
    out.push_str(&code[copied..]);
    Some(out)
}

/// Whether token `i`, at the depth of a `~`, binds weaker than it and so ends its operand.
fn ends_operand(tokens: &[Token], i: usize) -> bool {
    let before = |n: usize| i.checked_sub(n).map_or("", |j| tokens[j].text);
    match tokens[i].text {
        "," | ":" | "=" | "==" | "!=" | "<" | ">" | "<=" | ">=" | "+" | "~" => true,
        // A sign starts an operand, a difference ends one.
        "-" => is_value(tokens, i),
        "if" | "else" | "and" | "or" | "recursive" => before(1) != ".",
        "not" => !matches!(before(1), "." | "is"),
        "in" => !(matches!(before(1), "." | "is") || before(1) == "not" && before(2) == "is"),
        _ => false,
    }
}

/// Whether the token before `i` ends a value, so that `i` is no start of one.
fn is_value(tokens: &[Token], i: usize) -> bool {
    let before = |n: usize| i.checked_sub(n).map_or("", |j| tokens[j].text);
    match before(1) {
        "if" | "else" | "and" | "or" | "not" | "in" | "is" => before(2) == ".",
        text => text.starts_with(|c: char| c.is_alphanumeric() || "_\"')]}".contains(c)),
    }
}

/// `None` for an unfinished string, which the parser will name.
fn tokens(code: &str) -> Option<Vec<Token<'_>>> {
    let mut out = Vec::new();
    let (mut at, mut depth) = (0, 0usize);
    while let Some(c) = code[at..].chars().next() {
        let rest = &code[at..];
        let length = match c {
            c if c.is_whitespace() => {
                at += c.len_utf8();
                continue;
            }
            '"' | '\'' => {
                let mut escaped = false;
                let close = rest.char_indices().skip(1).find(|&(_, x)| {
                    let closes = x == c && !escaped;
                    escaped = x == '\\' && !escaped;
                    closes
                });
                close?.0 + 1
            }
            c if c.is_ascii_digit() => {
                // `1.5` is one number, `1.x` is not.
                let part = |s: &str| {
                    s.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
                        .unwrap_or(s.len())
                };
                let whole = part(rest);
                let fraction = rest[whole..]
                    .strip_prefix('.')
                    .filter(|f| f.starts_with(|c: char| c.is_ascii_digit()));
                whole + fraction.map_or(0, |f| 1 + part(f))
            }
            c if c.is_alphanumeric() || c == '_' => rest
                .find(|c: char| !(c.is_alphanumeric() || c == '_'))
                .unwrap_or(rest.len()),
            _ if ["==", "!=", "<=", ">=", "//", "**"]
                .iter()
                .any(|op| rest.starts_with(op)) =>
            {
                2
            }
            c => c.len_utf8(),
        };
        if matches!(c, ')' | ']' | '}') {
            depth = depth.saturating_sub(1);
        }
        out.push(Token {
            text: &rest[..length],
            start: at,
            depth,
        });
        if matches!(c, '(' | '[' | '{') {
            depth += 1;
        }
        at += length;
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The wrapped code in short: `<a>` for text, `«a»` for held and `‹a›` for held inside.
    fn short(code: &str, statement: &str) -> String {
        let wrapped = wrap(code, statement).unwrap_or_else(|| code.to_string());
        // Innermost first, because an opening does not tell its kind.
        let mut out = wrapped;
        while let Some((close, (filter, marks))) = [(TEXT, ['<', '>']), (HELD, ['«', '»']), (HELD_INSIDE, ['‹', '›'])]
            .into_iter()
            .filter_map(|kind| out.find(&format!(")|{})", kind.0)).map(|at| (at, kind)))
            .min_by_key(|(at, _)| *at)
        {
            let mut depth = 1;
            let (open, _) = out[..close]
                .char_indices()
                .rev()
                .find(|&(_, c)| {
                    depth += i32::from(c == ')') - i32::from(c == '(');
                    depth == 0
                })
                .unwrap();
            let inner = &out[open + 1..close];
            out = format!(
                "{}{}{inner}{}{}",
                &out[..open - 1],
                marks[0],
                marks[1],
                &out[close + filter.len() + 3..]
            );
        }
        out
    }

    #[test]
    fn operands_of_concatenation_are_wrapped_by_precedence() {
        for (code, expected) in [
            ("a ~ b", "<a> ~ <b>"),
            ("a ~ 'x' ~ c|d(1) ~ 5", "<a> ~ 'x' ~ <c|d(1)> ~ 5"),
            ("a + b * 2 ~ c - d", "a + <b * 2> ~ <c> - d"),
            ("a - -b ~ c", "a - <-b> ~ <c>"),
            ("x if y ~ z == 'a' else -w ~ v", "x if <y> ~ <z> == 'a' else <-w> ~ <v>"),
            (
                "f(a ~ b, k=c ~ d)[e ~ 'f'] ~ g.if",
                "<f(<a> ~ <b>, k=<c> ~ <d>)[<e> ~ 'f']> ~ <g.if>",
            ),
            ("{'k' ~ i: v ~ 1}", "«{'k' ~ <i>: <v> ~ 1}»"),
            (
                "not a ~ b is not none and c in d ~ e",
                "not <a> ~ <b is not none> and c in <d> ~ <e>",
            ),
            ("'~' + \"a~'b\"", "'~' + \"a~'b\""),
            ("'it\\'s ~' ~ x", "'it\\'s ~' ~ <x>"),
            ("a ~", "a ~"),
            ("1.5 ~ x.0", "1.5 ~ <x.0>"),
        ] {
            assert_eq!(short(code, ""), expected);
        }
        assert_eq!(wrap("a ~ b", "").unwrap(), "((a)|__text__) ~ ((b)|__text__)");
    }

    #[test]
    fn stored_values_and_new_containers_are_wrapped() {
        for (statement, code, expected) in [
            ("set", "x = y", "x = «y»"),
            ("set", "x = 'literal'", "x = 'literal'"),
            ("set", "ns.x = [ns.x, 1] ~ a", "ns.x = ‹<«[ns.x, 1]»> ~ <a>›"),
            ("set", "(a, b) = 1, c", "(a, b) = «1, c»"),
            ("set", "x", "x"),
            (
                "for",
                "(a, b) in [[a, 1], (x, 2)] if a in ['u', 'v']",
                "(a, b) in «[«[a, 1]», «(x, 2)»]» if a in ['u', 'v']",
            ),
            ("with", "(a, b) = (x, x), c = {}", "(a, b) = «(x, x)», c = {}"),
            ("call", "(a, b) f([x])", "(a, b) f(«[x]»)"),
            (
                "",
                "a[b](c, d).e[1:][f] + (g) + {'h': 1}.h",
                "a[b](c, d).e[1:][f] + (g) + {'h': 1}.h",
            ),
            (
                "",
                "x is in [y, z] and [] is not none",
                "x is in «[y, z]» and [] is not none",
            ),
            ("macro", "f(a, b=[c])", "f(a, b=«[c]»)"),
        ] {
            assert_eq!(short(code, statement), expected, "{statement} {code}");
        }
    }
}

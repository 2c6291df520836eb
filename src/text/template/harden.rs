//! Bounds the size of the values that a template builds, by inserting filters into its source.
//!
//! Fuel limits the instructions and the new bytes of a rendering, but with little fuel a template can build a list that
//! contains another one 2^60 times (`x = [x, x]` in a loop), a lazy list of 10^8 items (`[x] * 10**8`), or a namespace
//! that contains itself. minijinja formats, hashes and compares such values without any limit, until memory or the stack
//! is exhausted, so a limit on the output is not enough. It has no hook for operators and assignments, so these places of
//! the source get a filter that charges fuel for the whole value.
//!
//! `a ~ b` becomes `((a)|__text__) ~ ((b)|__text__)`, `[a]` becomes `(([a])|__stored__)`, `a * b` becomes
//! `((a * b)|__stored__)`, and `set x = e` becomes `set x = ((e)|__stored__)`. A template cannot redefine a filter.

use super::lexer::Token;
use super::python;
use super::write::invalid;
use minijinja::value::{Value, ValueKind};
use minijinja::{Environment, Error, State};

/// Deepest nesting of a stored value.
const MAX_DEPTH: usize = 200;
/// One unit of fuel pays for so many nodes of a stored value, or so many bytes of its strings.
const NODES_PER_FUEL: u64 = 8;
const BYTES_PER_FUEL: u64 = 128;

/// Converts an operand of `~` to text.
const TEXT: &str = "__text__";
/// Checks a value that is stored in a variable, a new list, map or tuple, and the result of `+` or `*`.
const STORED: &str = "__stored__";
/// The same for an attribute of a namespace.
const STORED_IN_NAMESPACE: &str = "__stored_in_namespace__";

/// Registers the filters that [`insertions`] writes into the source.
pub(super) fn install(environment: &mut Environment) {
    environment.add_filter(TEXT, |state: &State, value: &Value| match value.kind() {
        ValueKind::String => Ok(value.clone()),
        _ => python::text(state, value).map(Value::from),
    });
    environment.add_filter(STORED, |state: &State, value: &Value| {
        stored(state, value, is_namespace(value))
    });
    environment.add_filter(STORED_IN_NAMESPACE, |state: &State, value: &Value| {
        stored(state, value, false)
    });
}

/// Charges fuel for the whole of `value` and refuses deep nesting and namespaces inside of it. Returns the value; a lazy
/// sequence becomes a list.
fn stored(state: &State, value: &Value, namespace_allowed: bool) -> Result<Value, Error> {
    if value.as_object().is_none() || namespace_allowed && value.len() == Some(0) {
        return Ok(value.clone());
    }
    let mut meter = Meter {
        state,
        nodes: 0,
        bytes: 0,
    };
    meter.value(value, 0, namespace_allowed)?;
    meter.charge()?;
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

/// Counts the nodes and bytes of a value and pays for them.
struct Meter<'a> {
    state: &'a State<'a, 'a>,
    nodes: u64,
    bytes: u64,
}

impl Meter<'_> {
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
            return Err(invalid(format!(
                "a value is nested {depth} levels deep, expected at most {MAX_DEPTH}"
            )));
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

/// The texts to insert into the code of one tag, with their offsets in the template source, in order. `statement` is the
/// name of the tag, which `tokens` do not include; it is empty for an expression.
pub(super) fn insertions(tokens: &[Token], statement: &str) -> Vec<(usize, String)> {
    let mut code = Code {
        tokens,
        insertions: Vec::new(),
    };
    let first_value = code.first_value(statement);
    code.wrap_containers(first_value);
    code.wrap_sums(first_value);
    if !code.wrap_operands() {
        return Vec::new();
    }
    if statement == "set" {
        code.wrap_assigned();
    }
    code.insertions.sort_by_key(|&(at, order, _)| (at, order));
    code.insertions.into_iter().map(|(at, _, text)| (at, text)).collect()
}

struct Code<'a> {
    tokens: &'a [Token<'a>],
    /// Offset, order among the insertions at that offset, text.
    insertions: Vec<(usize, usize, String)>,
}

impl Code<'_> {
    /// Wraps the tokens from `first` to `last` in a filter. Wrappers of a smaller `level` go around those of a larger
    /// one.
    fn wrap(&mut self, first: usize, last: usize, level: usize, filter: &str) {
        if first > last || first == last && self.tokens[first].is_literal() {
            return;
        }
        let end = format!(")|{})", filter);
        self.insertions
            .push((self.tokens[first].start, level, "((".to_string()));
        self.insertions.push((self.tokens[last].end(), 9 - level, end));
    }

    fn top_level(&self, text: &str) -> Option<usize> {
        self.tokens
            .iter()
            .position(|token| token.depth == 0 && token.text == text)
    }

    /// The first token that is not part of the names that the statement assigns to.
    fn first_value(&self, statement: &str) -> usize {
        let after = |text| self.top_level(text).map_or(self.tokens.len(), |i| i + 1);
        match statement {
            "set" => after("="),
            "for" => after("in"),
            "call" => usize::from(self.tokens.first().is_some_and(|token| token.text == "(")),
            _ => 0,
        }
    }

    /// Wraps every new list, map and tuple with something else than literals in it.
    fn wrap_containers(&mut self, first_value: usize) {
        let tokens = self.tokens;
        for i in first_value..tokens.len() {
            if !matches!(tokens[i].text, "[" | "{" | "(") || is_value(tokens, i) {
                continue;
            }
            let Some(close) = (i + 1..tokens.len()).find(|&j| tokens[j].depth == tokens[i].depth) else {
                continue;
            };
            let inside = &tokens[i + 1..close];
            let is_tuple = inside
                .iter()
                .any(|token| token.text == "," && token.depth == tokens[i].depth + 1);
            let is_pattern = tokens.get(close + 1).is_some_and(|token| token.text == "=");
            if inside.iter().any(Token::is_name) && !is_pattern && (tokens[i].text != "(" || is_tuple) {
                self.wrap(i, close, 3, STORED);
            }
        }
    }

    /// Wraps every sum and product: the tokens around a `+` or `*` up to an operator that binds less tightly.
    fn wrap_sums(&mut self, first_value: usize) {
        let tokens = self.tokens;
        let is_sum = |i: &usize| matches!(tokens[*i].text, "+" | "*") && is_value(tokens, *i);
        for i in (first_value..tokens.len()).filter(is_sum) {
            let depth = tokens[i].depth;
            let outside = |&j: &usize| tokens[j].depth < depth || tokens[j].depth == depth && ends_sum(tokens, j);
            let left = (first_value..i).rev().find(outside).map_or(first_value, |j| j + 1);
            // `f(*a + b)` unpacks a sum.
            let left = (left..i).find(|&j| tokens[j].text != "*").unwrap_or(i);
            let right = (i + 1..tokens.len()).find(outside).unwrap_or(tokens.len());
            let is_first = !(left..i).any(|j| tokens[j].depth == depth && is_sum(&j));
            if left < i && i + 1 < right && is_first {
                self.wrap(left, right - 1, 1, STORED);
            }
        }
    }

    /// Wraps the operands of every `~`. `false` if one of them is missing, which the parser of minijinja reports.
    fn wrap_operands(&mut self) -> bool {
        let tokens = self.tokens;
        let mut wrapped = None;
        for (i, token) in tokens.iter().enumerate().filter(|(_, token)| token.text == "~") {
            let outside =
                |&j: &usize| tokens[j].depth < token.depth || tokens[j].depth == token.depth && ends_operand(tokens, j);
            let left = (0..i).rev().find(outside).map_or(0, |j| j + 1);
            let right = (i + 1..tokens.len()).find(outside).unwrap_or(tokens.len());
            if left >= i || right <= i + 1 {
                return false;
            }
            // In `a ~ b ~ c` the first `~` has wrapped `b` already.
            if wrapped != Some(left) {
                self.wrap(left, i - 1, 2, TEXT);
            }
            self.wrap(i + 1, right - 1, 2, TEXT);
            wrapped = Some(i + 1);
        }
        true
    }

    /// Wraps the value that a `set` statement assigns.
    fn wrap_assigned(&mut self) {
        let Some(equals) = self.top_level("=").filter(|equals| equals + 1 < self.tokens.len()) else {
            return;
        };
        let in_namespace = self.tokens[..equals].iter().any(|token| token.text == ".");
        let filter = if in_namespace { STORED_IN_NAMESPACE } else { STORED };
        self.wrap(equals + 1, self.tokens.len() - 1, 0, filter);
    }
}

/// Whether token `i`, at the depth of a `~`, ends its operand.
fn ends_operand(tokens: &[Token], i: usize) -> bool {
    match tokens[i].text {
        "+" | "~" => true,
        // A sign starts an operand, a subtraction ends one.
        "-" => is_value(tokens, i),
        _ => ends_sum(tokens, i),
    }
}

/// Whether token `i`, at the depth of a `+`, binds less tightly.
fn ends_sum(tokens: &[Token], i: usize) -> bool {
    let before = |n: usize| i.checked_sub(n).map_or("", |j| tokens[j].text);
    match tokens[i].text {
        "," | ":" | "=" | "==" | "!=" | "<" | ">" | "<=" | ">=" => true,
        "if" | "else" | "and" | "or" | "recursive" => before(1) != ".",
        "not" => !matches!(before(1), "." | "is"),
        "in" => !(matches!(before(1), "." | "is") || before(1) == "not" && before(2) == "is"),
        _ => false,
    }
}

/// Whether the token before `i` ends a value, so that token `i` continues an expression.
fn is_value(tokens: &[Token], i: usize) -> bool {
    let before = |n: usize| i.checked_sub(n).map_or("", |j| tokens[j].text);
    match before(1) {
        "if" | "else" | "and" | "or" | "not" | "in" | "is" => before(2) == ".",
        text => text.starts_with(|c: char| c.is_alphanumeric() || "_\"')]}".contains(c)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::lexer::lex;
    use super::*;

    /// The code with its insertions.
    fn full(code: &str, statement: &str) -> String {
        let source = format!(" {code} %}}");
        let Ok(Some(tag)) = lex(&source, 0, "%}") else {
            panic!("{code} is no tag");
        };
        let mut out = source[..tag.end].to_string();
        for (at, text) in insertions(&tag.tokens, statement).into_iter().rev() {
            out.insert_str(at, &text);
        }
        out.trim().to_string()
    }

    /// The code with its insertions in short: `<a>` for text, `«a»` for stored and `‹a›` for stored in a namespace.
    fn short(code: &str, statement: &str) -> String {
        let kinds = [
            (TEXT, ['<', '>']),
            (STORED, ['«', '»']),
            (STORED_IN_NAMESPACE, ['‹', '›']),
        ];
        let mut out = full(code, statement);
        // Innermost first, because all filters start with the same brackets.
        while let Some((close, (filter, marks))) = kinds
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
            ("a + b * 2 ~ c - d", "«a + <b * 2> ~ <c> - d»"),
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
            ("'~' + \"a~'b\"", "«'~' + \"a~'b\"»"),
            ("'it\\'s ~' ~ x", "'it\\'s ~' ~ <x>"),
            ("a ~", "a ~"),
            ("1.5 ~ x.0", "1.5 ~ <x.0>"),
        ] {
            assert_eq!(short(code, ""), expected);
        }
        assert_eq!(full("a ~ b", ""), "((a)|__text__) ~ ((b)|__text__)");
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
                "«a[b](c, d).e[1:][f] + (g) + {'h': 1}.h»",
            ),
            (
                "",
                "x is in [y, z] and [] is not none",
                "x is in «[y, z]» and [] is not none",
            ),
            ("macro", "f(a, b=[c])", "f(a, b=«[c]»)"),
            (
                "",
                "-a + b.c[d * 2:] * 3 == e and f(*g + h, k=i ** j) or not l - 1",
                "«-a + b.c[«d * 2»:] * 3» == e and f(*«g + h», k=«i ** j») or not l - 1",
            ),
            (
                "for",
                "a in b + (c * 2) if a + 1 in d * 2 recursive",
                "a in «b + («c * 2»)» if «a + 1» in «d * 2» recursive",
            ),
        ] {
            assert_eq!(short(code, statement), expected, "{statement} {code}");
        }
    }
}

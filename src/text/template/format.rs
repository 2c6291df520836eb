//! Python's string formatting: `%`, `str.format` and format specifications.

use super::arguments::{Arguments, wrong};
use super::arith::{self, as_float};
use super::limits::{Fault, Outcome};
use super::machine::Machine;
use super::numerals::Spec;
use super::value::Value;
use super::write;
use std::sync::Arc;

/// Largest width and precision.
const MAX_WIDTH: usize = 10_000;

/// Reads a number at the beginning of `text`. Fails above [`MAX_WIDTH`].
fn number(text: &mut &str) -> Outcome<Option<usize>> {
    let length = text.bytes().take_while(u8::is_ascii_digit).count();
    let (digits, rest) = text.split_at(length);
    *text = rest;
    if digits.is_empty() {
        return Ok(None);
    }
    let value = digits.parse().ok().filter(|value| *value <= MAX_WIDTH);
    value.map(Some).ok_or_else(|| too_wide(digits))
}

fn too_wide(found: &str) -> Box<Fault> {
    Fault::invalid(format!("a width or precision of {found}, expected at most {MAX_WIDTH}"))
}

/// The values for the directives of a `%` format.
struct Operands<'a> {
    values: std::slice::Iter<'a, Value>,
    /// For `%(name)s`.
    named: Option<&'a Value>,
}

impl Operands<'_> {
    fn next(&mut self) -> Outcome<Value> {
        let next = self.values.next().cloned();
        next.ok_or_else(|| Fault::invalid("not enough arguments for format string"))
    }

    /// A width or precision that is written as `*`.
    fn star(&mut self) -> Outcome<i128> {
        let value = self.next()?;
        match value {
            Value::Int(number) if number.unsigned_abs() <= MAX_WIDTH as u128 => Ok(number),
            other => Err(wrong("*", "a small integer", &other)),
        }
    }
}

impl Machine<'_> {
    /// Python's `format % values`.
    pub(super) fn percent(&mut self, format: &str, values: &Value) -> Outcome<Value> {
        self.budget.bytes(format.len() as u64)?;
        let single = [values.clone()];
        let mut operands = Operands {
            values: match values {
                Value::Tuple(seq) => seq.items.iter(),
                _ => single.iter(),
            },
            named: matches!(values, Value::Dict(_)).then_some(values),
        };
        let mut out = String::with_capacity(format.len());
        let mut rest = format;
        let mut by_name = false;
        while let Some(at) = rest.find('%') {
            out.push_str(&rest[..at]);
            rest = &rest[at + 1..];
            by_name |= rest.starts_with('(');
            let text = self.directive(&mut rest, &mut operands)?;
            self.budget.bytes(text.len() as u64)?;
            out.push_str(&text);
        }
        out.push_str(rest);
        // A list or a dictionary may stay unused.
        let unused_is_error = !by_name
            && !matches!(
                values,
                Value::Dict(_) | Value::List(_) | Value::Range(_) | Value::View(..) | Value::Namespace(_)
            );
        if unused_is_error && operands.values.next().is_some() {
            return Err(Fault::invalid("not all arguments converted during string formatting"));
        }
        Ok(out.into())
    }

    /// The text of the directive that `rest` begins with, after the `%`.
    fn directive(&mut self, rest: &mut &str, operands: &mut Operands) -> Outcome<String> {
        let mut named = None;
        if let Some(after) = rest.strip_prefix('(') {
            let Some(dict) = operands.named else {
                return Err(Fault::invalid("format requires a mapping"));
            };
            let mut depth = 1;
            let end = after.find(|c| {
                depth += i32::from(c == '(') - i32::from(c == ')');
                depth == 0
            });
            let Some(end) = end else {
                return Err(Fault::invalid("incomplete format key"));
            };
            let key = Value::from(&after[..end]);
            if !self.contains(dict, &key)? {
                return Err(Fault::invalid(format!(
                    "the format names '{}', which is missing",
                    &after[..end]
                )));
            }
            named = Some(self.item(dict, &key)?);
            *rest = &after[end + 1..];
        }
        let flags = rest.len() - rest.trim_start_matches(['#', '0', '-', ' ', '+']).len();
        let (flags, after) = rest.split_at(flags);
        *rest = after;
        let mut spec = Spec {
            alternate: flags.contains('#'),
            sign: ['+', ' '].into_iter().find(|sign| flags.contains(*sign)),
            align: flags.contains('-').then_some('<'),
            ..Spec::default()
        };
        spec.width = match rest.strip_prefix('*') {
            Some(after) => {
                *rest = after;
                let width = operands.star()?;
                if width < 0 {
                    spec.align = Some('<');
                }
                width.unsigned_abs() as usize
            }
            None => number(rest)?.unwrap_or(0),
        };
        if let Some(after) = rest.strip_prefix('.') {
            *rest = after;
            spec.precision = Some(match rest.strip_prefix('*') {
                Some(after) => {
                    *rest = after;
                    operands.star()?.max(0) as usize
                }
                None => number(rest)?.unwrap_or(0),
            });
        }
        *rest = rest.strip_prefix(['h', 'l', 'L']).unwrap_or(rest);
        let Some(kind) = rest.chars().next() else {
            return Err(Fault::invalid("incomplete format"));
        };
        *rest = &rest[kind.len_utf8()..];
        if kind == '%' {
            return Ok("%".to_string());
        }
        let value = match named {
            Some(value) => value,
            None => operands.next()?,
        };
        let zeros = flags.contains('0') && spec.align.is_none();
        self.converted(kind, spec, zeros, &value)
    }

    /// `value` as the directive `kind` writes it.
    fn converted(&mut self, kind: char, mut spec: Spec, zeros: bool, value: &Value) -> Outcome<String> {
        let needs = |what: &str| wrong(&format!("%{kind} format"), what, value);
        if zeros && !matches!(kind, 's' | 'r' | 'a' | 'c') {
            (spec.fill, spec.align) = ('0', Some('='));
        }
        let text = match kind {
            'd' | 'i' | 'u' => {
                spec.kind = Some('d');
                spec.alternate = false;
                let number = match value {
                    Value::Float(number) if number.is_finite() => {
                        let whole = (number.abs() < 1.7e38).then_some(*number as i128);
                        Some(whole.ok_or_else(arith::too_large)?)
                    }
                    other => other.as_int(),
                };
                number
                    .and_then(|number| spec.int(number))
                    .ok_or_else(|| needs("a number"))?
            }
            'o' | 'x' | 'X' => {
                spec.kind = Some(kind);
                let number = value.as_int();
                number
                    .and_then(|number| spec.int(number))
                    .ok_or_else(|| needs("an integer"))?
            }
            'e' | 'E' | 'f' | 'F' | 'g' | 'G' => {
                spec.kind = Some(kind);
                let number = match value {
                    Value::Str(_) => None,
                    other => as_float(other),
                };
                if zeros && number.is_some_and(|number| !number.is_finite()) {
                    spec.fill = '0';
                }
                number
                    .and_then(|number| spec.float(number))
                    .ok_or_else(|| needs("a number"))?
            }
            'c' => {
                let number = value.as_int().and_then(|number| u32::try_from(number).ok());
                let single = value.as_str().filter(|text| text.chars().count() == 1);
                let text = number.and_then(char::from_u32).map(String::from);
                let text = text.or_else(|| single.map(str::to_string));
                spec.pad(&text.ok_or_else(|| needs("an integer or a character"))?, '>')
            }
            's' | 'r' | 'a' => {
                let text = match kind {
                    's' => self.text(value)?.to_string(),
                    'r' => write::repr(&self.budget, value)?,
                    _ => self.ascii(value)?,
                };
                let kept = spec.precision.map_or(usize::MAX, |precision| precision);
                spec.pad(&text.chars().take(kept).collect::<String>(), '>')
            }
            other => return Err(Fault::invalid(format!("unsupported format character '{other}'"))),
        };
        Ok(text)
    }

    /// Python's `ascii`.
    fn ascii(&mut self, value: &Value) -> Outcome<String> {
        let text = write::repr(&self.budget, value)?;
        self.budget.bytes(10 * text.len() as u64)?;
        let chars = text.chars();
        Ok(chars
            .map(|c| if c.is_ascii() { c.to_string() } else { write::escape(c) })
            .collect())
    }

    /// Python's `str.format`.
    pub(super) fn format(&mut self, format: &str, args: &Arguments) -> Outcome<Value> {
        let mut fields = Fields { args, next: Some(0) };
        self.fields(format, &mut fields, 3).map(Value::from)
    }

    /// `format` with its fields replaced; fields may be in the specifications of fields `depth` levels deep.
    fn fields(&mut self, format: &str, fields: &mut Fields, depth: usize) -> Outcome<String> {
        if depth == 0 {
            return Err(Fault::invalid("fields of a format are nested too deeply"));
        }
        self.budget.bytes(format.len() as u64)?;
        let mut out = String::with_capacity(format.len());
        let mut rest = format;
        while let Some(at) = rest.find(['{', '}']) {
            out.push_str(&rest[..at]);
            let brace = &rest[at..=at];
            rest = &rest[at + 1..];
            if let Some(after) = rest.strip_prefix(brace) {
                out.push_str(brace);
                rest = after;
                continue;
            }
            if brace == "}" {
                return Err(Fault::invalid("Single '}' encountered in format string"));
            }
            let mut nesting = 1;
            let end = rest.find(|c| {
                nesting += i32::from(c == '{') - i32::from(c == '}');
                nesting == 0
            });
            let Some(end) = end else {
                return Err(Fault::invalid("expected '}' before end of string"));
            };
            let text = self.field(&rest[..end], fields, depth)?;
            self.budget.bytes(text.len() as u64)?;
            out.push_str(&text);
            rest = &rest[end + 1..];
        }
        out.push_str(rest);
        Ok(out)
    }

    /// `name!conversion:specification`
    fn field(&mut self, field: &str, fields: &mut Fields, depth: usize) -> Outcome<String> {
        // A colon or an exclamation mark in brackets belongs to an index.
        let mut inside = false;
        let end = field.find(|c| {
            inside = match c {
                '[' => true,
                ']' => false,
                _ => inside,
            };
            !inside && matches!(c, ':' | '!')
        });
        let (name, rest) = field.split_at(end.unwrap_or(field.len()));
        let (conversion, spec) = match rest.strip_prefix('!') {
            Some(rest) => {
                let mut chars = rest.chars();
                let kind = chars
                    .next()
                    .ok_or_else(|| Fault::invalid("a conversion is missing after '!'"))?;
                match chars.as_str() {
                    "" => (Some(kind), ""),
                    after => match after.strip_prefix(':') {
                        Some(spec) => (Some(kind), spec),
                        None => return Err(Fault::invalid("expected ':' after conversion specifier")),
                    },
                }
            }
            None => (None, rest.strip_prefix(':').unwrap_or("")),
        };
        let value = self.named_field(name, fields)?;
        let spec = self.fields(spec, fields, depth - 1)?;
        match conversion {
            None => self.formatted(&value, &spec),
            Some('s') => self
                .text(&value)
                .and_then(|text| self.formatted(&Value::Str(text), &spec)),
            Some('r') => write::repr(&self.budget, &value).and_then(|text| self.formatted(&text.into(), &spec)),
            Some('a') => self.ascii(&value).and_then(|text| self.formatted(&text.into(), &spec)),
            Some(other) => Err(Fault::invalid(format!("unknown conversion '{other}'"))),
        }
    }

    /// The value of a field's name, such as `0.title[key]`.
    fn named_field(&mut self, name: &str, fields: &mut Fields) -> Outcome<Value> {
        let end = name.find(['.', '[']).unwrap_or(name.len());
        let (first, mut rest) = name.split_at(end);
        let mut value = fields.get(first)?;
        while !rest.is_empty() {
            if let Some(after) = rest.strip_prefix('.') {
                let end = after.find(['.', '[']).unwrap_or(after.len());
                let attribute: Arc<str> = after[..end].into();
                if attribute.is_empty() {
                    return Err(Fault::invalid("empty attribute in format string"));
                }
                value = self.attribute(&value, &attribute)?;
                rest = &after[end..];
            } else {
                let Some((index, after)) = rest.strip_prefix('[').and_then(|rest| rest.split_once(']')) else {
                    return Err(Fault::invalid("only '.' or '[' may follow ']' in a format field"));
                };
                if index.is_empty() {
                    return Err(Fault::invalid("empty attribute in format string"));
                }
                let index = index.parse().map_or_else(|_| Value::from(index), Value::Int);
                value = self.item(&value, &index)?;
                rest = after;
            }
        }
        Ok(value)
    }

    /// Python's `format(value, specification)`.
    fn formatted(&mut self, value: &Value, spec: &str) -> Outcome<String> {
        if spec.is_empty() {
            return self.text(value).map(|text| text.to_string());
        }
        let invalid = |kind: char| {
            let found = value.kind();
            Fault::invalid(format!("unknown format code '{kind}' for object of type '{found}'"))
        };
        match value {
            Value::Str(text) | Value::Markup(text) => {
                let explicit = spec.contains('=');
                let mut spec = parse_spec(spec)?;
                // Zeros before the width fill a text at its end.
                spec.align = spec.align.filter(|align| *align != '=' || explicit);
                let numeric = spec.sign.is_some() || spec.alternate || spec.align == Some('=');
                if numeric || spec.grouping.is_some() || spec.kind.is_some_and(|kind| kind != 's') {
                    return Err(invalid(spec.kind.unwrap_or('=')));
                }
                let kept = spec.precision.unwrap_or(usize::MAX);
                Ok(spec.pad(&text.chars().take(kept).collect::<String>(), '<'))
            }
            Value::Int(_) | Value::Bool(_) | Value::Float(_) => self.formatted_number(value, parse_spec(spec)?),
            other => Err(Fault::invalid(format!(
                "unsupported format string passed to {}.__format__",
                other.kind()
            ))),
        }
    }

    fn formatted_number(&mut self, value: &Value, spec: Spec) -> Outcome<String> {
        let kind = spec.kind;
        let invalid = || {
            let found = value.kind();
            let kind = kind.unwrap_or(' ');
            Fault::invalid(format!("unknown format code '{kind}' for object of type '{found}'"))
        };
        if spec.grouping == Some(',') && matches!(kind, Some('b' | 'o' | 'x' | 'X' | 'n' | 'c'))
            || spec.grouping.is_some() && matches!(kind, Some('n' | 'c'))
        {
            return Err(invalid());
        }
        match (value.as_int(), kind) {
            (Some(number), None | Some('d' | 'b' | 'o' | 'x' | 'X' | 'n')) => {
                if spec.precision.is_some() || spec.no_negative_zero {
                    return Err(Fault::invalid("precision not allowed in integer format specifier"));
                }
                spec.int(number).ok_or_else(invalid)
            }
            (Some(_), Some('c')) if spec.sign.is_some() || spec.precision.is_some() || spec.alternate => Err(
                Fault::invalid("sign, precision and '#' are not allowed with the format 'c'"),
            ),
            (Some(number), Some('c')) => {
                let c = u32::try_from(number)
                    .ok()
                    .and_then(char::from_u32)
                    .ok_or_else(invalid)?;
                Ok(spec.pad(&c.to_string(), '<'))
            }
            _ => as_float(value)
                .and_then(|number| spec.float(number))
                .ok_or_else(invalid),
        }
    }
}

/// The arguments of `str.format`.
struct Fields<'a> {
    args: &'a Arguments,
    /// The number of the next `{}`. None after a number was written.
    next: Option<usize>,
}

impl Fields<'_> {
    fn get(&mut self, name: &str) -> Outcome<Value> {
        let at = match (name.parse::<usize>(), &mut self.next) {
            (Ok(at), next @ (None | Some(0))) => {
                *next = None;
                at
            }
            (Err(_), Some(next)) if name.is_empty() => {
                *next += 1;
                *next - 1
            }
            (Err(_), _) if !name.is_empty() => {
                let named = self.args.named.iter().find(|(known, _)| **known == *name);
                let value = named.map(|(_, value)| value.clone());
                return value.ok_or_else(|| Fault::invalid(format!("the format names '{name}', which is missing")));
            }
            _ => {
                let message = "cannot mix automatic and manual numbering of the fields of a format";
                return Err(Fault::invalid(message));
            }
        };
        let value = self.args.positional.get(at).cloned();
        value.ok_or_else(|| Fault::invalid(format!("the format has no argument for field {at}")))
    }
}

/// Reads `[[fill]align][sign][z][#][0][width][grouping][.precision][type]`.
fn parse_spec(text: &str) -> Outcome<Spec> {
    let mut spec = Spec::default();
    let mut rest = text;
    let is_align = |c: char| matches!(c, '<' | '>' | '^' | '=');
    let mut chars = rest.chars();
    let (first, second) = (chars.next(), chars.next());
    if let (Some(fill), Some(align)) = (first, second.filter(|c| is_align(*c))) {
        (spec.fill, spec.align) = (fill, Some(align));
        rest = chars.as_str();
    } else if let Some(align) = first.filter(|c| is_align(*c)) {
        spec.align = Some(align);
        rest = &rest[1..];
    }
    let has_fill = spec.align.is_some() && second.is_some_and(is_align);
    if let Some(sign) = rest.chars().next().filter(|c| matches!(c, '+' | '-' | ' ')) {
        spec.sign = Some(sign);
        rest = &rest[1..];
    }
    let eat = |rest: &mut &str, c: char| {
        let after = rest.strip_prefix(c);
        *rest = after.unwrap_or(rest);
        after.is_some()
    };
    spec.no_negative_zero = eat(&mut rest, 'z');
    spec.alternate = eat(&mut rest, '#');
    if !has_fill && eat(&mut rest, '0') {
        spec.fill = '0';
        spec.align = spec.align.or(Some('='));
    }
    spec.width = number(&mut rest)?.unwrap_or(0);
    if let Some(grouping) = rest.chars().next().filter(|c| matches!(c, ',' | '_')) {
        spec.grouping = Some(grouping);
        rest = &rest[1..];
    }
    if eat(&mut rest, '.') {
        spec.precision = number(&mut rest)?;
        if spec.precision.is_none() {
            return Err(Fault::invalid("Format specifier missing precision"));
        }
    }
    let mut chars = rest.chars();
    spec.kind = chars.next();
    match chars.as_str() {
        "" => Ok(spec),
        _ => Err(Fault::invalid(format!("Invalid format specifier '{text}'"))),
    }
}

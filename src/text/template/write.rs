//! Writes values as JSON or like Python's `repr`, and charges fuel while the text grows.
//!
//! minijinja itself charges after a conversion, which is too late for a value that contains another one very often.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};
use std::borrow::Cow;
use std::fmt::Write;

/// Deepest nesting of a value.
const MAX_DEPTH: usize = 200;
/// Widest indentation per level, in characters.
const MAX_INDENT: usize = 64;

/// `value | tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`: Python's `json.dumps`, without HTML
/// escapes and with keys in their original order.
pub(super) fn tojson(state: &State, value: &Value, indent: Option<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let style = Style::json(indent, &kwargs)?;
    kwargs.assert_all_used()?;
    Writer::write(state, &style, value)
}

/// `repr(value)`.
pub(super) fn repr(state: &State, value: &Value) -> Result<String, Error> {
    Writer::write(state, &Style::new(false, None), value)
}

struct Style {
    /// JSON, not `repr`.
    json: bool,
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
}

impl Style {
    fn new(json: bool, indent: Option<String>) -> Style {
        Style {
            json,
            ensure_ascii: false,
            sort_keys: false,
            item_separator: if indent.is_some() { "," } else { ", " }.to_string(),
            key_separator: ": ".to_string(),
            indent,
        }
    }

    fn json(indent: Option<Value>, kwargs: &Kwargs) -> Result<Style, Error> {
        let flag = |name| kwargs.get::<Option<bool>>(name).map(|flag| flag.unwrap_or(false));
        let indent = match indent {
            Some(indent) => Some(indent),
            None => kwargs.get::<Option<Value>>("indent")?,
        };
        let indent = match indent {
            None => None,
            Some(v) if v.is_none() || v.is_undefined() => None,
            Some(v) if v.kind() == ValueKind::String => v.as_str().map(str::to_string),
            // In Python `True` is 1; negative numbers count as 0.
            Some(v) => {
                let width = match v.kind() {
                    ValueKind::Bool => i64::from(v.is_true()),
                    _ => i64::try_from(v)?,
                };
                Some(" ".repeat(usize::try_from(width).unwrap_or(0).min(MAX_INDENT + 1)))
            }
        };
        if indent.as_ref().is_some_and(|i| i.len() > MAX_INDENT) {
            let message = format!("tojson: the indent has more than {MAX_INDENT} characters");
            return Err(invalid(message));
        }
        let mut style = Style::new(true, indent);
        if let Some(separators) = kwargs.get::<Option<Value>>("separators")?.filter(|v| !v.is_none()) {
            let mut parts = Vec::new();
            for part in separators.try_iter()?.checked() {
                parts.push(part?.as_str().map(str::to_string));
            }
            let Ok([Some(item), Some(key)]) = <[_; 2]>::try_from(parts) else {
                return Err(invalid("tojson: the separators are not two strings"));
            };
            (style.item_separator, style.key_separator) = (item, key);
        }
        style.ensure_ascii = flag("ensure_ascii")?;
        style.sort_keys = flag("sort_keys")?;
        Ok(style)
    }
}

struct Writer<'a> {
    state: &'a State<'a, 'a>,
    style: &'a Style,
    out: String,
    charged: usize,
}

impl Writer<'_> {
    fn write(state: &State, style: &Style, value: &Value) -> Result<String, Error> {
        let mut writer = Writer {
            state,
            style,
            out: String::new(),
            charged: 0,
        };
        writer.value(value, 0)?;
        Ok(writer.out)
    }

    /// Charges fuel for the text written since the last call, because a small value may contain another one many times.
    fn charge(&mut self) -> Result<(), Error> {
        let written = self.out.len() - self.charged;
        self.charged = self.out.len();
        self.state.consume_fuel(1 + written as u64 / 32)
    }

    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            let message = format!("the value is nested {depth} levels deep, expected at most {MAX_DEPTH}");
            return Err(invalid(message));
        }
        self.charge()?;
        let json = self.style.json;
        match value.kind() {
            ValueKind::Number => self.out.push_str(&number(value, json)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let is_tuple = !json && value.is_tuple();
                let (open, close) = if is_tuple { ('(', ')') } else { ('[', ']') };
                self.out.push(open);
                let mut items = 0;
                for item in value.try_iter()?.checked() {
                    self.separate(items == 0, depth + 1);
                    items += 1;
                    self.value(&item?, depth + 1)?;
                }
                if items == 1 && is_tuple {
                    self.out.push(',');
                }
                self.end(close, items == 0, depth);
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.checked().collect::<Result<_, _>>()?;
                if self.style.sort_keys {
                    keys.sort();
                }
                self.out.push('{');
                for (i, key) in keys.iter().enumerate() {
                    self.separate(i == 0, depth + 1);
                    match key.kind() {
                        _ if !json => self.value(key, depth + 1)?,
                        ValueKind::String => self.string(key.as_str().unwrap_or_default()),
                        ValueKind::None => self.out.push_str("\"null\""),
                        ValueKind::Bool => self.out.push_str(if key.is_true() { "\"true\"" } else { "\"false\"" }),
                        ValueKind::Number => self.string(&number(key, json)),
                        kind => return Err(invalid(format!("tojson: a key cannot be a {kind}"))),
                    }
                    self.out.push_str(&self.style.key_separator);
                    self.value(&value.get_item(key)?, depth + 1)?;
                }
                self.end('}', keys.is_empty(), depth);
            }
            ValueKind::Undefined if !json => self.out.push_str("Undefined"),
            // Booleans, none, and objects of minijinja that contain no values of the template.
            _ if !json => write!(self.out, "{value}").map_err(Error::from)?,
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            kind => return Err(invalid(format!("tojson: a value of type {kind} has no JSON form"))),
        }
        if json { self.charge() } else { Ok(()) }
    }

    fn separate(&mut self, first: bool, depth: usize) {
        if !first {
            self.out.push_str(&self.style.item_separator);
        }
        self.new_line(depth);
    }

    fn end(&mut self, bracket: char, empty: bool, depth: usize) {
        if !empty {
            self.new_line(depth);
        }
        self.out.push(bracket);
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.style.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
    }

    fn string(&mut self, text: &str) {
        let Style { json, ensure_ascii, .. } = *self.style;
        let double = json || text.contains('\'') && !text.contains('"');
        let quote = if double { '"' } else { '\'' };
        self.out.push(quote);
        for c in text.chars() {
            match c {
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' if json => self.out.push_str("\\b"),
                '\u{c}' if json => self.out.push_str("\\f"),
                c if c == quote || c == '\\' => self.out.extend(['\\', c]),
                c if json && (c < ' ' || ensure_ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c if !json && c.is_control() => self.out.push_str(&format!("\\x{:02x}", u32::from(c))),
                c => self.out.push(c),
            }
        }
        self.out.push(quote);
    }
}

fn number(value: &Value, json: bool) -> String {
    match f64::try_from(value.clone()) {
        Ok(number) if !value.is_integer() => python_float(number, json),
        _ => value.to_string(),
    }
}

/// A float as Python's `json.dumps` or `repr` writes it.
fn python_float(value: f64, json: bool) -> String {
    let [nan, infinity] = if json { ["NaN", "Infinity"] } else { ["nan", "inf"] };
    if value.is_nan() {
        return nan.to_string();
    }
    if value.is_infinite() {
        return format!("{}{infinity}", if value < 0.0 { "-" } else { "" });
    }
    let shortest = format!("{value:e}");
    let (mantissa, exponent) = shortest.split_once('e').unwrap_or((&shortest, "0"));
    match exponent.parse::<i32>().unwrap_or(0) {
        -4..16 => format!("{value:?}"),
        exponent => format!("{mantissa}e{exponent:+03}"),
    }
}

/// An error of a filter, a method or a function.
pub(super) fn invalid(message: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        for (value, expected) in [
            (2.0, "2.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.25e-7, "1.25e-07"),
            (123456.789, "123456.789"),
            (f64::NEG_INFINITY, "-Infinity"),
        ] {
            assert_eq!(python_float(value, true), expected);
        }
    }
}

//! The `tojson` filter of chat templates: Python's `json.dumps`, without HTML escapes and with keys in their original
//! order.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

/// Deepest nesting of a value.
const MAX_DEPTH: usize = 200;
/// Widest indentation per level, in characters.
const MAX_INDENT: usize = 64;

/// `value | tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(state: &State, value: &Value, indent: Option<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let style = Style::new(indent, &kwargs)?;
    kwargs.assert_all_used()?;
    let mut out = String::new();
    Writer {
        state,
        style: &style,
        out: &mut out,
        charged: 0,
    }
    .value(value, 0)?;
    Ok(Value::from(out))
}

struct Style {
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
}

impl Style {
    fn new(indent: Option<Value>, kwargs: &Kwargs) -> Result<Style, Error> {
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
                let width = if v.kind() == ValueKind::Bool {
                    i64::from(v.is_true())
                } else {
                    i64::try_from(v)?
                };
                Some(" ".repeat(usize::try_from(width).unwrap_or(0).min(MAX_INDENT + 1)))
            }
        };
        if indent.as_ref().is_some_and(|i| i.len() > MAX_INDENT) {
            return Err(invalid(format!(
                "tojson: the indent has more than {MAX_INDENT} characters"
            )));
        }
        let (mut item_separator, mut key_separator) =
            (if indent.is_some() { "," } else { ", " }.to_string(), ": ".to_string());
        if let Some(separators) = kwargs.get::<Option<Value>>("separators")?.filter(|v| !v.is_none()) {
            let mut parts = Vec::new();
            for part in separators.try_iter()?.checked() {
                parts.push(part?.as_str().map(str::to_string));
            }
            let [Some(item), Some(key)] = &mut parts[..] else {
                return Err(invalid("tojson: the separators are not two strings"));
            };
            (item_separator, key_separator) = (std::mem::take(item), std::mem::take(key));
        }
        Ok(Style {
            ensure_ascii: flag("ensure_ascii")?,
            sort_keys: flag("sort_keys")?,
            indent,
            item_separator,
            key_separator,
        })
    }
}

struct Writer<'a> {
    state: &'a State<'a, 'a>,
    style: &'a Style,
    out: &'a mut String,
    charged: usize,
}

impl Writer<'_> {
    /// Charges fuel for the text written since the last call, because a small value may contain another one many times.
    fn charge(&mut self) -> Result<(), Error> {
        let written = self.out.len() - self.charged;
        self.charged = self.out.len();
        self.state.consume_fuel(1 + written as u64 / 32)
    }

    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid(format!(
                "tojson: the value is nested {depth} levels deep, expected at most {MAX_DEPTH}"
            )));
        }
        self.charge()?;
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                self.out.push('[');
                let mut first = true;
                for item in value.try_iter()?.checked() {
                    self.separate(std::mem::take(&mut first), depth + 1);
                    self.value(&item?, depth + 1)?;
                }
                self.end(']', first, depth);
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
                        ValueKind::String => self.string(key.as_str().unwrap_or_default()),
                        ValueKind::None => self.out.push_str("\"null\""),
                        ValueKind::Bool => self.out.push_str(if key.is_true() { "\"true\"" } else { "\"false\"" }),
                        ValueKind::Number => self.string(&number(key)),
                        kind => return Err(invalid(format!("tojson: a key cannot be a {kind}"))),
                    }
                    self.out.push_str(&self.style.key_separator);
                    self.value(&value.get_item(key)?, depth + 1)?;
                }
                self.end('}', keys.is_empty(), depth);
            }
            kind => return Err(invalid(format!("tojson: a value of type {kind} has no JSON form"))),
        }
        self.charge()
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
            for _ in 0..depth {
                self.out.push_str(indent);
            }
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.style.ensure_ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(v) if !value.is_integer() => python_float(v),
        _ => value.to_string(),
    }
}

/// A float as Python's `repr` and `json.dumps` write it.
pub(super) fn python_float(value: f64) -> String {
    if !value.is_finite() {
        return if value.is_nan() {
            "NaN"
        } else if value > 0.0 {
            "Infinity"
        } else {
            "-Infinity"
        }
        .to_string();
    }
    let shortest = format!("{value:e}");
    let (mantissa, exponent) = shortest.split_once('e').unwrap_or((&shortest, "0"));
    match exponent.parse::<i32>().unwrap_or(0) {
        -4..16 => format!("{value:?}"),
        exponent => format!(
            "{mantissa}e{}{:02}",
            if exponent < 0 { '-' } else { '+' },
            exponent.unsigned_abs()
        ),
    }
}

fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
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
            assert_eq!(python_float(value), expected);
        }
    }
}

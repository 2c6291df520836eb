//! Writes values as JSON or like Python's `repr`, and uses the budget while the text grows.
//!
//! A value can contain another one very often, so that its text is much larger than the value.

use super::arguments::{Arguments, flag, wrong};
use super::limits::{Budget, Fault, MAX_VALUE_DEPTH, Outcome};
use super::text::is_printable;
use super::value::{Value, View, compare_numbers};
use std::cmp::Ordering;

/// Widest indentation per level, in characters.
const MAX_INDENT: usize = 64;

/// Python's `json.dumps(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`: no HTML escapes, and
/// keys in their order.
pub(super) fn json(budget: &Budget, value: &Value, args: Arguments) -> Outcome<String> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let [ascii, indent, separators, sorted] = args.bind("tojson", names, 0)?;
    let mut style = Style::new(true, indentation(indent)?);
    style.ensure_ascii = flag(ascii);
    style.sort_keys = flag(sorted);
    match separators {
        None | Some(Value::None) => {}
        Some(Value::List(seq) | Value::Tuple(seq)) if seq.items.len() == 2 => {
            let part = |at: usize| {
                let found: &Value = &seq.items[at];
                let text = found.as_str().map(str::to_string);
                text.ok_or_else(|| wrong("tojson: a separator", "a string", found))
            };
            (style.item_separator, style.key_separator) = (part(0)?, part(1)?);
        }
        Some(other) => return Err(wrong("tojson: the separators", "two strings", &other)),
    }
    Writer::write(budget, &style, value)
}

/// Python's `repr`.
pub(super) fn repr(budget: &Budget, value: &Value) -> Outcome<String> {
    Writer::write(budget, &Style::new(false, None), value)
}

/// The indentation per level. In Python `True` is 1; negative numbers count as 0.
fn indentation(indent: Option<Value>) -> Outcome<Option<String>> {
    let indent = match indent {
        None | Some(Value::None) => return Ok(None),
        Some(value) => match (value.as_str(), value.as_int()) {
            (Some(text), _) => text.to_string(),
            (_, Some(width)) => " ".repeat(usize::try_from(width).unwrap_or(0).min(MAX_INDENT + 1)),
            _ => return Err(wrong("tojson: the indent", "an integer or a string", &value)),
        },
    };
    if indent.len() > MAX_INDENT {
        return Err(Fault::invalid(format!(
            "tojson: the indent has more than {MAX_INDENT} characters"
        )));
    }
    Ok(Some(indent))
}

/// Python's `pprint.pformat` of a value that fits into a line: `repr` with the keys of dictionaries in order.
pub(super) fn pretty(budget: &Budget, value: &Value) -> Outcome<String> {
    let mut style = Style::new(false, None);
    style.sort_keys = true;
    Writer::write(budget, &style, value)
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
}

struct Writer<'a> {
    budget: &'a Budget,
    style: &'a Style,
    out: String,
    charged: usize,
}

impl Writer<'_> {
    fn write(budget: &Budget, style: &Style, value: &Value) -> Outcome<String> {
        let mut writer = Writer {
            budget,
            style,
            out: String::new(),
            charged: 0,
        };
        writer.value(value, 0)?;
        writer.charge()?;
        Ok(writer.out)
    }

    /// Uses the budget for the text written since the last call.
    fn charge(&mut self) -> Outcome<()> {
        let written = self.out.len() - self.charged;
        self.charged = self.out.len();
        self.budget.bytes(written as u64 + 8)
    }

    fn value(&mut self, value: &Value, depth: usize) -> Outcome<()> {
        if depth > MAX_VALUE_DEPTH as usize {
            let message = format!("a value is nested {depth} levels deep, expected at most {MAX_VALUE_DEPTH}");
            return Err(Fault::new("limit", message));
        }
        self.charge()?;
        let json = self.style.json;
        match value {
            Value::None => self.out.push_str(if json { "null" } else { "None" }),
            Value::Bool(flag) => self.out.push_str(match (json, flag) {
                (true, true) => "true",
                (true, false) => "false",
                (false, true) => "True",
                (false, false) => "False",
            }),
            Value::Int(number) => self.out.push_str(&number.to_string()),
            Value::Float(number) => self.out.push_str(&float(*number, json)),
            Value::Str(text) => self.string(text)?,
            Value::Markup(text) => {
                self.out.push_str(if json { "" } else { "Markup(" });
                self.string(text)?;
                self.out.push_str(if json { "" } else { ")" });
            }
            Value::List(seq) => self.items(&seq.items, ['[', ']'], depth)?,
            Value::Tuple(seq) if json => self.items(&seq.items, ['[', ']'], depth)?,
            Value::Tuple(seq) => self.items(&seq.items, ['(', ')'], depth)?,
            Value::Dict(dict) => {
                let pairs = dict.map.iter().map(|(key, value)| (key.value(), value));
                self.pairs(pairs.collect(), depth)?;
            }
            other if json => {
                let kind = other.kind();
                return Err(Fault::invalid(format!(
                    "Object of type {kind} is not JSON serializable"
                )));
            }
            other => self.object(other, depth)?,
        }
        Ok(())
    }

    fn items(&mut self, items: &[Value], [open, close]: [char; 2], depth: usize) -> Outcome<()> {
        self.out.push(open);
        for (i, item) in items.iter().enumerate() {
            self.separate(i == 0, depth + 1);
            self.value(item, depth + 1)?;
        }
        if items.len() == 1 && open == '(' {
            self.out.push(',');
        }
        self.end(close, items.is_empty(), depth)
    }

    fn pairs(&mut self, mut pairs: Vec<(&Value, &Value)>, depth: usize) -> Outcome<()> {
        if self.style.sort_keys {
            let numbers = pairs.iter().all(|(key, _)| compare_numbers(key, key).is_some());
            let mixed = !numbers && pairs.len() > 1 && pairs.iter().any(|(key, _)| key.as_str().is_none());
            if mixed && self.style.json {
                return Err(Fault::invalid("tojson: keys of different types cannot be sorted"));
            }
            pairs.sort_by(|(a, _), (b, _)| match (compare_numbers(a, b), a.as_str(), b.as_str()) {
                (Some(order), ..) => order.unwrap_or(Ordering::Equal),
                (_, Some(a), Some(b)) => a.cmp(b),
                _ => a.kind().cmp(b.kind()),
            });
        }
        self.out.push('{');
        for (i, (key, value)) in pairs.iter().enumerate() {
            self.separate(i == 0, depth + 1);
            match key {
                _ if !self.style.json => self.value(key, depth + 1)?,
                Value::Str(text) | Value::Markup(text) => self.string(text)?,
                Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_) => {
                    self.out.push('"');
                    self.value(key, depth + 1)?;
                    self.out.push('"');
                }
                other => return Err(Fault::invalid(format!("tojson: a key cannot be a {}", other.kind()))),
            }
            let separator = if self.style.json {
                &self.style.key_separator
            } else {
                ": "
            };
            self.out.push_str(separator);
            self.value(value, depth + 1)?;
        }
        self.end('}', pairs.is_empty(), depth)
    }

    /// The `repr` of a value that has no JSON form. Python writes addresses for some, which have no use.
    fn object(&mut self, value: &Value, depth: usize) -> Outcome<()> {
        match value {
            Value::Undefined(_) => self.out.push_str("Undefined"),
            Value::View(dict, View::Items) => {
                self.out.push_str("dict_items([");
                for (i, (key, value)) in dict.map.iter().enumerate() {
                    self.separate(i == 0, depth);
                    self.items(&[key.value().clone(), value.clone()], ['(', ')'], depth + 2)?;
                }
                self.out.push_str("])");
            }
            Value::View(dict, which) => {
                let keys = *which == View::Keys;
                self.out.push_str(if keys { "dict_keys(" } else { "dict_values(" });
                let items: Vec<Value> = match keys {
                    true => dict.map.keys().map(|key| key.value().clone()).collect(),
                    false => dict.map.values().cloned().collect(),
                };
                self.items(&items, ['[', ']'], depth + 1)?;
                self.out.push(')');
            }
            Value::Range(bounds) => {
                let [start, stop, step] = **bounds;
                self.out.push_str(&match step {
                    1 => format!("range({start}, {stop})"),
                    _ => format!("range({start}, {stop}, {step})"),
                });
            }
            Value::Namespace(cells) => {
                self.out.push_str("<TemplateNamespace {");
                for (i, (name, value)) in cells.pairs().iter().enumerate() {
                    self.separate(i == 0, depth);
                    self.string(name)?;
                    self.out.push_str(": ");
                    self.value(value, depth + 1)?;
                }
                self.out.push_str("}>");
            }
            Value::Macro(closure) => match &closure.code.name {
                Some(name) => {
                    self.out.push_str("<Macro ");
                    self.string(name)?;
                    self.out.push('>');
                }
                None => self.out.push_str("<Macro anonymous>"),
            },
            Value::Loop(state) => {
                let index = state.index0.get() + 1;
                let length = state.length.get().map_or("?".to_string(), |length| length.to_string());
                self.out.push_str(&format!("<LoopContext {index}/{length}>"));
            }
            Value::Method(method) => {
                let (receiver, name) = &**method;
                self.out
                    .push_str(&format!("<built-in method {name} of {} object>", receiver.kind()));
            }
            other => self.out.push_str(&format!("<{} object>", other.kind())),
        }
        Ok(())
    }

    fn separate(&mut self, first: bool, depth: usize) {
        if !first {
            self.out.push_str(&self.style.item_separator);
        }
        self.new_line(depth);
    }

    fn end(&mut self, bracket: char, empty: bool, depth: usize) -> Outcome<()> {
        if !empty {
            self.new_line(depth);
        }
        self.out.push(bracket);
        self.charge()
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.style.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
    }

    fn string(&mut self, text: &str) -> Outcome<()> {
        self.budget.bytes(text.len() as u64)?;
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
                c if json || is_printable(c) => self.out.push(c),
                c => self.out.push_str(&escape(c)),
            }
        }
        self.out.push(quote);
        Ok(())
    }
}

/// A character as Python's escape of its number.
pub(super) fn escape(c: char) -> String {
    match u32::from(c) {
        number @ ..0x100 => format!("\\x{number:02x}"),
        number @ 0x100..0x10000 => format!("\\u{number:04x}"),
        number => format!("\\U{number:08x}"),
    }
}

/// A float as Python's `json.dumps` or `repr` writes it.
pub(super) fn float(value: f64, json: bool) -> String {
    let [nan, infinity] = if json { ["NaN", "Infinity"] } else { ["nan", "inf"] };
    if value.is_nan() {
        return nan.to_string();
    }
    if value.is_infinite() {
        return format!("{}{infinity}", if value < 0.0 { "-" } else { "" });
    }
    let mut shortest = format!("{value:e}");
    // Of two shortest texts that are equally near, Python takes the one with the even digit.
    let digits = shortest
        .bytes()
        .take_while(|b| *b != b'e')
        .filter(u8::is_ascii_digit)
        .count();
    let even = format!("{value:.*e}", digits - 1);
    if even.parse() == Ok(value) {
        shortest = even;
    }
    let (mantissa, exponent) = shortest.split_once('e').unwrap_or((&shortest, "0"));
    match exponent.parse::<i32>().unwrap_or(0) {
        decimals @ -4..16 => {
            let after = (digits as i32 - 1 - decimals).max(1) as usize;
            format!("{value:.after$}")
        }
        exponent => format!("{mantissa}e{exponent:+03}"),
    }
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
            (0.1 * 9_007_199_254_740_992.0, "900719925474099.2"),
            (f64::NEG_INFINITY, "-Infinity"),
        ] {
            assert_eq!(float(value, true), expected);
        }
    }
}

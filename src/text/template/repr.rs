//! Converts values to text like Python's `str`, and charges fuel while the text grows.
//!
//! minijinja itself charges after a conversion, which is too late for a value that contains another one very often.

use super::json::python_float;
use minijinja::value::{Rest, Value, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, Output, State};
use std::fmt::Write;

/// Deepest nesting of a value.
const MAX_DEPTH: usize = 200;

/// Replaces the formatter and the filters with which minijinja converts values to text.
pub(super) fn install(environment: &mut Environment) {
    environment.set_formatter(|out: &mut Output, state: &mut State, value: &Value| {
        match value.as_str() {
            Some(text) => out.write_str(text),
            None => out.write_str(&text(state, value)?),
        }
        .map_err(Error::from)
    });
    environment.add_filter("string", |state: &State, value: &Value| text(state, value));
    // Templates cannot use this name, because it contains a space.
    environment.add_filter("minijinja join", minijinja::filters::join);
    environment.add_filter("join", |state: &mut State, args: Rest<ValueOrKwargs>| {
        metered(state, "minijinja join", &args.into_values())
    });
    environment.add_filter("minijinja format", minijinja::filters::format);
    environment.add_filter("format", |state: &mut State, args: Rest<ValueOrKwargs>| {
        metered(state, "minijinja format", &args.into_values())
    });
    environment.add_filter("pprint", |state: &State, value: &Value| repr(state, value));
}

/// `str(value)`.
pub(super) fn text(state: &State, value: &Value) -> Result<String, Error> {
    match value.as_str() {
        Some(text) => Ok(text.to_string()),
        None if value.is_undefined() => Ok(String::new()),
        None => repr(state, value),
    }
}

/// `repr(value)`.
fn repr(state: &State, value: &Value) -> Result<String, Error> {
    let mut writer = Writer {
        state,
        out: String::new(),
        charged: 0,
    };
    writer.value(value, 0)?;
    Ok(writer.out)
}

/// Charges fuel for the text of every container among `args`, then calls minijinja's `filter`.
fn metered(state: &mut State, filter: &str, args: &[Value]) -> Result<Value, Error> {
    for arg in args.iter().filter(|arg| arg.as_object().is_some()) {
        repr(state, arg)?;
    }
    state.apply_filter(filter, args)
}

struct Writer<'a> {
    state: &'a State<'a, 'a>,
    out: String,
    charged: usize,
}

impl Writer<'_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            let message = format!("the value is nested {depth} levels deep, expected at most {MAX_DEPTH}");
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
        self.state
            .consume_fuel(1 + (self.out.len() - self.charged) as u64 / 32)?;
        self.charged = self.out.len();
        match value.kind() {
            ValueKind::Undefined => self.out.push_str("Undefined"),
            ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
                Ok(number) if number.is_finite() => self.out.push_str(&python_float(number)),
                Ok(number) if number.is_nan() => self.out.push_str("nan"),
                Ok(number) => self.out.push_str(if number > 0.0 { "inf" } else { "-inf" }),
                Err(err) => return Err(err),
            },
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let (open, close) = if value.is_tuple() { ('(', ')') } else { ('[', ']') };
                self.out.push(open);
                let mut items = 0;
                for item in value.try_iter()?.checked() {
                    if items > 0 {
                        self.out.push_str(", ");
                    }
                    items += 1;
                    self.value(&item?, depth + 1)?;
                }
                if items == 1 && value.is_tuple() {
                    self.out.push(',');
                }
                self.out.push(close);
            }
            ValueKind::Map => {
                self.out.push('{');
                for (i, key) in value.try_iter()?.checked().enumerate() {
                    let key = key?;
                    if i > 0 {
                        self.out.push_str(", ");
                    }
                    self.value(&key, depth + 1)?;
                    self.out.push_str(": ");
                    self.value(&value.get_item(&key)?, depth + 1)?;
                }
                self.out.push('}');
            }
            // Integers, booleans, none, and objects of minijinja that contain no values of the template.
            _ => write!(self.out, "{value}").map_err(Error::from)?,
        }
        Ok(())
    }

    fn string(&mut self, text: &str) {
        let quote = if text.contains('\'') && !text.contains('"') {
            '"'
        } else {
            '\''
        };
        self.out.push(quote);
        for c in text.chars() {
            match c {
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                c if c == quote => self.out.extend(['\\', c]),
                c if c.is_control() => self.out.push_str(&format!("\\x{:02x}", u32::from(c))),
                c => self.out.push(c),
            }
        }
        self.out.push(quote);
    }
}

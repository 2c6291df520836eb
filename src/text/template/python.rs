//! Methods of Python's `str`, `list` and `dict` that templates call, and filters and tests with Python's results.
//!
//! Adds methods that `minijinja-contrib` lacks, and replaces those whose results differ from Python's.

use super::repr;
use minijinja::value::{Kwargs, Rest, Value, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State};
use minijinja_contrib::pycompat;

/// Most digits of a width or precision in `str.format`.
const MAX_FORMAT_DIGITS: usize = 4;

/// Calls the method `name` of `value`, for methods that minijinja itself does not have.
pub(super) fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            // Charge for reading the string once. minijinja charges for results.
            state.consume_fuel(text.len() as u64 / 64)?;
            match string_method(state, text, name, args)? {
                Some(result) => Ok(result),
                None => pycompat::unknown_method_callback(state, value, name, args),
            }
        }
        ValueKind::Seq if name == "index" => {
            let (what,): (&Value,) = from_args(args)?;
            for (i, item) in value.try_iter()?.checked().enumerate() {
                if item? == *what {
                    return Ok(Value::from(i));
                }
            }
            Err(invalid("index: the value is not in the list"))
        }
        // Values are immutable, so no copy is needed.
        ValueKind::Seq | ValueKind::Map if name == "copy" => {
            let () = from_args(args)?;
            Ok(value.clone())
        }
        ValueKind::Seq | ValueKind::Map
            if matches!(
                name,
                "append"
                    | "clear"
                    | "extend"
                    | "insert"
                    | "pop"
                    | "popitem"
                    | "remove"
                    | "setdefault"
                    | "sort"
                    | "update"
            ) =>
        {
            Err(invalid(format!(
                "'{name}' is not supported: values cannot be changed in place"
            )))
        }
        _ => pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// Replaces filters, tests and functions of minijinja that differ from those of Jinja.
pub(super) fn install(environment: &mut Environment) {
    environment.add_test("iterable", is_iterable);
    environment.add_test("sequence", is_sequence);
    environment.add_function("cycler", |items: Rest<Value>| {
        minijinja_contrib::globals::cycler(items.0)
    });
    environment.add_function("joiner", minijinja_contrib::globals::joiner);
    environment.add_filter(
        "int",
        |state: &State, value: &Value, default: Option<Value>, base: Option<u32>, options: Kwargs| {
            let default = default_of(default, &options, Value::from(0))?;
            minijinja::filters::int(state, value, Some(default), base, options)
        },
    );
    environment.add_filter(
        "float",
        |state: &State, value: &Value, default: Option<Value>, options: Kwargs| {
            let default = default_of(default, &options, Value::from(0.0))?;
            minijinja::filters::float(state, value, Some(default), options)
        },
    );
}

/// The argument `default` of `int` and `float`, which in Jinja have one even if the template gives none.
fn default_of(positional: Option<Value>, options: &Kwargs, otherwise: Value) -> Result<Value, Error> {
    match positional {
        Some(default) => Ok(default),
        None => Ok(options.get::<Option<Value>>("default")?.unwrap_or(otherwise)),
    }
}

/// Whether Python's `iter(value)` succeeds. An undefined value is an empty iterable.
fn is_iterable(value: &Value) -> bool {
    !matches!(value.kind(), ValueKind::None | ValueKind::Bool | ValueKind::Number) && value.try_iter().is_ok()
}

/// Whether the value has a length and items, like strings and maps.
fn is_sequence(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Undefined
    ) || (value.kind() == ValueKind::Iterable && value.len().is_some())
}

fn string_method(state: &State, text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let position = |at: Option<usize>| at.map(|at| text[..at].chars().count());
    Ok(Some(match name {
        "split" | "rsplit" => split(state, text, name, args)?,
        "partition" => {
            let (sep,): (&str,) = from_args(args)?;
            let (head, sep, tail) = match text.split_once(nonempty(sep)?) {
                Some((head, tail)) => (head, sep, tail),
                None => (text, "", ""),
            };
            tuple([head, sep, tail])
        }
        "rpartition" => {
            let (sep,): (&str,) = from_args(args)?;
            let (head, sep, tail) = match text.rsplit_once(nonempty(sep)?) {
                Some((head, tail)) => (head, sep, tail),
                None => ("", "", text),
            };
            tuple([head, sep, tail])
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "index" | "rindex" => {
            let (what,): (&str,) = from_args(args)?;
            match position(if name == "index" {
                text.find(what)
            } else {
                text.rfind(what)
            }) {
                Some(at) => Value::from(at),
                None => return Err(invalid(format!("{name}: the substring is not found"))),
            }
        }
        "isdecimal" => {
            let () = from_args(args)?;
            Value::from(!text.is_empty() && text.chars().all(char::is_numeric))
        }
        "casefold" => {
            let () = from_args(args)?;
            Value::from(text.to_lowercase())
        }
        "swapcase" => {
            let () = from_args(args)?;
            let swap = |c: char| -> String {
                if c.is_uppercase() {
                    c.to_lowercase().collect()
                } else {
                    c.to_uppercase().collect()
                }
            };
            Value::from(text.chars().map(swap).collect::<String>())
        }
        "title" => {
            let () = from_args(args)?;
            Value::from(title(text))
        }
        "join" => {
            let (items,): (&Value,) = from_args(args)?;
            Value::from(join(state, text, items)?)
        }
        // Limit widths and charge for the text of containers, which minijinja's version does not.
        "format" => {
            for arg in args.iter().filter(|arg| arg.as_object().is_some()) {
                repr::text(state, arg)?;
            }
            let digits = |c: char| !c.is_ascii_digit();
            if text.split(digits).any(|run| run.len() > MAX_FORMAT_DIGITS) {
                return Err(invalid(format!(
                    "format: a width has more than {MAX_FORMAT_DIGITS} digits"
                )));
            }
            if text.match_indices('{').any(|(at, _)| {
                let field = &text[at + 1..];
                let field = &field[..field.find('}').unwrap_or(field.len())];
                field.find(':').is_some_and(|spec| field[spec..].contains('{'))
            }) {
                return Err(invalid("format: widths given as arguments are not supported"));
            }
            return Ok(None);
        }
        "ljust" | "rjust" | "center" | "zfill" => pad(state, text, name, args)?,
        _ => return Ok(None),
    }))
}

/// `str.split` and `str.rsplit`. Without `sep` they split at runs of white space; a negative `maxsplit` is no limit.
fn split(state: &State, text: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let (sep, limit, kwargs): (Option<Value>, Option<Value>, Kwargs) = from_args(args)?;
    let given = |value: Option<Value>, name| -> Result<Option<Value>, Error> {
        let value = if value.is_some() {
            value
        } else {
            kwargs.get::<Option<Value>>(name)?
        };
        Ok(value.filter(|v| !v.is_none()))
    };
    let (sep, limit) = (given(sep, "sep")?, given(limit, "maxsplit")?);
    kwargs.assert_all_used()?;
    let limit = match limit {
        Some(limit) => usize::try_from(i64::try_from(limit)?).unwrap_or(usize::MAX),
        None => usize::MAX,
    };
    let right = name == "rsplit";
    let parts: Vec<&str> = match &sep {
        Some(sep) => {
            let sep = sep
                .as_str()
                .ok_or_else(|| invalid(format!("{name}: the separator is not a string")))?;
            let sep = nonempty(sep)?;
            state.consume_fuel(text.matches(sep).count().min(limit) as u64)?;
            let pieces = limit.saturating_add(1);
            if right {
                text.rsplitn(pieces, sep).collect()
            } else {
                text.splitn(pieces, sep).collect()
            }
        }
        None => {
            state.consume_fuel(text.split_whitespace().count().min(limit) as u64)?;
            let mut parts = Vec::new();
            let mut rest = if right { text.trim_end() } else { text.trim_start() };
            while !rest.is_empty() {
                let gap = if right {
                    rest.rfind(char::is_whitespace)
                } else {
                    rest.find(char::is_whitespace)
                };
                let Some(at) = gap.filter(|_| parts.len() < limit) else {
                    parts.push(if right { rest.trim_start() } else { rest });
                    break;
                };
                if right {
                    let start = at + rest[at..].chars().next().map_or(0, char::len_utf8);
                    parts.push(&rest[start..]);
                    rest = rest[..at].trim_end();
                } else {
                    parts.push(&rest[..at]);
                    rest = rest[at..].trim_start();
                }
            }
            parts
        }
    };
    let values = parts.into_iter().map(Value::from);
    Ok(Value::from(if right {
        values.rev().collect::<Vec<_>>()
    } else {
        values.collect()
    }))
}

fn join(state: &State, sep: &str, items: &Value) -> Result<String, Error> {
    let mut out = String::new();
    for (i, item) in items.try_iter()?.checked().enumerate() {
        let item = item?;
        let Some(text) = item.as_str() else {
            return Err(invalid(format!(
                "join: item {i} is of type {}, expected a string",
                item.kind()
            )));
        };
        state.consume_fuel((sep.len() + text.len()) as u64 / 64)?;
        if i > 0 {
            out.push_str(sep);
        }
        out.push_str(text);
    }
    Ok(out)
}

fn pad(state: &State, text: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let (width, fill): (i64, Option<&str>) = from_args(args)?;
    let mut fill_chars = fill.unwrap_or(if name == "zfill" { "0" } else { " " }).chars();
    let (Some(fill), None) = (fill_chars.next(), fill_chars.next()) else {
        return Err(invalid(format!("{name}: the fill character is not one character")));
    };
    let missing = usize::try_from(width).unwrap_or(0).saturating_sub(text.chars().count());
    state.consume_fuel((missing as u64).saturating_mul(4) / 64)?;
    let run = |n: usize| std::iter::repeat_n(fill, n).collect::<String>();
    Ok(Value::from(match name {
        "ljust" => format!("{text}{}", run(missing)),
        "rjust" => format!("{}{text}", run(missing)),
        "zfill" => {
            let digits = text.trim_start_matches(['+', '-']);
            let sign = if text.len() - digits.len() == 1 { &text[..1] } else { "" };
            format!("{sign}{}{}", run(missing), &text[sign.len()..])
        }
        // If the padding is odd, Python puts the extra character on the left exactly if the width is odd.
        _ => {
            let left = missing / 2 + (missing & usize::try_from(width).unwrap_or(0) & 1);
            format!("{}{text}{}", run(left), run(missing - left))
        }
    }))
}

fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut inside_word = false;
    for c in text.chars() {
        if inside_word {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
        inside_word = c.is_alphabetic();
    }
    out
}

fn tuple(items: [&str; 3]) -> Value {
    Value::from(minijinja::value::Tuple::from(items.map(Value::from)))
}

fn nonempty(sep: &str) -> Result<&str, Error> {
    if sep.is_empty() {
        Err(invalid("the separator is empty"))
    } else {
        Ok(sep)
    }
}

fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

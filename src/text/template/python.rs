//! Methods of Python's `str`, `list` and `dict` that templates call, Python's `str`, and filters and tests with Python's
//! results.
//!
//! Adds methods that `minijinja-contrib` lacks, and replaces those whose results differ from Python's.

use super::write::{invalid, repr};
use minijinja::value::{Kwargs, Rest, Tuple, Value, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, Output, State};
use minijinja_contrib::pycompat;

/// Most digits of a width or precision in `str.format`.
const MAX_FORMAT_DIGITS: usize = 4;

/// Methods that change a list or a dictionary.
const MUTATING: &str = "append clear extend insert pop popitem remove setdefault sort update";

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
        ValueKind::Seq | ValueKind::Map if MUTATING.split(' ').any(|method| method == name) => Err(invalid(format!(
            "'{name}' is not supported: values cannot be changed in place"
        ))),
        _ => pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// Replaces the formatter, and filters, tests and functions of minijinja that differ from those of Jinja.
pub(super) fn install(environment: &mut Environment) {
    environment.set_formatter(|out: &mut Output, state: &mut State, value: &Value| {
        let written = match value.as_str() {
            Some(text) => out.write_str(text),
            None => out.write_str(&text(state, value)?),
        };
        written.map_err(Error::from)
    });
    environment.add_filter("string", text);
    environment.add_filter("pprint", repr);
    // Templates cannot use these names, because they contain a space.
    environment.add_filter("minijinja join", minijinja::filters::join);
    environment.add_filter("minijinja format", minijinja::filters::format);
    for (filter, original) in [("join", "minijinja join"), ("format", "minijinja format")] {
        environment.add_filter(filter, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            charge_containers(state, &args)?;
            state.apply_filter(original, &args)
        });
    }
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

/// `str(value)`, for which fuel is charged while the text grows.
pub(super) fn text(state: &State, value: &Value) -> Result<String, Error> {
    match value.as_str() {
        Some(text) => Ok(text.to_string()),
        None if value.is_undefined() => Ok(String::new()),
        None => repr(state, value),
    }
}

/// Charges fuel for the text of every container among `args`, which minijinja does only after a conversion.
fn charge_containers(state: &State, args: &[Value]) -> Result<(), Error> {
    let mut containers = args.iter().filter(|arg| arg.as_object().is_some());
    containers.try_for_each(|arg| repr(state, arg).map(drop))
}

fn string_method(state: &State, text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match name {
        "split" | "rsplit" => split(state, text, name, args)?,
        "partition" | "rpartition" => {
            let (sep,): (&str,) = from_args(args)?;
            let sep = nonempty(sep)?;
            let parts = match name {
                "partition" => text
                    .split_once(sep)
                    .map_or([text, "", ""], |(head, tail)| [head, sep, tail]),
                _ => text
                    .rsplit_once(sep)
                    .map_or(["", "", text], |(head, tail)| [head, sep, tail]),
            };
            Value::from(Tuple::from(parts.map(Value::from)))
        }
        "removeprefix" | "removesuffix" => {
            let (affix,): (&str,) = from_args(args)?;
            let rest = match name {
                "removeprefix" => text.strip_prefix(affix),
                _ => text.strip_suffix(affix),
            };
            Value::from(rest.unwrap_or(text))
        }
        "index" | "rindex" => {
            let (what,): (&str,) = from_args(args)?;
            let found = if name == "index" {
                text.find(what)
            } else {
                text.rfind(what)
            };
            let at = found.ok_or_else(|| invalid(format!("{name}: the substring is not found")))?;
            Value::from(text[..at].chars().count())
        }
        "isdecimal" => {
            let () = from_args(args)?;
            Value::from(!text.is_empty() && text.chars().all(char::is_numeric))
        }
        "casefold" => {
            let () = from_args(args)?;
            Value::from(text.to_lowercase())
        }
        "swapcase" | "title" => {
            let () = from_args(args)?;
            let mut inside_word = false;
            let change = |c: char| -> String {
                let lower = match name {
                    "swapcase" => c.is_uppercase(),
                    _ => std::mem::replace(&mut inside_word, c.is_alphabetic()),
                };
                if lower {
                    c.to_lowercase().collect()
                } else {
                    c.to_uppercase().collect()
                }
            };
            Value::from(text.chars().map(change).collect::<String>())
        }
        "join" => {
            let (items,): (&Value,) = from_args(args)?;
            Value::from(join(state, text, items)?)
        }
        // Limit widths and charge for the text of containers, which minijinja's version does not.
        "format" => {
            charge_containers(state, args)?;
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
        let value = match value {
            Some(value) => Some(value),
            None => kwargs.get::<Option<Value>>(name)?,
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
    let mut parts: Vec<&str> = Vec::new();
    if let Some(sep) = &sep {
        let sep = sep.as_str();
        let sep = nonempty(sep.ok_or_else(|| invalid(format!("{name}: the separator is not a string")))?)?;
        state.consume_fuel(text.matches(sep).count().min(limit) as u64)?;
        let pieces = limit.saturating_add(1);
        if right {
            parts.extend(text.rsplitn(pieces, sep));
        } else {
            parts.extend(text.splitn(pieces, sep));
        }
    } else {
        state.consume_fuel(text.split_whitespace().count().min(limit) as u64)?;
        let blank = char::is_whitespace;
        let mut rest = if right { text.trim_end() } else { text.trim_start() };
        while !rest.is_empty() {
            let cut = match right {
                true => rest.rsplit_once(blank).map(|(before, part)| (part, before.trim_end())),
                false => rest.split_once(blank).map(|(part, after)| (part, after.trim_start())),
            };
            let (part, left) = cut.filter(|_| parts.len() < limit).unwrap_or((rest, ""));
            parts.push(part);
            rest = left;
        }
    }
    if right {
        parts.reverse();
    }
    Ok(parts.into_iter().map(Value::from).collect())
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

fn nonempty(sep: &str) -> Result<&str, Error> {
    if sep.is_empty() {
        Err(invalid("the separator is empty"))
    } else {
        Ok(sep)
    }
}

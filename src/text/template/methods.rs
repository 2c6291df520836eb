//! The methods of Python's `str`, `dict`, `list`, `tuple`, numbers and of Jinja's objects. Those that change a value are
//! not allowed, as in Jinja's immutable sandbox.

use super::arguments::{Arguments, flag, int, int_or, text, text_or_none, wrong};
use super::limits::{Fault, Outcome};
use super::machine::Machine;
use super::text::{self as chars, Side};
use super::value::{Value, View, count};
use indexmap::IndexMap;
use std::sync::Arc;

const STR: &[&str] = &[
    "capitalize",
    "casefold",
    "center",
    "count",
    "encode",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "maketrans",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "translate",
    "upper",
    "zfill",
];
const DICT: &[&str] = &["copy", "fromkeys", "get", "items", "keys", "values"];
const LIST: &[&str] = &["copy", "count", "index"];
/// Methods that change a dictionary or a list.
const MUTATING: &[&str] = &[
    "append",
    "clear",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "reverse",
    "setdefault",
    "sort",
    "update",
];

/// Whether a value has a method of this name.
pub(super) fn exists(value: &Value, name: &str) -> bool {
    let names: &[&str] = match value {
        Value::Str(_) | Value::Markup(_) => STR,
        Value::Dict(_) => DICT,
        Value::List(_) => LIST,
        Value::Tuple(_) | Value::Range(_) => &["count", "index"],
        Value::View(_, View::Keys | View::Items) => &["isdisjoint"],
        Value::Int(_) | Value::Bool(_) => &["bit_count", "bit_length", "conjugate"],
        Value::Float(_) => &["conjugate", "is_integer"],
        Value::Loop(_) => &["changed", "cycle"],
        Value::Cycler(_) => &["next", "reset"],
        _ => &[],
    };
    names.contains(&name)
}

/// The reason why a method of a list or dictionary that changes it is undefined.
pub(super) fn mutating(value: &Value, name: &str) -> Option<String> {
    let changes = matches!(value, Value::List(_) | Value::Dict(_)) && MUTATING.contains(&name);
    changes.then(|| {
        format!(
            "'{}' of a {} is unsafe: a value cannot be changed in place",
            name,
            value.kind()
        )
    })
}

impl Machine<'_> {
    /// Calls a method for which [`exists`] holds.
    pub(super) fn method(&mut self, receiver: &Value, name: &Arc<str>, args: Arguments) -> Outcome<Value> {
        self.budget.steps(1)?;
        match receiver {
            Value::Str(text) | Value::Markup(text) => self.str_method(text, name, args),
            Value::Dict(_) => self.dict_method(receiver, name, args),
            Value::List(_) if **name == *"copy" => {
                args.none("copy")?;
                Ok(receiver.clone())
            }
            Value::List(_) | Value::Tuple(_) | Value::Range(_) => self.list_method(receiver, name, args),
            Value::View(..) => {
                let [other] = args.bind(name, [""], 1)?;
                for item in self.items(&other.unwrap_or(Value::None))? {
                    if self.contains(receiver, &item)? {
                        return Ok(Value::Bool(false));
                    }
                }
                Ok(Value::Bool(true))
            }
            Value::Loop(state) => {
                let items = args.unnamed(name)?;
                if **name == *"changed" {
                    return self.changed(state, Value::tuple(items)?);
                }
                if items.is_empty() {
                    return Err(Fault::invalid("no items for cycling given"));
                }
                let at = state.index0.get().rem_euclid(items.len() as i128) as usize;
                Ok(items[at].clone())
            }
            Value::Cycler(cycler) => {
                args.none(name)?;
                let (items, at) = (&cycler.0.items, &cycler.1);
                if **name == *"reset" {
                    at.set(0);
                    return Ok(Value::None);
                }
                let current = items[at.get()].clone();
                at.set((at.get() + 1) % items.len());
                Ok(current)
            }
            number => {
                args.none(name)?;
                let magnitude = number.as_int().unwrap_or(0).unsigned_abs();
                Ok(match (&**name, number) {
                    ("is_integer", Value::Float(number)) => Value::Bool(number.fract() == 0.0),
                    ("bit_length", _) => Value::Int(i128::from(128 - magnitude.leading_zeros())),
                    ("bit_count", _) => Value::Int(i128::from(magnitude.count_ones())),
                    (_, Value::Float(_)) => number.clone(),
                    _ => Value::Int(number.as_int().unwrap_or(0)),
                })
            }
        }
    }

    fn dict_method(&mut self, receiver: &Value, name: &str, args: Arguments) -> Outcome<Value> {
        let Value::Dict(dict) = receiver else {
            return Err(wrong(name, "a dictionary", receiver));
        };
        let view = |which| Value::View(dict.clone(), which);
        match name {
            "get" => {
                let [key, default] = args.bind(name, ["", ""], 1)?;
                let key = self.key_of(key.unwrap_or(Value::None))?;
                let found = dict.map.get(&key).cloned();
                Ok(found.or(default).unwrap_or(Value::None))
            }
            "fromkeys" => {
                let [keys, value] = args.bind(name, ["", ""], 1)?;
                let value = value.unwrap_or(Value::None);
                let mut map = IndexMap::new();
                for key in self.items(&keys.unwrap_or(Value::None))? {
                    map.insert(self.key_of(key)?, value.clone());
                }
                Value::dict(map)
            }
            _ => {
                args.none(name)?;
                Ok(match name {
                    "items" => view(View::Items),
                    "keys" => view(View::Keys),
                    "values" => view(View::Values),
                    // Nothing can change the copy.
                    _ => receiver.clone(),
                })
            }
        }
    }

    fn list_method(&mut self, receiver: &Value, name: &str, args: Arguments) -> Outcome<Value> {
        let items = self.items(receiver)?;
        let [wanted, start, stop] = match name {
            "count" => {
                let [wanted] = args.bind(name, [""], 1)?;
                [wanted, None, None]
            }
            _ => args.bind(name, ["", "", ""], 1)?,
        };
        let wanted = wanted.unwrap_or(Value::None);
        let (start, stop) = window(name, items.len(), &start, &stop)?;
        let mut found = 0;
        for (at, item) in items.iter().enumerate().take(stop).skip(start) {
            if self.equals(item, &wanted)? {
                if name == "index" {
                    return Ok(at.into());
                }
                found += 1;
            }
        }
        match name {
            "index" => Err(Fault::invalid("the value is not in the list")),
            _ => Ok(Value::Int(found)),
        }
    }

    fn str_method(&mut self, own: &Arc<str>, name: &str, args: Arguments) -> Outcome<Value> {
        self.budget.bytes(own.len() as u64)?;
        match name {
            "format" => self.format(own, &args),
            "format_map" => {
                let [map] = args.bind(name, [""], 1)?;
                let map = map.unwrap_or(Value::None);
                let Value::Dict(dict) = &map else {
                    return Err(wrong(name, "a dictionary", &map));
                };
                let names = dict
                    .map
                    .iter()
                    .filter_map(|(key, value)| Some((key.value().as_str()?.into(), value.clone())));
                let args = Arguments {
                    positional: Vec::new(),
                    named: names.collect(),
                };
                self.format(own, &args)
            }
            "join" => {
                let [items] = args.bind(name, [""], 1)?;
                let items = self.items(&items.unwrap_or(Value::None))?;
                self.join(own, &items, false)
            }
            "startswith" | "endswith" => self.affix(own, name, args),
            "find" | "rfind" | "index" | "rindex" | "count" => self.find(own, name, args),
            "replace" => {
                let [old, new, limit] = args.bind(name, ["", "", ""], 2)?;
                let (old, new) = (old.unwrap_or(Value::None), new.unwrap_or(Value::None));
                let limit = int_or(name, limit, -1)?;
                self.replace(own, text(name, &old)?, text(name, &new)?, limit)
            }
            "split" | "rsplit" => {
                let [separator, limit] = args.bind(name, ["sep", "maxsplit"], 0)?;
                let separator = text_or_none(name, &separator)?;
                if separator == Some("") {
                    return Err(Fault::invalid("empty separator"));
                }
                let limit = usize::try_from(int_or(name, limit, -1)?).unwrap_or(usize::MAX);
                let parts = match separator {
                    Some(separator) => own.matches(separator).take(limit).count(),
                    None => own.chars().filter(|c| chars::is_blank(*c)).take(limit).count(),
                };
                self.budget.items(parts as u64)?;
                let parts = chars::split(own, separator, limit, name == "rsplit");
                strings(parts)
            }
            "splitlines" => {
                let [keep] = args.bind(name, ["keepends"], 0)?;
                let lines = own.chars().filter(|c| chars::is_blank(*c)).count();
                self.budget.items(lines as u64)?;
                let lines = chars::lines(own, flag(keep));
                strings(lines)
            }
            "partition" | "rpartition" => {
                let [separator] = args.bind(name, [""], 1)?;
                let separator = separator.unwrap_or(Value::None);
                let separator = text(name, &separator)?;
                if separator.is_empty() {
                    return Err(Fault::invalid("empty separator"));
                }
                let parts = match name {
                    "partition" => own.split_once(separator),
                    _ => own.rsplit_once(separator),
                };
                let parts = match parts {
                    Some((before, after)) => [before, separator, after],
                    None if name == "partition" => [own, "", ""],
                    None => ["", "", own],
                };
                Value::tuple(parts.into_iter().map(Value::from).collect())
            }
            "strip" | "lstrip" | "rstrip" => {
                let [set] = args.bind(name, [""], 0)?;
                let side = match name {
                    "strip" => Side::Both,
                    "lstrip" => Side::Left,
                    _ => Side::Right,
                };
                Ok(chars::strip(own, side, text_or_none(name, &set)?).into())
            }
            "removeprefix" | "removesuffix" => {
                let [affix] = args.bind(name, [""], 1)?;
                let affix = affix.unwrap_or(Value::None);
                let affix = text(name, &affix)?;
                let rest = match name {
                    "removeprefix" => own.strip_prefix(affix),
                    _ => own.strip_suffix(affix),
                };
                Ok(rest.unwrap_or(own).into())
            }
            "center" | "ljust" | "rjust" | "zfill" | "expandtabs" => self.padded(own, name, args),
            "encode" | "maketrans" | "translate" => Err(Fault::invalid(format!("'{name}' is not supported"))),
            _ => {
                args.none(name)?;
                simple(own, name)
            }
        }
    }

    /// `startswith` and `endswith`, for a string or a tuple of strings.
    fn affix(&mut self, own: &str, name: &str, args: Arguments) -> Outcome<Value> {
        let [affix, start, stop] = args.bind(name, ["", "", ""], 1)?;
        let affix = affix.unwrap_or(Value::None);
        let affixes = match &affix {
            Value::Tuple(seq) => &seq.items[..],
            other => std::slice::from_ref(other),
        };
        let bounded = start.is_some() || stop.is_some();
        let length = if bounded { self.count(own)? } else { usize::MAX };
        let part = match bounded {
            true => {
                let (start, stop) = window(name, length, &start, &stop)?;
                (start <= stop && start <= length).then(|| middle(own, start, stop))
            }
            false => Some(own),
        };
        let mut found = false;
        for affix in affixes {
            let affix = text(name, affix)?;
            found |= part.is_some_and(|part| match name {
                "startswith" => part.starts_with(affix),
                _ => part.ends_with(affix),
            });
        }
        Ok(Value::Bool(found))
    }

    /// `find`, `index`, their variants from the right, and `count`.
    fn find(&mut self, own: &str, name: &str, args: Arguments) -> Outcome<Value> {
        let [wanted, start, stop] = args.bind(name, ["", "", ""], 1)?;
        let wanted = wanted.unwrap_or(Value::None);
        let wanted = text(name, &wanted)?;
        let (start, stop) = window(name, self.count(own)?, &start, &stop)?;
        let outside = start > stop || start > self.count(own)?;
        let part = if outside { "" } else { middle(own, start, stop) };
        if name == "count" {
            return Ok(if outside {
                Value::Int(0)
            } else {
                part.matches(wanted).count().into()
            });
        }
        let at = match name {
            _ if outside => None,
            "find" | "index" => part.find(wanted),
            _ => part.rfind(wanted),
        };
        match at {
            Some(at) => Ok((start + count(&part[..at])).into()),
            None if name.ends_with("find") => Ok(Value::Int(-1)),
            None => Err(Fault::invalid("substring not found")),
        }
    }

    /// Python's `str.replace`; all occurrences if `limit` is negative.
    pub(super) fn replace(&mut self, own: &str, old: &str, new: &str, limit: i128) -> Outcome<Value> {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let found = own.matches(old).take(limit).count() as u64;
        self.budget
            .bytes(own.len() as u64 + found.saturating_mul(new.len() as u64))?;
        Ok(own.replacen(old, new, limit).into())
    }

    /// The items with `separator` between them; items of any type if `all`.
    pub(super) fn join(&mut self, separator: &str, items: &[Value], all: bool) -> Outcome<Value> {
        let mut out = String::new();
        for (i, item) in items.iter().enumerate() {
            let part = match item.as_str() {
                None if !all => {
                    let message = format!("sequence item {i}: expected a string, found {}", item.described());
                    return Err(Fault::invalid(message));
                }
                _ => self.text(item)?,
            };
            let separator = if i == 0 { "" } else { separator };
            self.budget.bytes((separator.len() + part.len()) as u64)?;
            out.push_str(separator);
            out.push_str(&part);
        }
        Ok(out.into())
    }

    /// The methods that fill a string up to a width.
    fn padded(&mut self, own: &str, name: &str, args: Arguments) -> Outcome<Value> {
        let [width, fill] = match name {
            "expandtabs" => {
                let [width] = args.bind(name, ["tabsize"], 0)?;
                [width.or(Some(Value::Int(8))), None]
            }
            "zfill" => {
                let [width] = args.bind(name, [""], 1)?;
                [width, None]
            }
            _ => args.bind(name, ["", ""], 1)?,
        };
        let width = int(name, &width.unwrap_or(Value::None))?;
        let fill = fill.unwrap_or_else(|| if name == "zfill" { "0" } else { " " }.into());
        let fill = text(name, &fill)?;
        if count(fill) != 1 {
            return Err(Fault::invalid("the fill character must be exactly one character long"));
        }
        let times = if name == "expandtabs" {
            own.matches('\t').count() as u64
        } else {
            4
        };
        let wide = u64::try_from(width.max(0)).unwrap_or(u64::MAX);
        self.budget.bytes(wide.saturating_mul(times))?;
        let width = wide as usize;
        let length = self.count(own)?;
        let missing = width.saturating_sub(length);
        Ok(match name {
            "expandtabs" => chars::expand_tabs(own, width),
            "ljust" => format!("{own}{}", fill.repeat(missing)),
            "rjust" => format!("{}{own}", fill.repeat(missing)),
            "zfill" => {
                let sign = usize::from(own.starts_with(['+', '-']));
                format!("{}{}{}", &own[..sign], fill.repeat(missing), &own[sign..])
            }
            _ => {
                // Python puts the odd one to the left if the width is odd.
                let left = missing / 2 + (missing & width & 1);
                format!("{}{own}{}", fill.repeat(left), fill.repeat(missing - left))
            }
        }
        .into())
    }
}

/// The methods of a string that have no arguments.
fn simple(own: &str, name: &str) -> Outcome<Value> {
    let all = |test: fn(char) -> bool| Value::Bool(!own.is_empty() && own.chars().all(test));
    let cased =
        |test: fn(char) -> bool, other: fn(char) -> bool| Value::Bool(own.chars().any(test) && !own.chars().any(other));
    Ok(match name {
        "upper" => own.to_uppercase().into(),
        "lower" => own.to_lowercase().into(),
        "title" => chars::title(own).into(),
        "capitalize" => chars::capitalize(own).into(),
        "swapcase" => chars::swap_case(own).into(),
        "casefold" => chars::fold(own).into(),
        "isalnum" => all(chars::is_alnum),
        "isalpha" => all(chars::is_alpha),
        "isdecimal" => all(chars::is_decimal),
        "isdigit" => all(chars::is_digit),
        "isnumeric" => all(|c| chars::is_digit(c) || chars::is_numeric(c)),
        "isspace" => all(chars::is_blank),
        "isascii" => Value::Bool(own.is_ascii()),
        "isprintable" => Value::Bool(own.chars().all(chars::is_printable)),
        "isidentifier" => Value::Bool(chars::is_identifier(own)),
        "islower" => cased(char::is_lowercase, |c| c.is_uppercase() || chars::is_title(c)),
        "isupper" => cased(char::is_uppercase, |c| c.is_lowercase() || chars::is_title(c)),
        "istitle" => Value::Bool(chars::is_titled(own)),
        _ => return Err(Fault::invalid(format!("'{name}' is not supported"))),
    })
}

fn strings(parts: Vec<&str>) -> Outcome<Value> {
    Value::list(parts.into_iter().map(Value::from).collect())
}

/// The bounds of a search in `length` items, as Python adjusts them.
fn window(what: &str, length: usize, start: &Option<Value>, stop: &Option<Value>) -> Outcome<(usize, usize)> {
    let length = length as i128;
    let bound = |value: &Option<Value>, default: i128| -> Outcome<i128> {
        match value {
            None | Some(Value::None) => Ok(default),
            Some(value) => {
                let at = int(what, value)?;
                Ok(if at < 0 { at.saturating_add(length).max(0) } else { at })
            }
        }
    };
    let (start, stop) = (bound(start, 0)?, bound(stop, length)?.min(length));
    Ok((usize::try_from(start).unwrap_or(usize::MAX), stop as usize))
}

/// The characters from `start` to `stop`, which are in order.
fn middle(text: &str, start: usize, stop: usize) -> &str {
    let at = |n: usize| text.char_indices().nth(n).map_or(text.len(), |(at, _)| at);
    &text[at(start)..at(stop)]
}

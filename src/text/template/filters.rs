//! The filters for single values: text, numbers, defaults. Those for lists are in `sequences`.

use super::arguments::{Arguments, flag, int, int_or, text, text_or_none, wrong};
use super::arith::as_float;
use super::limits::{Fault, Outcome};
use super::machine::Machine;
use super::numerals::{Parsed, parse_float, parse_int};
use super::sequences;
use super::text::{self as chars, Side};
use super::value::Value;
use super::{arith, wrap, write};

/// A filter: what it makes of a value and arguments.
pub(super) type Filter = fn(&mut Machine, Value, Arguments) -> Outcome<Value>;

const FILTERS: &[(&str, Filter)] = &[
    ("abs", abs),
    ("attr", attr),
    ("batch", sequences::batch),
    ("capitalize", |m, v, a| m.on_text(v, a, "capitalize", chars::capitalize)),
    ("center", center),
    ("count", length),
    ("d", default),
    ("default", default),
    ("dictsort", sequences::dictsort),
    ("e", escape),
    ("escape", escape),
    ("filesizeformat", file_size),
    ("first", sequences::first),
    ("float", to_float),
    ("forceescape", force_escape),
    ("format", format),
    ("groupby", sequences::group_by),
    ("indent", indent),
    ("int", to_int),
    ("items", sequences::items),
    ("join", sequences::join),
    ("last", sequences::last),
    ("length", length),
    ("list", sequences::list),
    ("lower", |m, v, a| m.on_text(v, a, "lower", str::to_lowercase)),
    ("map", sequences::map),
    ("max", |m, v, a| sequences::extreme(m, v, a, true)),
    ("min", |m, v, a| sequences::extreme(m, v, a, false)),
    ("pprint", pretty),
    ("random", sequences::random),
    ("reject", |m, v, a| sequences::select(m, v, a, false, false)),
    ("rejectattr", |m, v, a| sequences::select(m, v, a, false, true)),
    ("replace", replace),
    ("reverse", sequences::reverse),
    ("round", round),
    ("safe", safe),
    ("select", |m, v, a| sequences::select(m, v, a, true, false)),
    ("selectattr", |m, v, a| sequences::select(m, v, a, true, true)),
    ("slice", sequences::slice),
    ("sort", sequences::sort),
    ("string", string),
    ("striptags", strip_tags),
    ("sum", sequences::sum),
    ("title", |m, v, a| m.on_text(v, a, "title", title)),
    ("tojson", |m, v, a| write::json(&m.budget, &v, a).map(Value::from)),
    ("trim", trim),
    ("truncate", truncate),
    ("unique", sequences::unique),
    ("upper", |m, v, a| m.on_text(v, a, "upper", str::to_uppercase)),
    ("urlencode", url_encode),
    ("wordcount", word_count),
    ("wordwrap", word_wrap),
    ("xmlattr", xml_attributes),
];

/// The filter of a name.
pub(super) fn find(name: &str) -> Option<Filter> {
    let found = FILTERS.iter().find(|(known, _)| *known == name);
    found.map(|(_, filter)| *filter)
}

impl Machine<'_> {
    /// `value | name(args)`
    pub(super) fn filter(&mut self, name: &str, value: Value, args: Arguments) -> Outcome<Value> {
        self.budget.steps(1)?;
        match find(name) {
            Some(filter) => filter(self, value, args),
            None => Err(Fault::new("unknown filter", format!("no such name: '{name}'"))),
        }
    }

    /// A filter without arguments on the text of a value.
    fn on_text(&mut self, value: Value, args: Arguments, what: &str, work: fn(&str) -> String) -> Outcome<Value> {
        args.none(what)?;
        let text = self.text(&value)?;
        self.budget.bytes(text.len() as u64)?;
        Ok(work(&text).into())
    }
}

fn abs(_: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    args.none("abs")?;
    match (&value, value.as_int()) {
        (_, Some(number)) => number.checked_abs().map(Value::Int).ok_or_else(arith::too_large),
        (Value::Float(number), _) => Ok(Value::Float(number.abs())),
        _ => Err(wrong("abs", "a number", &value)),
    }
}

fn attr(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    let [name] = args.bind("attr", ["name"], 1)?;
    let name = name.unwrap_or(Value::None);
    let name = text("attr", &name)?;
    machine.attribute_only(&value, &name.into())
}

fn center(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    let [width] = args.bind("center", ["width"], 0)?;
    let args = Arguments {
        positional: vec![width.unwrap_or(Value::Int(80))],
        ..Arguments::default()
    };
    let text = machine.text(&value)?;
    machine.method(&Value::Str(text), &"center".into(), args)
}

fn length(_: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    args.none("length")?;
    match value.len() {
        Some(length) => Ok(length.into()),
        None => Err(Fault::invalid(format!(
            "object of type '{}' has no len()",
            value.kind()
        ))),
    }
}

fn default(_: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    let [default, boolean] = args.bind("default", ["default_value", "boolean"], 0)?;
    match value.is_undefined() || flag(boolean) && !value.truth() {
        true => Ok(default.unwrap_or_else(|| "".into())),
        false => Ok(value),
    }
}

fn escape(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    match value {
        Value::Markup(_) => args.none("escape").map(|()| value),
        _ => force_escape(machine, value, args),
    }
}

fn force_escape(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    args.none("escape")?;
    let text = machine.text(&value)?;
    machine.budget.bytes(6 * text.len() as u64)?;
    Ok(Value::Markup(chars::escape(&text).into()))
}

fn safe(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    args.none("safe")?;
    machine.text(&value).map(Value::Markup)
}

fn string(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    args.none("string")?;
    match value {
        Value::Markup(_) => Ok(value),
        _ => machine.text(&value).map(Value::Str),
    }
}

fn file_size(_: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    let [binary] = args.bind("filesizeformat", ["binary"], 0)?;
    let binary = flag(binary);
    let parsed = match value.as_str() {
        Some(text) => parse_float(text),
        None => as_float(&value),
    };
    let bytes = parsed.ok_or_else(|| wrong("filesizeformat", "a number", &value))?;
    if bytes == f64::NEG_INFINITY {
        return Err(wrong("filesizeformat", "a number", &value));
    }
    let base: f64 = if binary { 1024.0 } else { 1000.0 };
    if bytes == 1.0 {
        return Ok("1 Byte".into());
    }
    if bytes < base {
        return Ok(format!("{} Bytes", bytes.trunc() as i128).into());
    }
    let prefixes = ["k", "M", "G", "T", "P", "E", "Z", "Y"];
    let fits = |i: &usize| bytes < base.powi(*i as i32 + 2);
    let at = (0..prefixes.len()).find(fits).unwrap_or(prefixes.len() - 1);
    let size = base * bytes / base.powi(at as i32 + 2);
    Ok(match binary {
        true => format!("{size:.1} {}iB", prefixes[at].to_uppercase()),
        false => format!("{size:.1} {}B", prefixes[at]),
    }
    .into())
}

fn to_int(_: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    let [default, base] = args.bind("int", ["default", "base"], 0)?;
    let default = default.unwrap_or(Value::Int(0));
    let base = int_or("int", base, 10)?;
    let whole = |number: f64| match number.is_finite() {
        // Above this, an integer has more than 127 bits.
        true if number.abs() >= 1.7e38 => Err(arith::too_large()),
        true => Ok(Some(Value::Int(number as i128))),
        false => Ok(None),
    };
    let converted = match &value {
        Value::Undefined(reason) => return Err(Fault::invalid(&**reason)),
        Value::Float(number) if number.is_infinite() => {
            return Err(Fault::invalid("cannot convert float infinity to integer"));
        }
        Value::Float(number) => whole(*number)?,
        Value::Str(text) | Value::Markup(text) => {
            let radix = u32::try_from(base)
                .ok()
                .filter(|base| *base == 0 || (2..=36).contains(base));
            match radix.map(|radix| parse_int(text, radix)) {
                Some(Parsed::Int(number)) => Some(Value::Int(number)),
                Some(Parsed::TooLarge) => return Err(arith::too_large()),
                Some(Parsed::Invalid) | None => parse_float(text).map(whole).transpose()?.flatten(),
            }
        }
        other => other.as_int().map(Value::Int),
    };
    Ok(converted.unwrap_or(default))
}

fn to_float(_: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    let [default] = args.bind("float", ["default"], 0)?;
    let converted = match &value {
        Value::Undefined(reason) => return Err(Fault::invalid(&**reason)),
        other => match other.as_str() {
            Some(text) => parse_float(text),
            None => as_float(other),
        },
    };
    Ok(converted.map_or_else(|| default.unwrap_or(Value::Float(0.0)), Value::Float))
}

fn format(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    if !args.named.is_empty() && !args.positional.is_empty() {
        return Err(Fault::invalid("format takes positional or named arguments, not both"));
    }
    let text = machine.text(&value)?;
    let values = match args.named.is_empty() {
        true => Value::tuple(args.positional)?,
        false => Value::dict(
            args.named
                .into_iter()
                .map(|(name, value)| (name.into(), value))
                .collect(),
        )?,
    };
    machine.percent(&text, &values)
}

fn indent(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    let [width, first, blank] = args.bind("indent", ["width", "first", "blank"], 0)?;
    let own = text("indent", &value)?;
    let unit = match &width {
        None => " ".repeat(4),
        Some(width) => match width.as_str() {
            Some(text) => text.to_string(),
            None => {
                let width = int("indent", width)?.max(0);
                machine.budget.bytes(u64::try_from(width).unwrap_or(u64::MAX))?;
                " ".repeat(width as usize)
            }
        },
    };
    let (first, blank) = (flag(first), flag(blank));
    // With a line end, so that a last empty line counts.
    let own = format!("{own}\n");
    let lines = chars::lines(&own, false);
    let indented = (unit.len() as u64).saturating_mul(lines.len() as u64);
    machine.budget.bytes(indented.saturating_add(own.len() as u64))?;
    let mut out = String::new();
    for (i, line) in lines.iter().enumerate() {
        if i > 0 {
            out.push('\n');
        }
        let indents = if i == 0 { first } else { blank || !line.is_empty() };
        if indents {
            out.push_str(&unit);
        }
        out.push_str(line);
    }
    Ok(out.into())
}

fn pretty(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    args.none("pprint")?;
    let text = write::pretty(&machine.budget, &value)?;
    // Python breaks longer text into lines by rules of its own.
    if chars::lines(&text, false).len() > 1 || machine.count(&text)? > 80 {
        return Err(Fault::invalid(
            "pprint of a value whose text is longer than 80 characters is not supported",
        ));
    }
    Ok(text.into())
}

fn replace(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    let [old, new, count] = args.bind("replace", ["old", "new", "count"], 2)?;
    let own = machine.text(&value)?;
    let old = machine.text(&old.unwrap_or(Value::None))?;
    let new = machine.text(&new.unwrap_or(Value::None))?;
    let count = match count {
        None | Some(Value::None) => -1,
        Some(count) => int("replace", &count)?,
    };
    machine.replace(&own, &old, &new, count)
}

fn round(_: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    let [precision, method] = args.bind("round", ["precision", "method"], 0)?;
    let precision = int_or("round", precision, 0)?;
    let method = method.unwrap_or_else(|| "common".into());
    let places = i32::try_from(precision).ok().filter(|places| places.abs() <= 300);
    let places = places.ok_or_else(|| Fault::invalid("round: expected a precision of at most 300"))?;
    let number = as_float(&value).ok_or_else(|| wrong("round", "a number", &value))?;
    match (method.as_str(), value.as_int()) {
        (Some("common"), Some(number)) => round_int(number, places).map(Value::Int),
        (Some("common"), None) => Ok(Value::Float(round_float(number, places))),
        (Some(method @ ("ceil" | "floor")), _) => {
            let scale = 10f64.powi(places);
            let scaled = number * scale;
            if !scaled.is_finite() {
                return Err(Fault::invalid("round: the number is too large"));
            }
            let whole = if method == "ceil" {
                scaled.ceil()
            } else {
                scaled.floor()
            };
            // An integer has no negative zero.
            Ok(Value::Float((whole + 0.0) / scale))
        }
        _ => Err(Fault::invalid("method must be common, ceil or floor")),
    }
}

/// The nearest float with so many decimals; of two, the even one.
fn round_float(number: f64, places: i32) -> f64 {
    if !number.is_finite() {
        return number;
    }
    match usize::try_from(places) {
        // The text is that of the exact value.
        Ok(places) => format!("{number:.places$}").parse().unwrap_or(number),
        Err(_) => {
            let text = format!("{number:e}");
            let exponent: i32 = text
                .split_once('e')
                .and_then(|(_, exponent)| exponent.parse().ok())
                .unwrap_or(0);
            if let Ok(digits) = usize::try_from(exponent + places) {
                return format!("{number:.digits$e}").parse().unwrap_or(number);
            }
            let scale = 10f64.powi(-places);
            let rounded = (number / scale).round_ties_even() * scale;
            if rounded == 0.0 { 0f64.copysign(number) } else { rounded }
        }
    }
}

fn round_int(number: i128, places: i32) -> Outcome<i128> {
    let Some(unit) = 10i128.checked_pow(places.min(0).unsigned_abs()) else {
        return Ok(0);
    };
    let (down, rest) = (number.div_euclid(unit), number.rem_euclid(unit));
    let up = rest * 2 > unit || rest * 2 == unit && down % 2 != 0;
    (down + i128::from(up)).checked_mul(unit).ok_or_else(arith::too_large)
}

fn trim(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    let [set] = args.bind("trim", ["chars"], 0)?;
    let own = machine.text(&value)?;
    machine.charge(&own)?;
    Ok(chars::strip(&own, Side::Both, text_or_none("trim", &set)?).into())
}

/// Capitals after blanks, hyphens and brackets.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut word = String::new();
    let finish = |word: &mut String, out: &mut String| {
        let mut letters = word.chars();
        out.extend(letters.next().into_iter().flat_map(char::to_uppercase));
        out.push_str(&letters.as_str().to_lowercase());
        word.clear();
    };
    for c in text.chars() {
        if matches!(c, '-' | '(' | '{' | '[' | '<') || chars::is_blank(c) {
            finish(&mut word, &mut out);
            out.push(c);
        } else {
            word.push(c);
        }
    }
    finish(&mut word, &mut out);
    out
}

fn strip_tags(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    args.none("striptags")?;
    let own = machine.text(&value)?;
    machine.budget.bytes(2 * own.len() as u64)?;
    let mut kept = String::with_capacity(own.len());
    let mut rest = &own[..];
    while let Some(start) = rest.find('<') {
        let tag = &rest[start..];
        let end = match tag.strip_prefix("<!--") {
            Some(comment) => comment.find("-->").map(|end| end + 7),
            None => tag.find('>').map(|end| end + 1),
        };
        let Some(end) = end else { break };
        kept.push_str(&rest[..start]);
        rest = &tag[end..];
    }
    kept.push_str(rest);
    let words = chars::split(&kept, None, usize::MAX, false).join(" ");
    chars::unescape(&words).map(Value::from)
}

fn truncate(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    let names = ["length", "killwords", "end", "leeway"];
    let [length, kill, end, leeway] = args.bind("truncate", names, 0)?;
    let length = int_or("truncate", length, 255)?;
    let end = end.unwrap_or_else(|| "...".into());
    let end = text("truncate", &end)?;
    let leeway = match leeway {
        None | Some(Value::None) => 5,
        Some(leeway) => int("truncate", &leeway)?,
    };
    let kept = length - machine.count(end)? as i128;
    if kept < 0 || leeway < 0 {
        return Err(Fault::invalid(
            "truncate: the length is shorter than the end, or the leeway is negative",
        ));
    }
    if value
        .len()
        .is_some_and(|found| found as i128 <= length.saturating_add(leeway))
    {
        return Ok(value);
    }
    let own = text("truncate", &value)?;
    machine.budget.bytes(own.len() as u64)?;
    let mut cut: String = own.chars().take(kept as usize).collect();
    if !flag(kill)
        && let Some(at) = cut.rfind(' ')
    {
        cut.truncate(at);
    }
    Ok((cut + end).into())
}

fn url_encode(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    args.none("urlencode")?;
    let quote = |machine: &Machine, value: &Value, query: bool| -> Outcome<String> {
        let text = machine.text(value)?;
        machine.budget.bytes(3 * text.len() as u64)?;
        let mut out = String::with_capacity(text.len());
        for byte in text.bytes() {
            match byte {
                b' ' if query => out.push('+'),
                b'/' if query => out.push_str("%2F"),
                b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | b'_' | b'.' | b'-' | b'~' | b'/' => out.push(byte.into()),
                byte => out.push_str(&format!("%{byte:02X}")),
            }
        }
        Ok(out)
    };
    let pairs = match &value {
        Value::Str(_) | Value::Markup(_) => None,
        Value::Dict(dict) => {
            let pairs = dict.map.iter();
            Some(pairs.map(|(key, value)| [key.value().clone(), value.clone()]).collect())
        }
        other => match machine.try_items(other)? {
            None => None,
            Some(items) => {
                let mut pairs = Vec::new();
                for item in items {
                    let pair = <[Value; 2]>::try_from(machine.items(&item)?);
                    pairs.push(pair.map_err(|_| Fault::invalid("urlencode: expected pairs"))?);
                }
                Some(pairs)
            }
        },
    };
    let Some(pairs) = pairs else {
        return quote(machine, &value, false).map(Value::from);
    };
    let mut parts = Vec::new();
    for [key, value] in &pairs {
        parts.push(format!(
            "{}={}",
            quote(machine, key, true)?,
            quote(machine, value, true)?
        ));
    }
    Ok(parts.join("&").into())
}

fn word_count(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    args.none("wordcount")?;
    let own = machine.text(&value)?;
    machine.budget.bytes(own.len() as u64)?;
    let words = own.split(|c: char| !(c == '_' || chars::is_alnum(c)));
    Ok(words.filter(|word| !word.is_empty()).count().into())
}

fn word_wrap(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    let names = ["width", "break_long_words", "wrapstring", "break_on_hyphens"];
    let [width, long, separator, hyphens] = args.bind("wordwrap", names, 0)?;
    let width = int_or("wordwrap", width, 79)?;
    let width = usize::try_from(width).ok().filter(|width| *width > 0);
    let width = width.ok_or_else(|| Fault::invalid("wordwrap: the width must be positive"))?;
    let own = text("wordwrap", &value)?;
    let separator = text_or_none("wordwrap", &separator)?.unwrap_or("\n");
    let (long, hyphens) = (long.is_none_or(|v| v.truth()), hyphens.is_none_or(|v| v.truth()));
    let parts = own.len() / width + own.chars().filter(|c| chars::is_blank(*c)).count();
    machine.budget.items(parts as u64)?;
    machine.budget.bytes(8 * own.len() as u64)?;
    let mut lines = Vec::new();
    for line in chars::lines(own, false) {
        lines.push(wrap::wrap(line, width, long, hyphens).join(separator));
    }
    let lines: Vec<Value> = lines.into_iter().map(Value::from).collect();
    machine.join(separator, &lines, false)
}

fn xml_attributes(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    let [space] = args.bind("xmlattr", ["autospace"], 0)?;
    let Value::Dict(dict) = &value else {
        return Err(wrong("xmlattr", "a dictionary", &value));
    };
    let mut parts = Vec::new();
    for (key, value) in &dict.map {
        if matches!(value, Value::None | Value::Undefined(_)) {
            continue;
        }
        let name = text("xmlattr: a name", key.value())?;
        if name.contains(|c| matches!(c, ' ' | '\t'..='\r' | '/' | '>' | '=')) {
            return Err(Fault::invalid(format!("Invalid character in attribute name: '{name}'")));
        }
        let quoted = escape(machine, value.clone(), Arguments::default())?;
        machine.budget.bytes(6 * name.len() as u64)?;
        parts.push(format!(
            "{}=\"{}\"",
            chars::escape(name),
            quoted.as_str().unwrap_or_default()
        ));
    }
    let text = parts.join(" ");
    let spaced = space.is_none_or(|space| space.truth()) && !text.is_empty();
    Ok(if spaced { format!(" {text}") } else { text }.into())
}

//! The filters for lists and other iterables.

use super::arguments::{Arguments, flag, int, text, wrong};
use super::ast::{Binary, Comparison};
use super::limits::{Fault, Outcome};
use super::machine::{Machine, busy};
use super::text as chars;
use super::value::{Pending, Seq, Value, View};
use indexmap::IndexSet;
use std::cmp::Ordering;
use std::time::UNIX_EPOCH;

/// The path of `attribute=`: names and indices. None for the value itself.
fn path(attribute: &Value) -> Vec<Value> {
    match attribute {
        Value::None => Vec::new(),
        Value::Str(text) | Value::Markup(text) => {
            let part = |part: &str| match !part.is_empty() && part.chars().all(chars::is_digit) {
                true => part.parse().map_or_else(|_| Value::from(part), Value::Int),
                false => Value::from(part),
            };
            text.split('.').map(part).collect()
        }
        other => vec![other.clone()],
    }
}

impl Machine<'_> {
    /// What the path leads to. `default` replaces what is undefined on the way.
    fn follow(&mut self, item: &Value, path: &[Value], default: &Value) -> Outcome<Value> {
        let mut value = item.clone();
        for part in path {
            self.budget.steps(1)?;
            value = self.item(&value, part)?;
            if value.is_undefined() && !matches!(default, Value::None) {
                value = default.clone();
            }
        }
        Ok(value)
    }

    /// The keys by which items are ordered or compared: texts in lower case unless `exact`.
    fn key(&mut self, item: &Value, path: &[Value], default: &Value, exact: bool) -> Outcome<Value> {
        let key = self.follow(item, path, default)?;
        match key.as_str() {
            Some(text) if !exact => {
                self.budget.bytes(text.len() as u64)?;
                Ok(text.to_lowercase().into())
            }
            _ => Ok(key),
        }
    }

    /// Orders items by their keys; equal ones stay in order.
    fn sorted(&mut self, mut pairs: Vec<(Value, Value)>, reverse: bool) -> Outcome<Vec<Value>> {
        let mut fault = None;
        // A step for each comparison is paid in advance.
        let count = pairs.len() as u64;
        self.budget
            .steps(count * u64::from(count.checked_ilog2().unwrap_or(0) / 2))?;
        pairs.sort_by(|(a, _), (b, _)| {
            let order = if reverse {
                self.order("<", b, a)
            } else {
                self.order("<", a, b)
            };
            match order {
                Ok(order) => order.unwrap_or(Ordering::Equal),
                Err(err) => {
                    fault.get_or_insert(err);
                    Ordering::Equal
                }
            }
        });
        match fault {
            Some(fault) => Err(fault),
            None => Ok(pairs.into_iter().map(|(_, item)| item).collect()),
        }
    }

    /// The items of an iterable, or none of a value that is false.
    fn if_true(&mut self, value: &Value) -> Outcome<Vec<Value>> {
        if value.truth() {
            self.items(value)
        } else {
            Ok(Vec::new())
        }
    }
}

/// An iterator over what `work` makes of the items. It fails where `work` fails.
fn lazily(items: Vec<Value>, mut work: impl FnMut(Value) -> Outcome<Option<Value>>) -> Value {
    let mut done = Vec::new();
    let mut fault = None;
    for item in items {
        match work(item) {
            Ok(item) => done.extend(item),
            Err(err) => {
                fault = Some(err);
                break;
            }
        }
    }
    Pending::iterator("generator", done, fault)
}

/// An iterator that fails at once with the fault of `work`.
fn deferred(work: Outcome<Value>) -> Outcome<Value> {
    Ok(work.unwrap_or_else(|fault| Pending::iterator("generator", Vec::new(), Some(fault))))
}

pub(super) fn batch(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    let [count, fill] = args.bind("batch", ["linecount", "fill_with"], 1)?;
    let work = || {
        let count = int("batch", &count.unwrap_or(Value::None))?;
        let mut items = machine.items(&value)?;
        let size = usize::try_from(count).unwrap_or(0);
        if size == 0 && !items.is_empty() {
            // An empty list is as long as 0 before the first item is added to it, and never again.
            let empty = (count == 0).then(Vec::new);
            let lists = empty.into_iter().chain([items]).map(Value::list);
            return Ok(Pending::iterator("generator", lists.collect::<Outcome<_>>()?, None));
        }
        let missing = items.len().next_multiple_of(size.max(1)) - items.len();
        if let Some(fill) = fill.filter(|fill| !matches!(fill, Value::None)) {
            machine.budget.items(missing as u64)?;
            items.extend(std::iter::repeat_n(fill, missing));
        }
        let lists = items.chunks(size.max(1)).map(|chunk| Value::list(chunk.to_vec()));
        Ok(Pending::iterator("generator", lists.collect::<Outcome<_>>()?, None))
    };
    deferred(work())
}

pub(super) fn slice(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    let [slices, fill] = args.bind("slice", ["slices", "fill_with"], 1)?;
    let work = || {
        let items = machine.items(&value)?;
        let slices = int("slice", &slices.unwrap_or(Value::None))?;
        if slices == 0 {
            return Err(Fault::invalid("slice: division by zero"));
        }
        let slices = usize::try_from(slices).unwrap_or(0);
        machine.budget.items(slices as u64)?;
        let mut rest = &items[..];
        let mut lists = Vec::new();
        for number in 0..slices {
            let extra = number < items.len() % slices;
            let (part, more) = rest.split_at(items.len() / slices + usize::from(extra));
            rest = more;
            let mut part = part.to_vec();
            if let Some(fill) = fill.as_ref().filter(|fill| !extra && !matches!(fill, Value::None)) {
                part.push(fill.clone());
            }
            lists.push(Value::list(part)?);
        }
        Ok(Pending::iterator("generator", lists, None))
    };
    deferred(work())
}

pub(super) fn dictsort(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    let [exact, by, reverse] = args.bind("dictsort", ["case_sensitive", "by", "reverse"], 0)?;
    let Value::Dict(dict) = &value else {
        return Err(wrong("dictsort", "a dictionary", &value));
    };
    let by_value = match by.as_ref().map(Value::as_str) {
        None | Some(Some("key")) => false,
        Some(Some("value")) => true,
        _ => return Err(Fault::invalid("You can only sort by either \"key\" or \"value\"")),
    };
    machine.budget.items(dict.map.len() as u64)?;
    let exact = flag(exact);
    let mut pairs = Vec::new();
    for (key, value) in &dict.map {
        let by = if by_value { value } else { key.value() };
        let order = machine.key(by, &[], &Value::None, exact)?;
        pairs.push((order, Value::tuple(vec![key.value().clone(), value.clone()])?));
    }
    Value::list(machine.sorted(pairs, flag(reverse))?)
}

pub(super) fn first(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    args.none("first")?;
    let first = match &value {
        Value::Iter(pending) => pending.try_borrow_mut().map_err(|_| busy())?.next()?,
        Value::List(seq) | Value::Tuple(seq) => seq.items.first().cloned(),
        other => machine.items(other)?.into_iter().next(),
    };
    Ok(first.unwrap_or_else(|| Value::undefined("No first item, sequence was empty.")))
}

pub(super) fn last(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    args.none("last")?;
    let last = match &value {
        Value::Iter(_) => return Err(wrong("last", "a list", &value)),
        Value::List(seq) | Value::Tuple(seq) => seq.items.last().cloned(),
        other => machine.items(other)?.pop(),
    };
    Ok(last.unwrap_or_else(|| Value::undefined("No last item, sequence was empty.")))
}

pub(super) fn random(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    args.none("random")?;
    let length = match &value {
        Value::List(_) | Value::Tuple(_) | Value::Str(_) | Value::Markup(_) | Value::Range(_) => value.len(),
        Value::Undefined(_) => Some(0),
        _ => None,
    };
    let Some(length) = length else {
        return Err(wrong("random", "a list", &value));
    };
    if length == 0 {
        return Ok(Value::undefined("No random item, sequence was empty."));
    }
    // SplitMix64 from the time of the rendering.
    machine.choices += 1;
    let time = machine
        .now
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_nanos() as u64);
    let mut state = time.wrapping_add(machine.choices.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    state = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state = (state ^ state >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    let at = (state ^ state >> 31) % length as u64;
    machine.item(&value, &Value::Int(at.into()))
}

pub(super) fn items(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    args.none("items")?;
    let pairs = match &value {
        Value::Undefined(_) => Ok(Vec::new()),
        Value::Dict(dict) => machine.items(&Value::View(dict.clone(), View::Items)),
        other => Err(wrong("items", "a mapping", other)),
    };
    deferred(pairs.map(|pairs| Pending::iterator("generator", pairs, None)))
}

pub(super) fn join(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    let [separator, attribute] = args.bind("join", ["d", "attribute"], 0)?;
    let separator = machine.text(&separator.unwrap_or_else(|| "".into()))?;
    let mut items = machine.items(&value)?;
    let path = path(&attribute.unwrap_or(Value::None));
    for item in &mut items {
        *item = machine.follow(item, &path, &Value::None)?;
    }
    machine.join(&separator, &items, true)
}

pub(super) fn list(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    args.none("list")?;
    Value::list(machine.items(&value)?)
}

pub(super) fn map(machine: &mut Machine, value: Value, mut args: Arguments) -> Outcome<Value> {
    let mut work = || {
        let items = machine.if_true(&value)?;
        if items.is_empty() {
            return Ok(Pending::iterator("generator", items, None));
        }
        if args.positional.is_empty()
            && let Some(attribute) = args.take("attribute")
        {
            let default = args.take("default").unwrap_or(Value::None);
            std::mem::take(&mut args).none("map")?;
            let path = path(&attribute);
            return Ok(lazily(items, |item| machine.follow(&item, &path, &default).map(Some)));
        }
        if args.positional.is_empty() {
            return Err(Fault::invalid("map requires a filter argument"));
        }
        let filter = args.positional.remove(0);
        let name = text("map", &filter)?;
        Ok(lazily(items, |item| {
            machine
                .nested(|machine| machine.filter(name, item, args.clone()))
                .map(Some)
        }))
    };
    deferred(work())
}

/// `select`, `reject` and, with `by_attribute`, `selectattr` and `rejectattr`.
pub(super) fn select(
    machine: &mut Machine,
    value: Value,
    mut args: Arguments,
    keep: bool,
    by_attribute: bool,
) -> Outcome<Value> {
    let mut work = || {
        let items = machine.if_true(&value)?;
        if items.is_empty() {
            return Ok(Pending::iterator("generator", items, None));
        }
        let mut path = Vec::new();
        if by_attribute {
            if args.positional.is_empty() {
                return Err(Fault::invalid("Missing parameter for attribute name"));
            }
            path = self::path(&args.positional.remove(0));
        }
        let test = match args.positional.is_empty() {
            true => None,
            false => Some(args.positional.remove(0)),
        };
        let name = test.as_ref().map(|test| text("the name of a test", test)).transpose()?;
        Ok(lazily(items, |item| {
            let value = machine.follow(&item, &path, &Value::None)?;
            let holds = match name {
                Some(name) => machine.nested(|machine| machine.test(name, value, args.clone()))?,
                None => value.truth(),
            };
            Ok((holds == keep).then_some(item))
        }))
    };
    deferred(work())
}

pub(super) fn extreme(machine: &mut Machine, value: Value, args: Arguments, largest: bool) -> Outcome<Value> {
    let [exact, attribute] = args.bind("min and max", ["case_sensitive", "attribute"], 0)?;
    let (exact, path) = (flag(exact), path(&attribute.unwrap_or(Value::None)));
    let comparison = if largest { Comparison::Greater } else { Comparison::Less };
    let mut best: Option<(Value, Value)> = None;
    for item in machine.items(&value)? {
        let key = machine.key(&item, &path, &Value::None, exact)?;
        let better = match &best {
            Some((known, _)) => machine.compare(comparison, &key, known)?,
            None => true,
        };
        if better {
            best = Some((key, item));
        }
    }
    let none = || Value::undefined("No aggregated item, sequence was empty.");
    Ok(best.map_or_else(none, |(_, item)| item))
}

pub(super) fn reverse(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    args.none("reverse")?;
    if let Some(text) = value.as_str() {
        machine.budget.bytes(text.len() as u64)?;
        return Ok(text.chars().rev().collect::<String>().into());
    }
    let kind = match &value {
        Value::List(_) => "list_reverseiterator",
        Value::Tuple(_) => "reversed",
        Value::Range(_) => "range_iterator",
        Value::Dict(_) | Value::View(..) => "dict_reversekeyiterator",
        Value::Undefined(_) | Value::Iter(_) => "",
        other => return Err(wrong("reverse", "an iterable", other)),
    };
    let mut items = machine.items(&value)?;
    items.reverse();
    match kind {
        "" => Value::list(items),
        kind => Ok(Pending::iterator(kind, items, None)),
    }
}

pub(super) fn sort(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    let [reverse, exact, attribute] = args.bind("sort", ["reverse", "case_sensitive", "attribute"], 0)?;
    let (reverse, exact) = (flag(reverse), flag(exact));
    let paths: Vec<Vec<Value>> = match &attribute {
        Some(Value::Str(text) | Value::Markup(text)) => text.split(',').map(|part| path(&part.into())).collect(),
        other => vec![path(other.as_ref().unwrap_or(&Value::None))],
    };
    let mut pairs = Vec::new();
    for item in machine.items(&value)? {
        let mut keys = Vec::new();
        for path in &paths {
            keys.push(machine.key(&item, path, &Value::None, exact)?);
        }
        pairs.push((Value::list(keys)?, item));
    }
    Value::list(machine.sorted(pairs, reverse)?)
}

pub(super) fn sum(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    let [attribute, start] = args.bind("sum", ["attribute", "start"], 0)?;
    let path = path(&attribute.unwrap_or(Value::None));
    let mut sum = start.unwrap_or(Value::Int(0));
    if sum.as_str().is_some() {
        return Err(Fault::invalid("sum() can't sum strings [use ''.join(seq) instead]"));
    }
    for item in machine.items(&value)? {
        let item = machine.follow(&item, &path, &Value::None)?;
        sum = machine.binary(Binary::Add, &sum, &item)?;
    }
    Ok(sum)
}

pub(super) fn unique(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    let [exact, attribute] = args.bind("unique", ["case_sensitive", "attribute"], 0)?;
    let (exact, path) = (flag(exact), path(&attribute.unwrap_or(Value::None)));
    let items = match machine.items(&value) {
        Ok(items) => items,
        Err(fault) => return deferred(Err(fault)),
    };
    let mut seen = IndexSet::new();
    Ok(lazily(items, |item| {
        let key = machine.key(&item, &path, &Value::None, exact)?;
        Ok(seen.insert(machine.key_of(key)?).then_some(item))
    }))
}

pub(super) fn group_by(machine: &mut Machine, value: Value, args: Arguments) -> Outcome<Value> {
    let [attribute, default, exact] = args.bind("groupby", ["attribute", "default", "case_sensitive"], 1)?;
    let path = path(&attribute.unwrap_or(Value::None));
    let (default, exact) = (default.unwrap_or(Value::None), flag(exact));
    let mut pairs = Vec::new();
    for item in machine.items(&value)? {
        pairs.push((machine.key(&item, &path, &default, exact)?, item));
    }
    let mut groups: Vec<(Value, Vec<Value>)> = Vec::new();
    for item in machine.sorted(pairs, false)? {
        let key = machine.key(&item, &path, &default, exact)?;
        match groups.last_mut() {
            Some((known, items)) if machine.equals(known, &key)? => items.push(item),
            _ => groups.push((key, vec![item])),
        }
    }
    let mut found = Vec::new();
    for (key, items) in groups {
        // The name of a group is that of its first item.
        let name = if exact {
            key
        } else {
            machine.follow(&items[0], &path, &default)?
        };
        found.push(Value::Tuple(Seq::new(vec![name, Value::list(items)?], true)?));
    }
    Value::list(found)
}

//! Attributes, items and slices of values, and calls.

use super::arguments::{Arguments, int, text, wrong};
use super::clock;
use super::limits::{Fault, Outcome};
use super::machine::Machine;
use super::methods;
use super::value::{Builtin, Cells, Key, LoopState, Seq, Value, range_len};
use indexmap::IndexMap;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

/// Longest range, as in Jinja's sandbox.
const MAX_RANGE: i128 = 100_000;

/// The functions of every template.
pub(super) const BUILTINS: [(&str, Builtin); 7] = [
    ("range", Builtin::Range),
    ("dict", Builtin::Dict),
    ("namespace", Builtin::Namespace),
    ("cycler", Builtin::Cycler),
    ("joiner", Builtin::Joiner),
    ("raise_exception", Builtin::RaiseException),
    ("strftime_now", Builtin::StrftimeNow),
];

impl Machine<'_> {
    /// `value.name`: an attribute, or else the item of that name.
    pub(super) fn attribute(&mut self, value: &Value, name: &Arc<str>) -> Outcome<Value> {
        if let Value::Undefined(reason) = value {
            return Err(Fault::new("undefined value", &**reason));
        }
        if let Some(found) = self.own_attribute(value, name)? {
            return Ok(found);
        }
        let found = match value {
            Value::Dict(dict) => dict.map.get(&**name).cloned(),
            _ => None,
        };
        Ok(found.unwrap_or_else(|| no_attribute(value, name)))
    }

    /// The attribute of a name, never an item.
    pub(super) fn attribute_only(&mut self, value: &Value, name: &Arc<str>) -> Outcome<Value> {
        if let Value::Undefined(reason) = value {
            return Err(Fault::new("undefined value", &**reason));
        }
        let found = self.own_attribute(value, name)?;
        Ok(found.unwrap_or_else(|| no_attribute(value, name)))
    }

    /// `value[index]`: an item, or else the attribute of that name.
    pub(super) fn item(&mut self, value: &Value, index: &Value) -> Outcome<Value> {
        let at = |length: usize| {
            let index = index.as_int()?;
            let index = if index < 0 { index + length as i128 } else { index };
            usize::try_from(index).ok().filter(|index| *index < length)
        };
        let found = match value {
            Value::Undefined(reason) => return Err(Fault::new("undefined value", &**reason)),
            Value::Dict(dict) => match index.as_str() {
                Some(name) => dict.map.get(name).cloned(),
                None => self
                    .key_of(index.clone())
                    .ok()
                    .and_then(|key| dict.map.get(&key).cloned()),
            },
            Value::List(seq) | Value::Tuple(seq) => at(seq.items.len()).map(|at| seq.items[at].clone()),
            Value::Str(text) | Value::Markup(text) if index.as_int().is_some() => {
                let at = at(self.count(text)?);
                at.and_then(|at| text.chars().nth(at))
                    .map(|c| Value::from(c.to_string()))
            }
            Value::Range(bounds) => at(range_len(bounds) as usize).map(|at| nth(bounds, at)),
            _ => None,
        };
        if let Some(found) = found {
            return Ok(found);
        }
        if let Value::Str(name) | Value::Markup(name) = index
            && let Some(found) = self.own_attribute(value, name)?
        {
            return Ok(found);
        }
        let index = match index.as_str() {
            Some(name) => return Ok(no_attribute(value, name)),
            None => self.text(index)?,
        };
        Ok(Value::undefined(format!(
            "{} has no element {index}",
            value.described()
        )))
    }

    /// An attribute that a value has in Python, which hides an item of that name.
    fn own_attribute(&mut self, value: &Value, name: &Arc<str>) -> Outcome<Option<Value>> {
        if let Value::Method(_) | Value::Builtin(_) | Value::None | Value::Undefined(_) = value {
            return Ok(None);
        }
        if methods::exists(value, name) {
            return Ok(Some(Value::Method(Rc::new((value.clone(), name.clone())))));
        }
        if let Some(reason) = methods::mutating(value, name) {
            return Ok(Some(Value::undefined(reason)));
        }
        Ok(match (value, &**name) {
            (Value::Int(_) | Value::Bool(_), "real" | "numerator") => value.as_int().map(Value::Int),
            (Value::Int(_) | Value::Bool(_), "imag") => Some(Value::Int(0)),
            (Value::Int(_) | Value::Bool(_), "denominator") => Some(Value::Int(1)),
            (Value::Float(_), "real") => Some(value.clone()),
            (Value::Float(_), "imag") => Some(Value::Float(0.0)),
            (Value::Tuple(seq), "grouper") if seq.group => seq.items.first().cloned(),
            (Value::Tuple(seq), "list") if seq.group => seq.items.last().cloned(),
            (Value::Range(bounds), "start") => Some(Value::Int(bounds[0])),
            (Value::Range(bounds), "stop") => Some(Value::Int(bounds[1])),
            (Value::Range(bounds), "step") => Some(Value::Int(bounds[2])),
            (Value::Namespace(cells), _) => cells.get(name),
            (Value::Loop(state), _) => self.loop_attribute(state, name)?,
            (Value::Cycler(cycler), "current") => cycler.0.items.get(cycler.1.get()).cloned(),
            (Value::Cycler(cycler), "pos") => Some(cycler.1.get().into()),
            (Value::Cycler(cycler), "items") => Some(Value::Tuple(cycler.0.clone())),
            (Value::Joiner(joiner), "sep") => Some(joiner.0.clone()),
            (Value::Joiner(joiner), "used") => Some(Value::Bool(joiner.1.get())),
            (Value::Macro(closure), "name") => Some(closure.code.name.clone().map_or(Value::None, Value::Str)),
            (Value::Macro(closure), "arguments") => {
                let names = closure.code.parameters.iter().cloned().map(Value::Str);
                Some(Value::tuple(names.collect())?)
            }
            (Value::Macro(closure), "catch_kwargs") => Some(Value::Bool(closure.code.kwargs)),
            (Value::Macro(closure), "catch_varargs") => Some(Value::Bool(closure.code.varargs)),
            (Value::Macro(closure), "caller") => Some(Value::Bool(closure.code.caller)),
            (Value::Template, _) if self.program.blocks.contains_key(name) => {
                Some(Value::Method(Rc::new((Value::Template, name.clone()))))
            }
            _ => None,
        })
    }

    fn loop_attribute(&mut self, state: &Rc<LoopState>, name: &str) -> Outcome<Option<Value>> {
        let index0 = state.index0.get();
        Ok(Some(match name {
            "index" => Value::Int(index0 + 1),
            "index0" => Value::Int(index0),
            "first" => Value::Bool(index0 == 0),
            "depth" => Value::Int(state.depth0 + 1),
            "depth0" => Value::Int(state.depth0),
            "length" => Value::Int(self.loop_length(state)?),
            "revindex" => Value::Int(self.loop_length(state)? - index0),
            "revindex0" => Value::Int(self.loop_length(state)? - index0 - 1),
            "last" => Value::Bool(self.look_ahead(state)?.is_none()),
            "previtem" => match state.previous.borrow().clone() {
                Some(item) => item,
                None => Value::undefined("there is no previous item"),
            },
            "nextitem" => match self.look_ahead(state)? {
                Some(item) => item,
                None => Value::undefined("there is no next item"),
            },
            _ => return Ok(None),
        }))
    }

    /// `value[start:stop:step]`, where `none` stands for what is left out.
    pub(super) fn slice(&mut self, value: &Value, bounds: [Value; 3]) -> Outcome<Value> {
        if let Value::Undefined(reason) = value {
            return Err(Fault::new("undefined value", &**reason));
        }
        let mut numbers = [None; 3];
        for (number, bound) in numbers.iter_mut().zip(&bounds) {
            if !matches!(bound, Value::None) {
                *number = Some(int("a slice", bound)?);
            }
        }
        let length = match value {
            Value::Str(text) | Value::Markup(text) => self.count(text)?,
            Value::List(_) | Value::Tuple(_) | Value::Range(_) => value.len().unwrap_or(0),
            other => return Err(wrong("a slice", "a string or a list", other)),
        };
        let picked = picked(length as i128, numbers)?;
        let size = range_len(&picked);
        let indices = || (0..size).map(|i| (picked[0] + i * picked[2]) as usize);
        match value {
            Value::List(seq) => {
                self.budget.items(size as u64)?;
                Value::list(indices().map(|i| seq.items[i].clone()).collect())
            }
            Value::Tuple(seq) => {
                self.budget.items(size as u64)?;
                Value::tuple(indices().map(|i| seq.items[i].clone()).collect())
            }
            Value::Range(range) => Ok(Value::Range(Rc::new([
                range[0] + picked[0] * range[2],
                range[0] + picked[1] * range[2],
                range[2] * picked[2],
            ]))),
            other => {
                let text = other.as_str().unwrap_or_default();
                self.budget.bytes(text.len() as u64)?;
                let chars: Vec<char> = text.chars().collect();
                Ok(indices().map(|i| chars[i]).collect::<String>().into())
            }
        }
    }

    /// Calls a value.
    pub(super) fn call(&mut self, called: Value, args: Arguments) -> Outcome<Value> {
        self.budget.steps(1)?;
        match &called {
            Value::Undefined(reason) => {
                let is_method = !reason.ends_with("is undefined");
                let class = if is_method {
                    "unknown method"
                } else {
                    "unknown function"
                };
                Err(Fault::new(class, &**reason))
            }
            Value::Macro(closure) => self.call_macro(closure, args),
            Value::Builtin(builtin) => self.call_builtin(*builtin, args),
            Value::Method(method) => match &method.0 {
                Value::Template => {
                    args.none("a block")?;
                    self.block_text(&method.1)
                }
                receiver => self.method(receiver, &method.1, args),
            },
            Value::Loop(state) => {
                let [items] = args.bind("loop", ["iterable"], 1)?;
                self.recurse(state, &items.unwrap_or(Value::None))
            }
            Value::Joiner(joiner) => {
                args.none("a joiner")?;
                match joiner.1.replace(true) {
                    true => Ok(joiner.0.clone()),
                    false => Ok("".into()),
                }
            }
            other => Err(Fault::invalid(format!("'{}' object is not callable", other.kind()))),
        }
    }

    fn call_builtin(&mut self, builtin: Builtin, args: Arguments) -> Outcome<Value> {
        match builtin {
            Builtin::Range => range(args),
            Builtin::Dict => Value::dict(self.pairs(args, "dict")?),
            Builtin::Namespace => {
                let pairs = self.pairs(args, "namespace")?;
                let cells = Rc::new(Cells::default());
                for (key, value) in pairs {
                    let name = text("a name in a namespace", key.value())?;
                    if name.starts_with('_') {
                        return Err(Fault::invalid(format!("'{name}' begins with an underscore")));
                    }
                    cells.set(name.into(), value);
                }
                self.keep(&cells)?;
                Ok(Value::Namespace(cells))
            }
            Builtin::Cycler => {
                let items = args.unnamed("cycler")?;
                if items.is_empty() {
                    return Err(Fault::invalid("at least one item has to be provided"));
                }
                Ok(Value::Cycler(Rc::new((Seq::new(items, false)?, Cell::new(0)))))
            }
            Builtin::Joiner => {
                let [separator] = args.bind("joiner", ["sep"], 0)?;
                let separator = separator.unwrap_or_else(|| ", ".into());
                // Lists limit how deep a value may be.
                Seq::new(vec![separator.clone()], false)?;
                Ok(Value::Joiner(Rc::new((separator, Cell::new(false)))))
            }
            Builtin::RaiseException => {
                let [message] = args.bind("raise_exception", ["message"], 1)?;
                let message = self.text(&message.unwrap_or(Value::None))?;
                Err(Box::new(Fault::Raised(message.to_string())))
            }
            Builtin::StrftimeNow => {
                let [format] = args.bind("strftime_now", ["format"], 1)?;
                let format = format.unwrap_or(Value::None);
                let format = text("strftime_now", &format)?;
                // A directive writes up to 30 characters.
                self.budget.bytes(format.len() as u64 * 16)?;
                let date = clock::strftime(format, self.now);
                date.map(Value::from)
                    .map_err(|why| Fault::invalid(format!("strftime_now: {why}")))
            }
        }
    }

    /// The pairs that Python's `dict` makes of its arguments: a dictionary or pairs, and names.
    fn pairs(&mut self, mut args: Arguments, what: &str) -> Outcome<IndexMap<Key, Value>> {
        let named = std::mem::take(&mut args.named);
        let [from] = args.bind(what, [""], 0)?;
        let mut map = IndexMap::new();
        match from {
            None => {}
            Some(Value::Undefined(reason)) => return Err(Fault::invalid(&*reason)),
            Some(Value::Dict(dict)) => {
                self.budget.items(dict.map.len() as u64)?;
                map = dict.map.clone();
            }
            Some(other) => {
                for pair in self.items(&other)? {
                    let Ok([key, value]) = <[Value; 2]>::try_from(self.items(&pair)?) else {
                        return Err(Fault::invalid(format!("{what}: expected pairs")));
                    };
                    map.insert(self.key_of(key)?, value);
                }
            }
        }
        map.extend(named.into_iter().map(|(name, value)| (Key::from(name), value)));
        Ok(map)
    }
}

fn no_attribute(value: &Value, name: &str) -> Value {
    Value::undefined(format!("'{}' has no attribute '{name}'", value.described()))
}

fn nth(bounds: &[i128; 3], at: usize) -> Value {
    Value::Int(bounds[0] + at as i128 * bounds[2])
}

/// The indices that a slice of a list of `length` items picks, as a range.
fn picked(length: i128, [start, stop, step]: [Option<i128>; 3]) -> Outcome<[i128; 3]> {
    // No list is longer; this keeps sums of bounds in range.
    let far = 1 << 64;
    let step = step.unwrap_or(1).clamp(-far, far);
    if step == 0 {
        return Err(Fault::invalid("slice step cannot be zero"));
    }
    let (low, high) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let place = |bound: i128| {
        let bound = bound.clamp(-far, far);
        (if bound < 0 { bound + length } else { bound }).clamp(low, high)
    };
    let (first, last) = if step > 0 { (low, high) } else { (high, low) };
    Ok([start.map_or(first, place), stop.map_or(last, place), step])
}

fn range(args: Arguments) -> Outcome<Value> {
    let values = args.unnamed("range")?;
    let mut numbers = Vec::new();
    for value in &values {
        let number = int("range", value)?;
        if number.unsigned_abs() > 1 << 100 {
            return Err(Fault::invalid("the bounds of a range are too large"));
        }
        numbers.push(number);
    }
    let bounds = match numbers[..] {
        [stop] => [0, stop, 1],
        [start, stop] => [start, stop, 1],
        [start, stop, step] => [start, stop, step],
        _ => {
            return Err(Fault::invalid(format!(
                "range takes 1 to 3 arguments, found {}",
                numbers.len()
            )));
        }
    };
    if bounds[2] == 0 {
        return Err(Fault::invalid("the step of a range cannot be zero"));
    }
    if range_len(&bounds) > MAX_RANGE {
        return Err(Fault::invalid(format!("a range has more than {MAX_RANGE} items")));
    }
    Ok(Value::Range(Rc::new(bounds)))
}

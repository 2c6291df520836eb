//! The values of a template: those of Python that a chat template can make, which nothing changes once they are made.

use super::ast::{Loop, Macro};
use super::limits::{Fault, MAX_VALUE_DEPTH, Outcome};
use indexmap::{Equivalent, IndexMap};
use std::cell::{Cell, RefCell};
use std::hash::{Hash, Hasher};
use std::rc::Rc;
use std::sync::Arc;

/// A value. Copies share what it contains.
#[derive(Clone)]
pub(super) enum Value {
    /// Not defined, with the reason.
    Undefined(Arc<str>),
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Arc<str>),
    /// A string that `escape` leaves alone.
    Markup(Arc<str>),
    List(Rc<Seq>),
    Tuple(Rc<Seq>),
    Dict(Rc<Dict>),
    /// The keys, values or items of a dictionary.
    View(Rc<Dict>, View),
    Range(Rc<[i128; 3]>),
    /// An iterator, which can be read once.
    Iter(Rc<RefCell<Pending>>),
    Namespace(Rc<Cells>),
    Macro(Rc<Closure>),
    Builtin(Builtin),
    /// A method of a value.
    Method(Rc<(Value, Arc<str>)>),
    Loop(Rc<LoopState>),
    Cycler(Rc<(Rc<Seq>, Cell<usize>)>),
    Joiner(Rc<(Value, Cell<bool>)>),
    /// The template itself, whose attributes are its blocks.
    Template,
}

/// The items of a list or a tuple.
pub(super) struct Seq {
    pub(super) items: Vec<Value>,
    /// How much text and how many values it contains, directly and inside of other values; shared ones count each time.
    weight: u64,
    depth: u32,
    /// Whether it is the group of `groupby`, with `grouper` and `list`.
    pub(super) group: bool,
}

/// A dictionary in the order of insertion.
pub(super) struct Dict {
    pub(super) map: IndexMap<Key, Value>,
    weight: u64,
    depth: u32,
}

/// Which view of a dictionary.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum View {
    Keys,
    Values,
    Items,
}

/// A function that every template can call.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Builtin {
    Range,
    Dict,
    Namespace,
    Cycler,
    Joiner,
    RaiseException,
    StrftimeNow,
}

/// What is left of an iterator, and how it ends.
pub(super) struct Pending {
    /// Python's name of the iterator's type.
    pub(super) kind: &'static str,
    /// In reverse.
    items: Vec<Value>,
    fault: Option<Box<Fault>>,
    depth: u32,
}

impl Pending {
    /// An iterator over `items`; after them it fails with `fault` if there is one.
    pub(super) fn iterator(kind: &'static str, mut items: Vec<Value>, fault: Option<Box<Fault>>) -> Value {
        let depth = level(items.iter());
        items.reverse();
        Value::Iter(Rc::new(RefCell::new(Pending {
            kind,
            items,
            fault,
            depth,
        })))
    }

    pub(super) fn next(&mut self) -> Outcome<Option<Value>> {
        match (self.items.pop(), self.fault.take()) {
            (None, Some(fault)) => Err(fault),
            (item, fault) => {
                self.fault = fault;
                Ok(item)
            }
        }
    }

    /// All items that are left.
    pub(super) fn take(&mut self) -> Outcome<Vec<Value>> {
        let mut items = std::mem::take(&mut self.items);
        items.reverse();
        match self.fault.take() {
            Some(fault) => Err(fault),
            None => Ok(items),
        }
    }
}

/// Names with values that change: those of a scope or of a namespace.
#[derive(Default)]
pub(super) struct Cells(RefCell<IndexMap<Arc<str>, Value>>);

impl Cells {
    pub(super) fn get(&self, name: &str) -> Option<Value> {
        self.0.borrow().get(name).cloned()
    }

    pub(super) fn set(&self, name: Arc<str>, value: Value) {
        self.0.borrow_mut().insert(name, value);
    }

    pub(super) fn pairs(&self) -> IndexMap<Arc<str>, Value> {
        self.0.borrow().clone()
    }

    /// Takes all values out, so that no circle of references is left.
    pub(super) fn clear(&self) -> IndexMap<Arc<str>, Value> {
        std::mem::take(&mut *self.0.borrow_mut())
    }
}

/// The variables that a part of the template sees: its own and those around it.
pub(super) struct Scope {
    pub(super) cells: Rc<Cells>,
    pub(super) parent: Option<Rc<Scope>>,
    /// Whether a macro refers to it.
    pub(super) kept: Cell<bool>,
}

impl Scope {
    pub(super) fn new(parent: Option<&Rc<Scope>>) -> Rc<Scope> {
        Rc::new(Scope {
            cells: Rc::default(),
            parent: parent.cloned(),
            kept: Cell::new(false),
        })
    }
}

/// A macro with the scope in which it was defined, or the body of a `call` block.
pub(super) struct Closure {
    pub(super) code: Arc<Macro>,
    pub(super) scope: Rc<Scope>,
}

/// The items that a loop still visits.
pub(super) enum Source {
    Items(std::vec::IntoIter<Value>),
    /// Items for which the test of the loop holds.
    Passed(std::vec::IntoIter<Value>),
    Shared(Rc<RefCell<Pending>>),
}

/// The state of a loop: the variable `loop`.
pub(super) struct LoopState {
    pub(super) code: Arc<Loop>,
    pub(super) scope: Rc<Scope>,
    pub(super) source: RefCell<Source>,
    /// How deep its items are.
    pub(super) depth: u32,
    pub(super) depth0: i128,
    pub(super) index0: Cell<i128>,
    pub(super) length: Cell<Option<i128>>,
    pub(super) previous: RefCell<Option<Value>>,
    pub(super) current: RefCell<Option<Value>>,
    /// The next item, once it was looked at.
    pub(super) after: RefCell<Option<Value>>,
    pub(super) changed: RefCell<Option<Value>>,
}

/// A value that can be a key: a hash is defined for it.
#[derive(Clone)]
pub(super) struct Key(Value);

impl Key {
    /// Fails for lists, dictionaries and everything that contains them.
    pub(super) fn new(value: Value) -> Outcome<Key> {
        let unhashable = |value: &Value| Fault::invalid(format!("unhashable type: '{}'", value.kind()));
        match &value {
            Value::List(_) | Value::Dict(_) | Value::View(..) => Err(unhashable(&value)),
            // Hashing and comparing visit everything inside.
            Value::Tuple(seq) if seq.weight > 10_000 => Err(Fault::invalid("a tuple is too large for a key")),
            Value::Tuple(seq) => {
                for item in &seq.items {
                    Key::new(item.clone())?;
                }
                Ok(Key(value))
            }
            _ => Ok(Key(value)),
        }
    }

    pub(super) fn value(&self) -> &Value {
        &self.0
    }
}

impl From<Arc<str>> for Key {
    fn from(name: Arc<str>) -> Key {
        Key(Value::Str(name))
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Key) -> bool {
        self.0.equals(&other.0)
    }
}

impl Eq for Key {}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        match &self.0 {
            Value::Str(text) | Value::Markup(text) => text.hash(state),
            Value::Bool(flag) => i128::from(*flag).hash(state),
            Value::Int(number) => number.hash(state),
            // An equal integer has an equal hash.
            Value::Float(number) if number.trunc() == *number && number.abs() < 1e38 => (*number as i128).hash(state),
            Value::Float(number) => number.to_bits().hash(state),
            Value::Tuple(seq) => seq.items.iter().for_each(|item| Key(item.clone()).hash(state)),
            other => other.kind().hash(state),
        }
    }
}

impl Equivalent<Key> for str {
    fn equivalent(&self, key: &Key) -> bool {
        key.0.as_str() == Some(self)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::Str(text.into())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Value {
        Value::Str(text.into())
    }
}

impl From<usize> for Value {
    fn from(number: usize) -> Value {
        Value::Int(number as i128)
    }
}

impl Value {
    pub(super) fn undefined(reason: impl Into<Arc<str>>) -> Value {
        Value::Undefined(reason.into())
    }

    /// A list. Fails when it is nested too deeply.
    pub(super) fn list(items: Vec<Value>) -> Outcome<Value> {
        Ok(Value::List(Seq::new(items, false)?))
    }

    /// A tuple, see [`Value::list`].
    pub(super) fn tuple(items: Vec<Value>) -> Outcome<Value> {
        Ok(Value::Tuple(Seq::new(items, false)?))
    }

    /// A dictionary, see [`Value::list`].
    pub(super) fn dict(map: IndexMap<Key, Value>) -> Outcome<Value> {
        let (weight, depth) = measure(map.iter().flat_map(|(key, value)| [&key.0, value]))?;
        Ok(Value::Dict(Rc::new(Dict { map, weight, depth })))
    }

    /// The text of a string.
    pub(super) fn as_str(&self) -> Option<&str> {
        match self {
            Value::Str(text) | Value::Markup(text) => Some(text),
            _ => None,
        }
    }

    /// The value of an integer or a boolean.
    pub(super) fn as_int(&self) -> Option<i128> {
        match self {
            Value::Int(number) => Some(*number),
            Value::Bool(flag) => Some(i128::from(*flag)),
            _ => None,
        }
    }

    pub(super) fn is_undefined(&self) -> bool {
        matches!(self, Value::Undefined(_))
    }

    /// How much there is to visit in the value, counting shared parts each time.
    pub(super) fn weight(&self) -> u64 {
        match self {
            Value::Str(text) | Value::Markup(text) => 1 + text.len() as u64 / 32,
            Value::List(seq) | Value::Tuple(seq) => seq.weight,
            Value::Dict(dict) | Value::View(dict, _) => dict.weight,
            Value::Range(bounds) => range_len(bounds).unsigned_abs() as u64,
            _ => 1,
        }
    }

    /// The levels of lists, tuples and dictionaries in the value.
    pub(super) fn depth(&self) -> u32 {
        match self {
            Value::List(seq) | Value::Tuple(seq) => seq.depth,
            Value::Dict(dict) | Value::View(dict, _) => dict.depth,
            // What an iterator or another object refers to is not followed when it is written, but when it is dropped.
            Value::Iter(pending) => pending.try_borrow().map_or(0, |pending| pending.depth),
            Value::Loop(state) => 1 + state.depth,
            Value::Cycler(cycler) => cycler.0.depth,
            Value::Joiner(joiner) => 1 + joiner.0.depth(),
            Value::Method(method) => 1 + method.0.depth(),
            _ => 0,
        }
    }

    /// Python's name of the type.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Value::Undefined(_) => "Undefined",
            Value::None => "NoneType",
            Value::Bool(_) => "bool",
            Value::Int(_) => "int",
            Value::Float(_) => "float",
            Value::Str(_) => "str",
            Value::Markup(_) => "Markup",
            Value::List(_) => "list",
            Value::Tuple(_) => "tuple",
            Value::Dict(_) => "dict",
            Value::View(_, View::Keys) => "dict_keys",
            Value::View(_, View::Values) => "dict_values",
            Value::View(_, View::Items) => "dict_items",
            Value::Range(_) => "range",
            Value::Iter(pending) => pending.try_borrow().map_or("generator", |pending| pending.kind),
            Value::Namespace(_) => "Namespace",
            Value::Macro(_) => "Macro",
            Value::Builtin(_) => "function",
            Value::Method(_) => "builtin_function_or_method",
            Value::Loop(_) => "LoopContext",
            Value::Cycler(_) => "Cycler",
            Value::Joiner(_) => "Joiner",
            Value::Template => "TemplateReference",
        }
    }

    /// How error messages call the value, as in `'dict object' has no attribute 'x'`.
    pub(super) fn described(&self) -> String {
        match self {
            Value::None => "None".to_string(),
            other => format!("{} object", other.kind()),
        }
    }

    /// Python's `len`. None for values without a length.
    pub(super) fn len(&self) -> Option<usize> {
        Some(match self {
            Value::Undefined(_) => 0,
            Value::Str(text) | Value::Markup(text) => count(text),
            Value::List(seq) | Value::Tuple(seq) => seq.items.len(),
            Value::Dict(dict) | Value::View(dict, _) => dict.map.len(),
            Value::Range(bounds) => range_len(bounds) as usize,
            _ => return None,
        })
    }

    /// Python's `bool`.
    pub(super) fn truth(&self) -> bool {
        match self {
            Value::Undefined(_) | Value::None => false,
            Value::Bool(flag) => *flag,
            Value::Int(number) => *number != 0,
            Value::Float(number) => *number != 0.0,
            Value::Str(text) | Value::Markup(text) => !text.is_empty(),
            other => other.len() != Some(0),
        }
    }

    /// Python's `is`, for values of which there is one.
    pub(super) fn same(&self, other: &Value) -> bool {
        match (self, other) {
            (Value::None, Value::None) => true,
            (Value::Bool(a), Value::Bool(b)) => a == b,
            // Python keeps one object for small integers and for equal literals.
            (Value::Int(a), Value::Int(b)) => a == b,
            (Value::Str(a), Value::Str(b)) => a == b,
            (Value::List(a), Value::List(b)) => Rc::ptr_eq(a, b),
            (Value::Tuple(a), Value::Tuple(b)) => Rc::ptr_eq(a, b) || a.items.is_empty() && b.items.is_empty(),
            (Value::Dict(a), Value::Dict(b)) => Rc::ptr_eq(a, b),
            _ => self.identical(other),
        }
    }

    /// Whether both are the same object, for objects that are compared by identity.
    fn identical(&self, other: &Value) -> bool {
        match (self, other) {
            (Value::Iter(a), Value::Iter(b)) => Rc::ptr_eq(a, b),
            (Value::Namespace(a), Value::Namespace(b)) => Rc::ptr_eq(a, b),
            (Value::Macro(a), Value::Macro(b)) => Rc::ptr_eq(a, b),
            (Value::Builtin(a), Value::Builtin(b)) => a == b,
            (Value::Loop(a), Value::Loop(b)) => Rc::ptr_eq(a, b),
            (Value::Cycler(a), Value::Cycler(b)) => Rc::ptr_eq(a, b),
            (Value::Joiner(a), Value::Joiner(b)) => Rc::ptr_eq(a, b),
            (Value::Method(a), Value::Method(b)) => a.1 == b.1 && a.0.same(&b.0),
            (Value::Template, Value::Template) => true,
            _ => false,
        }
    }

    /// Python's `==`. Visits as much as the smaller [`Value::weight`] says.
    pub(super) fn equals(&self, other: &Value) -> bool {
        let all = |a: &[Value], b: &[Value]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.equals(b));
        match (self, other) {
            (Value::Undefined(_), Value::Undefined(_)) | (Value::None, Value::None) => true,
            (Value::Str(a) | Value::Markup(a), Value::Str(b) | Value::Markup(b)) => a == b,
            (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => {
                Rc::ptr_eq(a, b) || all(&a.items, &b.items)
            }
            (Value::Dict(a), Value::Dict(b)) => {
                let has = |key, value: &Value| b.map.get(key).is_some_and(|other| other.equals(value));
                Rc::ptr_eq(a, b) || a.map.len() == b.map.len() && a.map.iter().all(|(key, value)| has(key, value))
            }
            (Value::View(a, View::Keys), Value::View(b, View::Keys)) => {
                a.map.len() == b.map.len() && a.map.keys().all(|key| b.map.contains_key(key))
            }
            (Value::View(a, View::Items), Value::View(b, View::Items)) => {
                Value::Dict(a.clone()).equals(&Value::Dict(b.clone()))
            }
            (Value::Range(a), Value::Range(b)) => {
                let length = range_len(a);
                length == range_len(b) && (length == 0 || a[0] == b[0] && (length == 1 || a[2] == b[2]))
            }
            _ => match compare_numbers(self, other) {
                Some(order) => order == Some(std::cmp::Ordering::Equal),
                None => self.identical(other),
            },
        }
    }
}

/// The order of two numbers: None if one is no number, Some(None) if one is NaN.
pub(super) fn compare_numbers(a: &Value, b: &Value) -> Option<Option<std::cmp::Ordering>> {
    let order = |a: i128, b: f64| {
        // 2^127 and more is above every integer here.
        if b.is_nan() {
            return None;
        }
        if b.abs() >= 1.7e38 {
            return 0.0.partial_cmp(&b);
        }
        let whole = a.cmp(&(b.trunc() as i128));
        Some(whole.then_with(|| 0.0.partial_cmp(&b.fract()).unwrap_or(std::cmp::Ordering::Equal)))
    };
    Some(match (a, b) {
        (Value::Float(a), Value::Float(b)) => a.partial_cmp(b),
        (Value::Float(a), b) => order(b.as_int()?, *a).map(std::cmp::Ordering::reverse),
        (a, Value::Float(b)) => order(a.as_int()?, *b),
        (a, b) => Some(a.as_int()?.cmp(&b.as_int()?)),
    })
}

impl Seq {
    pub(super) fn new(items: Vec<Value>, group: bool) -> Outcome<Rc<Seq>> {
        let (weight, depth) = measure(items.iter())?;
        Ok(Rc::new(Seq {
            items,
            weight,
            depth,
            group,
        }))
    }
}

/// Weight and depth of a value that contains `items`.
fn measure<'a>(items: impl Iterator<Item = &'a Value> + Clone) -> Outcome<(u64, u32)> {
    let weight = items.clone().fold(1u64, |sum, item| sum.saturating_add(item.weight()));
    let depth = level(items);
    if depth > MAX_VALUE_DEPTH {
        let message = format!("a value is nested {depth} levels deep, expected at most {MAX_VALUE_DEPTH}");
        return Err(Fault::new("limit", message));
    }
    Ok((weight, depth))
}

fn level<'a>(items: impl Iterator<Item = &'a Value>) -> u32 {
    1 + items.map(Value::depth).max().unwrap_or(0)
}

/// The number of characters.
pub(super) fn count(text: &str) -> usize {
    if text.is_ascii() {
        text.len()
    } else {
        text.chars().count()
    }
}

/// The number of items of a range.
pub(super) fn range_len([start, stop, step]: &[i128; 3]) -> i128 {
    let distance = if *step > 0 { stop - start } else { start - stop };
    if distance <= 0 {
        0
    } else {
        (distance - 1) / step.abs() + 1
    }
}

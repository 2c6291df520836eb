//! Evaluates expressions.

use super::arguments::{Arguments, wrong};
use super::arith;
use super::ast::{Args, Binary, Comparison, Expr, Kind};
use super::limits::{Fault, Outcome};
use super::machine::{Machine, busy};
use super::value::{Scope, Value, View, compare_numbers, range_len};
use super::write;
use indexmap::IndexMap;
use std::cmp::Ordering;
use std::rc::Rc;
use std::sync::Arc;

/// Most named arguments that `**` passes.
const MAX_NAMED: usize = 1_000;

impl Machine<'_> {
    /// The value of an expression.
    pub(super) fn eval(&mut self, expr: &Expr, scope: &Rc<Scope>) -> Outcome<Value> {
        self.budget.steps(1)?;
        match &expr.kind {
            Kind::None => Ok(Value::None),
            Kind::Bool(flag) => Ok(Value::Bool(*flag)),
            Kind::Int(number) => Ok(Value::Int(*number)),
            Kind::Float(number) => Ok(Value::Float(*number)),
            Kind::Str(text) => Ok(Value::Str(text.clone())),
            Kind::Name(name) => Ok(self.variable(name, scope)),
            _ => {
                let value = self.nested(|machine| machine.composed(expr, scope));
                value.map_err(|fault| fault.at(expr.line))
            }
        }
    }

    fn all(&mut self, items: &[Expr], scope: &Rc<Scope>) -> Outcome<Vec<Value>> {
        items.iter().map(|item| self.eval(item, scope)).collect()
    }

    /// The value of an expression that consists of others.
    fn composed(&mut self, expr: &Expr, scope: &Rc<Scope>) -> Outcome<Value> {
        match &expr.kind {
            Kind::None | Kind::Bool(_) | Kind::Int(_) | Kind::Float(_) | Kind::Str(_) | Kind::Name(_) => {
                self.eval(expr, scope)
            }
            Kind::Tuple(items) => Value::tuple(self.all(items, scope)?),
            Kind::List(items) => Value::list(self.all(items, scope)?),
            Kind::Dict(items) => {
                let mut map = IndexMap::new();
                for (key, value) in items {
                    let key = self.eval(key, scope)?;
                    map.insert(self.key_of(key)?, self.eval(value, scope)?);
                }
                Value::dict(map)
            }
            Kind::Not(value) => Ok(Value::Bool(!self.eval(value, scope)?.truth())),
            Kind::Sign(negative, value) => {
                let value = self.eval(value, scope)?;
                arith::signed(&value, *negative)
            }
            Kind::And(left, right) => match self.eval(left, scope)? {
                left if left.truth() => self.eval(right, scope),
                left => Ok(left),
            },
            Kind::Or(left, right) => match self.eval(left, scope)? {
                left if left.truth() => Ok(left),
                _ => self.eval(right, scope),
            },
            Kind::Binary(operator, left, right) => {
                let left = self.eval(left, scope)?;
                let right = self.eval(right, scope)?;
                self.binary(*operator, &left, &right)
            }
            Kind::Concat(parts) => {
                let mut text = String::new();
                for part in parts {
                    let value = self.eval(part, scope)?;
                    let part = self.text(&value)?;
                    self.budget.bytes(part.len() as u64)?;
                    text.push_str(&part);
                }
                Ok(text.into())
            }
            Kind::Compare(first, rest) => {
                let mut left = self.eval(first, scope)?;
                for (comparison, right) in rest {
                    let right = self.eval(right, scope)?;
                    if !self.compare(*comparison, &left, &right)? {
                        return Ok(Value::Bool(false));
                    }
                    left = right;
                }
                Ok(Value::Bool(true))
            }
            Kind::Choice(condition, value, other) => match (self.eval(condition, scope)?.truth(), other) {
                (true, _) => self.eval(value, scope),
                (false, Some(other)) => self.eval(other, scope),
                (false, None) => Ok(Value::undefined(
                    "the inline if-expression evaluated to false and no else section was defined",
                )),
            },
            Kind::Attribute(value, name) => {
                let value = self.eval(value, scope)?;
                self.attribute(&value, name)
            }
            Kind::Item(value, index) => {
                let value = self.eval(value, scope)?;
                let index = self.eval(index, scope)?;
                self.item(&value, &index)
            }
            Kind::Slice(value, bounds) => {
                let value = self.eval(value, scope)?;
                let mut evaluated = [const { Value::None }; 3];
                for (slot, bound) in evaluated.iter_mut().zip(bounds) {
                    if let Some(bound) = bound {
                        *slot = self.eval(bound, scope)?;
                    }
                }
                self.slice(&value, evaluated)
            }
            Kind::Call(called, args) => {
                let called = self.eval(called, scope)?;
                let args = self.arguments(args, scope)?;
                self.call(called, args)
            }
            Kind::Filter(value, applied) => {
                let value = self.eval(value, scope)?;
                let args = self.arguments(&applied.args, scope)?;
                self.filter(&applied.name, value, args)
            }
            Kind::Test(value, applied) => {
                let value = self.eval(value, scope)?;
                let args = self.arguments(&applied.args, scope)?;
                self.test(&applied.name, value, args).map(Value::Bool)
            }
        }
    }

    /// The values of the arguments of a call.
    pub(super) fn arguments(&mut self, args: &Args, scope: &Rc<Scope>) -> Outcome<Arguments> {
        let mut values = Arguments {
            positional: self.all(&args.positional, scope)?,
            named: Vec::new(),
        };
        for (name, value) in &args.named {
            values.named.push((name.clone(), self.eval(value, scope)?));
        }
        if let Some(more) = &args.more {
            let more = self.eval(more, scope)?;
            values.positional.extend(self.items(&more)?);
        }
        if let Some(more) = &args.more_named {
            let more = self.eval(more, scope)?;
            let Value::Dict(dict) = &more else {
                return Err(wrong("** in a call", "a dictionary", &more));
            };
            if dict.map.len() > MAX_NAMED {
                return Err(Fault::invalid(format!(
                    "a call has more than {MAX_NAMED} named arguments"
                )));
            }
            for (key, value) in &dict.map {
                let Some(name) = key.value().as_str() else {
                    return Err(wrong("a name of an argument", "a string", key.value()));
                };
                if values.named.iter().any(|(known, _)| **known == *name) {
                    return Err(Fault::invalid(format!("two values for the argument '{name}'")));
                }
                values.named.push((name.into(), value.clone()));
            }
        }
        Ok(values)
    }

    /// Python's `str`: the text that is printed.
    pub(super) fn text(&self, value: &Value) -> Outcome<Arc<str>> {
        match value {
            Value::Str(text) | Value::Markup(text) => Ok(text.clone()),
            Value::Undefined(_) => Ok("".into()),
            other => write::repr(&self.budget, other).map(Arc::from),
        }
    }

    /// The items of a value, as a `for` loop visits them.
    pub(super) fn items(&self, value: &Value) -> Outcome<Vec<Value>> {
        match self.try_items(value)? {
            Some(items) => Ok(items),
            None => Err(Fault::invalid(format!("'{}' object is not iterable", value.kind()))),
        }
    }

    /// The items of a value. None if it cannot be iterated.
    pub(super) fn try_items(&self, value: &Value) -> Outcome<Option<Vec<Value>>> {
        self.budget.items(match value {
            // Each character becomes a string of its own.
            Value::Str(text) | Value::Markup(text) => text.len() as u64,
            Value::Range(bounds) => range_len(bounds) as u64,
            Value::List(seq) | Value::Tuple(seq) => seq.items.len() as u64,
            Value::Dict(dict) | Value::View(dict, _) => dict.map.len() as u64,
            _ => 1,
        })?;
        Ok(Some(match value {
            Value::Undefined(_) => Vec::new(),
            Value::Str(text) | Value::Markup(text) => {
                let mut buffer = [0; 4];
                text.chars()
                    .map(|c| Value::from(&*c.encode_utf8(&mut buffer)))
                    .collect()
            }
            Value::List(seq) | Value::Tuple(seq) => seq.items.clone(),
            Value::Dict(dict) | Value::View(dict, View::Keys) => {
                dict.map.keys().map(|key| key.value().clone()).collect()
            }
            Value::View(dict, View::Values) => dict.map.values().cloned().collect(),
            Value::View(dict, View::Items) => {
                let pairs = dict.map.iter();
                let pairs = pairs.map(|(key, value)| Value::tuple(vec![key.value().clone(), value.clone()]));
                pairs.collect::<Outcome<_>>()?
            }
            Value::Range(bounds) => (0..range_len(bounds))
                .map(|i| Value::Int(bounds[0] + i * bounds[2]))
                .collect(),
            Value::Iter(pending) => pending.try_borrow_mut().map_err(|_| busy())?.take()?,
            _ => return Ok(None),
        }))
    }

    /// Python's `==`.
    pub(super) fn equals(&self, a: &Value, b: &Value) -> Outcome<bool> {
        self.budget.steps(a.weight().min(b.weight()) / 8)?;
        Ok(a.equals(b))
    }

    /// Python's `<`, `==` and so on, and `in`.
    pub(super) fn compare(&self, comparison: Comparison, a: &Value, b: &Value) -> Outcome<bool> {
        let order = |symbol, test: fn(Ordering) -> bool| Ok(self.order(symbol, a, b)?.is_some_and(test));
        match comparison {
            Comparison::Equal => self.equals(a, b),
            Comparison::NotEqual => Ok(!self.equals(a, b)?),
            Comparison::Less => order("<", Ordering::is_lt),
            Comparison::LessEqual => order("<=", Ordering::is_le),
            Comparison::Greater => order(">", Ordering::is_gt),
            Comparison::GreaterEqual => order(">=", Ordering::is_ge),
            Comparison::In => self.contains(b, a),
            Comparison::NotIn => Ok(!self.contains(b, a)?),
        }
    }

    /// The order of two values for the operator `symbol`. None if one is not a number.
    pub(super) fn order(&self, symbol: &str, a: &Value, b: &Value) -> Outcome<Option<Ordering>> {
        if let Some(order) = compare_numbers(a, b) {
            return Ok(order);
        }
        self.budget.steps(1)?;
        match (a, b) {
            (Value::Str(a) | Value::Markup(a), Value::Str(b) | Value::Markup(b)) => {
                self.charge(if a.len() < b.len() { a } else { b })?;
                // The order of code points is that of the bytes of UTF-8.
                Ok(Some(a.cmp(b)))
            }
            (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => {
                for (a, b) in a.items.iter().zip(&b.items) {
                    if !self.equals(a, b)? {
                        return self.order(symbol, a, b);
                    }
                }
                Ok(Some(a.items.len().cmp(&b.items.len())))
            }
            (Value::Undefined(reason), _) | (_, Value::Undefined(reason)) => Err(Fault::invalid(&**reason)),
            _ => Err(Fault::invalid(format!(
                "'{symbol}' not supported between instances of '{}' and '{}'",
                a.kind(),
                b.kind()
            ))),
        }
    }

    /// Python's `item in container`.
    pub(super) fn contains(&self, container: &Value, item: &Value) -> Outcome<bool> {
        match (container, item) {
            (Value::Str(text) | Value::Markup(text), Value::Str(part) | Value::Markup(part)) => {
                self.charge(text)?;
                Ok(text.contains(&**part))
            }
            (Value::Str(_) | Value::Markup(_), other) => Err(wrong("'in <string>'", "a string", other)),
            (Value::Dict(dict) | Value::View(dict, View::Keys), _) => match item.as_str() {
                Some(key) => Ok(dict.map.contains_key(key)),
                None => Ok(dict.map.contains_key(&self.key_of(item.clone())?)),
            },
            (Value::Namespace(_), _) => Err(Fault::invalid("argument of type 'Namespace' is not iterable")),
            _ => {
                for other in self.items(container)? {
                    if self.equals(&other, item)? {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
        }
    }

    /// Python's arithmetic, for numbers, strings and lists.
    pub(super) fn binary(&mut self, operator: Binary, a: &Value, b: &Value) -> Outcome<Value> {
        if let Some(value) = arith::numbers(operator, a, b) {
            return value;
        }
        match (operator, a, b) {
            (_, Value::Undefined(reason), _) => Err(Fault::invalid(&**reason)),
            (Binary::Mod, Value::Str(format), _) => self.percent(format, b),
            (_, _, Value::Undefined(reason)) => Err(Fault::invalid(&**reason)),
            (Binary::Add, Value::Str(a), Value::Str(b)) => {
                self.budget.bytes((a.len() + b.len()) as u64)?;
                Ok(format!("{a}{b}").into())
            }
            (Binary::Add, a, b) if matches!((a, b), (Value::Markup(_), _) | (_, Value::Markup(_))) => {
                let (a, b) = (self.escaped(a, "+")?, self.escaped(b, "+")?);
                Ok(Value::Markup(format!("{a}{b}").into()))
            }
            (Binary::Add, Value::List(a), Value::List(b)) => {
                self.budget.items((a.items.len() + b.items.len()) as u64)?;
                Value::list([&a.items[..], &b.items].concat())
            }
            (Binary::Add, Value::Tuple(a), Value::Tuple(b)) => {
                self.budget.items((a.items.len() + b.items.len()) as u64)?;
                Value::tuple([&a.items[..], &b.items].concat())
            }
            (Binary::Mul, a, b) => match (a.as_int(), b.as_int()) {
                (None, Some(times)) => self.repeated(a, times),
                (Some(times), None) => self.repeated(b, times),
                _ => Err(arith::unsupported(operator, a, b)),
            },
            _ => Err(arith::unsupported(operator, a, b)),
        }
    }

    /// The text of a string for `+` with markup.
    fn escaped(&self, value: &Value, symbol: &str) -> Outcome<String> {
        match value {
            Value::Markup(text) => Ok(text.to_string()),
            Value::Str(text) => {
                self.budget.bytes(6 * text.len() as u64)?;
                Ok(super::text::escape(text))
            }
            other => Err(wrong(symbol, "a string", other)),
        }
    }

    /// A string or list several times.
    fn repeated(&self, value: &Value, times: i128) -> Outcome<Value> {
        let times = u64::try_from(times.max(0)).unwrap_or(u64::MAX);
        let count = times as usize;
        let items = |items: &[Value]| {
            self.budget.items(times.saturating_mul(items.len() as u64))?;
            let all = std::iter::repeat_n(items, count);
            Ok::<_, Box<Fault>>(all.flatten().cloned().collect())
        };
        match value {
            Value::Str(text) | Value::Markup(text) => {
                self.budget.bytes(times.saturating_mul(text.len() as u64))?;
                let text = if text.is_empty() {
                    String::new()
                } else {
                    text.repeat(count)
                };
                Ok(match value {
                    Value::Markup(_) => Value::Markup(text.into()),
                    _ => text.into(),
                })
            }
            Value::List(seq) if seq.items.is_empty() => Value::list(Vec::new()),
            Value::List(seq) => Value::list(items(&seq.items)?),
            Value::Tuple(seq) if seq.items.is_empty() => Value::tuple(Vec::new()),
            Value::Tuple(seq) => Value::tuple(items(&seq.items)?),
            other => Err(arith::unsupported(Binary::Mul, other, &Value::Int(times.into()))),
        }
    }
}

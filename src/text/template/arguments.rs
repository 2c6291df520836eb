//! The evaluated arguments of a call, and how Python binds them to parameters.

use super::limits::{Fault, Outcome};
use super::value::Value;
use std::sync::Arc;

/// Arguments in order, and arguments with names.
#[derive(Clone, Default)]
pub(super) struct Arguments {
    pub(super) positional: Vec<Value>,
    pub(super) named: Vec<(Arc<str>, Value)>,
}

impl Arguments {
    /// Takes the argument of a name.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        let at = self.named.iter().position(|(known, _)| &**known == name)?;
        Some(self.named.remove(at).1)
    }

    /// The values of the parameters `names`, of which the first `required` must be there. An empty name is that of a
    /// parameter without one, which has its place only. `what` names the function in errors.
    pub(super) fn bind<const N: usize>(
        self,
        what: &str,
        names: [&str; N],
        required: usize,
    ) -> Outcome<[Option<Value>; N]> {
        let given = self.positional.len();
        if given > N {
            let message = format!("{what} takes at most {N} arguments, found {given}");
            return Err(Fault::invalid(message));
        }
        let mut values = [const { None }; N];
        for (slot, value) in values.iter_mut().zip(self.positional) {
            *slot = Some(value);
        }
        for (name, value) in self.named {
            let at = names.iter().position(|known| **known == *name && !name.is_empty());
            let Some(at) = at else {
                return Err(Fault::invalid(format!("{what} has no parameter '{name}'")));
            };
            if values[at].replace(value).is_some() {
                return Err(Fault::invalid(format!("{what}: two values for '{name}'")));
            }
        }
        match values[..required].iter().position(Option::is_none) {
            Some(at) => Err(Fault::invalid(format!("{what}: argument {} is missing", at + 1))),
            None => Ok(values),
        }
    }

    /// Fails if there are any.
    pub(super) fn none(self, what: &str) -> Outcome<()> {
        self.bind(what, [], 0).map(|[]: [_; 0]| ())
    }

    /// All arguments as positional ones. Fails if one has a name.
    pub(super) fn unnamed(self, what: &str) -> Outcome<Vec<Value>> {
        match self.named.first() {
            Some((name, _)) => Err(Fault::invalid(format!("{what} has no parameter '{name}'"))),
            None => Ok(self.positional),
        }
    }
}

/// The message for a value of the wrong type.
pub(super) fn wrong(what: &str, expected: &str, found: &Value) -> Box<Fault> {
    if let Value::Undefined(reason) = found {
        return Fault::invalid(&**reason);
    }
    Fault::invalid(format!("{what}: expected {expected}, found {}", found.described()))
}

/// An integer, which a boolean is too.
pub(super) fn int(what: &str, value: &Value) -> Outcome<i128> {
    value.as_int().ok_or_else(|| wrong(what, "an integer", value))
}

/// An integer or the default; `none` is no integer.
pub(super) fn int_or(what: &str, value: Option<Value>, default: i128) -> Outcome<i128> {
    value.map_or(Ok(default), |value| int(what, &value))
}

/// A string.
pub(super) fn text<'a>(what: &str, value: &'a Value) -> Outcome<&'a str> {
    value.as_str().ok_or_else(|| wrong(what, "a string", value))
}

/// A string, or none for a missing argument and for `none`.
pub(super) fn text_or_none<'a>(what: &str, value: &'a Option<Value>) -> Outcome<Option<&'a str>> {
    match value {
        None | Some(Value::None) => Ok(None),
        Some(value) => text(what, value).map(Some),
    }
}

/// Whether the argument is true.
pub(super) fn flag(value: Option<Value>) -> bool {
    value.is_some_and(|value| value.truth())
}

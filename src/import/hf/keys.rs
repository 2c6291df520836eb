//! Typed access to the members of JSON configurations.

use crate::error::{Error, Kind, Result, bail};
use serde_json::{Map, Value};

/// A JSON object with typed access to its members. `null` counts as absent.
#[derive(Clone, Copy)]
pub struct Keys<'a> {
    /// The object.
    pub map: &'a Map<String, Value>,
    /// Used for keys that `map` lacks: a nested text configuration leaves some to the outer object.
    pub outer: Option<&'a Map<String, Value>>,
    /// Used for keys that both lack. A key that is `null` has no default.
    pub defaults: Option<&'a Map<String, Value>>,
    /// The name of the object in messages.
    pub place: &'a str,
}

impl<'a> Keys<'a> {
    /// An object and its name in messages.
    pub fn new(map: &'a Map<String, Value>, place: &'a str) -> Self {
        Keys {
            map,
            outer: None,
            defaults: None,
            place,
        }
    }

    /// The value of a key, `None` if it is absent everywhere.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        let present = |map: &'a Map<String, Value>| map.get(key).filter(|value| !value.is_null());
        let found = present(self.map).or_else(|| self.outer.and_then(present));
        let absent = !self.map.contains_key(key) && self.outer.is_none_or(|outer| !outer.contains_key(key));
        found.or_else(|| self.defaults.filter(|_| absent).and_then(present))
    }

    /// The value of a key as `read` gives it. Errors: `Parse` when that is `None`; `wanted` describes the type.
    pub fn typed<T>(&self, key: &str, wanted: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match read(value) {
            Some(found) => Ok(Some(found)),
            None => bail!(
                Parse,
                "{}: key '{key}': expected {wanted}, found {}",
                self.place,
                brief(value)
            ),
        }
    }

    /// A whole number. Errors: `Parse` for another type.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>> {
        // Some configurations write whole numbers as 8.0.
        let whole = |value: f64| ((0.0..9e15).contains(&value) && value.fract() == 0.0).then_some(value as u64);
        self.typed(key, "a non-negative integer", |v| {
            v.as_u64().or_else(|| v.as_f64().and_then(whole))
        })
    }

    /// As [`Keys::unsigned`], for lengths.
    pub fn size(&self, key: &str) -> Result<Option<usize>> {
        let value = self.unsigned(key)?;
        let fits =
            |value| usize::try_from(value).map_err(|_| Error::new(Kind::Bounds, format!("key '{key}': {value}")));
        value.map(fits).transpose()
    }

    /// A number. Errors: `Parse` for another type.
    pub fn float(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }

    /// A truth value. Errors: `Parse` for another type.
    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }

    /// A string. Errors: `Parse` for another type.
    pub fn string(&self, key: &str) -> Result<Option<&'a str>> {
        self.typed(key, "a string", Value::as_str)
    }

    /// An object. Errors: `Parse` for another type.
    pub fn object(&self, key: &str) -> Result<Option<&'a Map<String, Value>>> {
        self.typed(key, "an object", Value::as_object)
    }

    /// Errors: `UnsupportedModel` when `found`, the value of `key`, is absent.
    pub fn need<T>(&self, key: &str, found: Option<T>) -> Result<T> {
        found.ok_or_else(|| {
            Error::new(
                Kind::UnsupportedModel,
                format!("{}: key '{key}' is missing", self.place),
            )
        })
    }
}

/// The start of a value, for messages.
pub fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

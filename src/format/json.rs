//! Strict, bounded JSON for untrusted text.
//!
//! The text must be UTF-8 without a byte order mark, have at most [`MAX_BYTES`], be nested less than 128 deep, repeat no
//! key within an object, have nothing after the value, and hold only numbers that fit their type.

use crate::error::{Error, Kind, Result, bail};
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::fmt;

/// The longest text that is parsed.
pub const MAX_BYTES: usize = 64 << 20;

/// Parses `text`. Errors: `Parse`, with `what` as the name of the text, and line and column.
pub fn parse(text: &[u8], what: &str) -> Result<Value> {
    if text.len() > MAX_BYTES {
        bail!(
            Parse,
            "{what}: {} bytes of JSON, expected at most {MAX_BYTES}",
            text.len()
        );
    }
    if text.starts_with(b"\xEF\xBB\xBF") {
        bail!(Parse, "{what}: JSON starts with a byte order mark");
    }
    let text = match std::str::from_utf8(text) {
        Ok(text) => text,
        Err(err) => bail!(Parse, "{what}: not UTF-8 from byte {}", err.valid_up_to()),
    };
    // serde_json's recursion limit bounds the depth.
    let mut deserializer = serde_json::Deserializer::from_str(text);
    Strict::deserialize(&mut deserializer)
        .and_then(|Strict(value)| deserializer.end().map(|()| value))
        .map_err(|err| Error::new(Kind::Parse, format!("{what}: {err}")))
}

/// Parses an object. Errors: as [`parse`], and `Parse` for any other value.
pub fn parse_object(text: &[u8], what: &str) -> Result<Map<String, Value>> {
    match parse(text, what)? {
        Value::Object(map) => Ok(map),
        other => bail!(Parse, "{what}: expected an object, found {}", kind_of(&other)),
    }
}

/// `value` without object members that are `null`, at any depth: CMF headers use `null` for "absent".
pub fn without_nulls(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let present = map.iter().filter(|(_, v)| !v.is_null());
            Value::Object(present.map(|(key, v)| (key.clone(), without_nulls(v))).collect())
        }
        Value::Array(items) => Value::Array(items.iter().map(without_nulls).collect()),
        other => other.clone(),
    }
}

/// The type of a value, for error texts.
pub fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// A value in which no object repeats a key.
struct Strict(Value);

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(StrictVisitor).map(Strict)
    }
}

struct StrictVisitor;

impl<'de> Visitor<'de> for StrictVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
        Ok(Value::Bool(v))
    }

    fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
        Ok(Value::from(v))
    }

    fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
        Ok(Value::from(v))
    }

    fn visit_f64<E>(self, v: f64) -> Result<Value, E> {
        Ok(Value::from(v))
    }

    fn visit_str<E>(self, v: &str) -> Result<Value, E> {
        Ok(Value::from(v))
    }

    fn visit_string<E>(self, v: String) -> Result<Value, E> {
        Ok(Value::from(v))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(Strict(item)) = seq.next_element()? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            if object.contains_key(&key) {
                return Err(A::Error::custom(format!("key '{key}' appears twice")));
            }
            let Strict(value) = map.next_value()?;
            object.insert(key, value);
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: impl AsRef<[u8]>) -> String {
        let err = parse(text.as_ref(), "it").expect_err("must be refused");
        assert_eq!(err.kind, Kind::Parse);
        err.message
    }

    #[test]
    fn values_and_key_order_are_kept() {
        let text = r#"{"z": [1, -2, 2.5, null, true], "a": {"ключ": "\u00e9"}}"#;
        assert_eq!(
            parse(text.as_bytes(), "it").unwrap(),
            serde_json::from_str::<Value>(text).unwrap()
        );
        let keys: Vec<_> = parse_object(text.as_bytes(), "it").unwrap().keys().cloned().collect();
        assert_eq!(keys, ["z", "a"]);
    }

    #[test]
    fn invalid_texts_are_refused() {
        assert!(refusal(r#"{"a": {"b": 1, "b": 1}}"#).contains("'b' appears twice at line 1"));
        assert!(refusal("{} {}").contains("trailing"));
        assert!(refusal("\u{feff}{}").contains("byte order mark"));
        assert!(refusal(b"{\"a\": \"\xFF\"}").contains("not UTF-8 from byte 7"));
        assert!(refusal(r#"{"a": 1e999}"#).contains("out of range"));
        assert!(refusal("").contains("EOF"));
        assert!(refusal("NaN").contains("line 1"));
        assert!(refusal(vec![b' '; MAX_BYTES + 1]).contains("expected at most"));
    }

    #[test]
    fn depth_is_bounded() {
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert!(parse(nested(127).as_bytes(), "it").is_ok());
        assert!(refusal(nested(128)).contains("recursion limit"));
        assert!(refusal("[".repeat(100_000)).contains("recursion limit"));
        assert!(refusal("{\"a\":".repeat(100_000)).contains("recursion limit"));
    }

    #[test]
    fn null_members_are_removed_and_null_items_kept() {
        let value = parse(br#"{"a": null, "b": {"c": null, "d": [null, {"e": null}]}}"#, "it").unwrap();
        assert_eq!(without_nulls(&value), serde_json::json!({"b": {"d": [null, {}]}}));
    }
}

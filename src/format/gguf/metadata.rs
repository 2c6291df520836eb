//! The metadata of a GGUF file: typed values by key, read with a bounded cursor.
//!
//! Arrays are not copied: only their position in the file is stored, so an unused vocabulary costs nothing.

use crate::error::{Error, Kind, Result, bail};
use std::collections::HashMap;

/// The format's limit on the length of a key.
const MAX_KEY: u64 = 65_535;
/// The longest string that is read, such as a chat template or a licence.
const MAX_STRING: u64 = 1 << 30;

/// Reads little-endian fields in order, never past the end.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8], at: usize) -> Self {
        Cursor { bytes, at }
    }

    pub(super) fn offset(&self) -> usize {
        self.at
    }

    pub(super) fn left(&self) -> u64 {
        self.bytes.len().saturating_sub(self.at) as u64
    }

    fn take(&mut self, len: u64, what: &str) -> Result<&'a [u8]> {
        let found = usize::try_from(len)
            .ok()
            .and_then(|len| self.at.checked_add(len))
            .and_then(|end| self.bytes.get(self.at..end));
        let Some(found) = found else {
            bail!(
                Bounds,
                "{what} at offset {} needs {len} bytes, {} are left in the file",
                self.at,
                self.left()
            );
        };
        self.at += found.len();
        Ok(found)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let taken = self.take(N as u64, what)?;
        let mut out = [0; N];
        out.copy_from_slice(taken);
        Ok(out)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    pub(super) fn string(&mut self, max: u64, what: &str) -> Result<&'a str> {
        let len = self.u64(what)?;
        if len > max {
            bail!(
                Bounds,
                "{what} at offset {} has {len} bytes, at most {max} are allowed",
                self.at
            );
        }
        let at = self.at;
        let bytes = self.take(len, what)?;
        std::str::from_utf8(bytes).map_err(|_| Error::new(Kind::Parse, format!("{what} at offset {at} is not UTF-8")))
    }
}

/// The value types of the format, in id order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Type {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

const TYPES: [(Type, &str, u64); 13] = [
    (Type::U8, "uint8", 1),
    (Type::I8, "int8", 1),
    (Type::U16, "uint16", 2),
    (Type::I16, "int16", 2),
    (Type::U32, "uint32", 4),
    (Type::I32, "int32", 4),
    (Type::F32, "float32", 4),
    (Type::Bool, "bool", 1),
    // The length field; the text follows it.
    (Type::String, "string", 8),
    (Type::Array, "array", 12),
    (Type::U64, "uint64", 8),
    (Type::I64, "int64", 8),
    (Type::F64, "float64", 8),
];

impl Type {
    fn from_id(id: u32, key: &str) -> Result<Type> {
        match TYPES.get(id as usize) {
            Some(&(kind, _, _)) => Ok(kind),
            None => bail!(
                Parse,
                "key '{key}' has value type {id}, known are 0 to {}",
                TYPES.len() - 1
            ),
        }
    }

    fn name(self) -> &'static str {
        TYPES[self as usize].1
    }

    /// Bytes of a value; of the smallest one for strings and arrays.
    fn min_bytes(self) -> u64 {
        TYPES[self as usize].2
    }
}

/// A value. An array is a position in the file.
#[derive(Clone, Debug, PartialEq)]
enum Value {
    Unsigned(u64),
    Signed(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(String),
    Array { of: Type, len: u64, at: usize },
}

/// All keys of a file.
#[derive(Debug, Default)]
pub struct Metadata {
    values: HashMap<String, (Type, Value)>,
}

impl Metadata {
    /// Reads `count` entries. Errors: `Parse` and `Bounds` for anything malformed; duplicate keys are malformed.
    pub(super) fn read(cursor: &mut Cursor, count: u64) -> Result<Metadata> {
        // The smallest entry: key length, one byte of key, value type, one byte of value.
        if count > cursor.left() / 14 {
            bail!(
                Bounds,
                "{count} metadata entries do not fit the {} bytes left in the file",
                cursor.left()
            );
        }
        let mut values = HashMap::new();
        for _ in 0..count {
            let key = cursor.string(MAX_KEY, "a metadata key")?;
            if key.is_empty() {
                bail!(Parse, "empty metadata key before offset {}", cursor.offset());
            }
            let kind = Type::from_id(cursor.u32(key)?, key)?;
            let value = read_value(cursor, kind, key)?;
            if values.insert(key.to_owned(), (kind, value)).is_some() {
                bail!(Parse, "metadata key '{key}' occurs twice");
            }
        }
        Ok(Metadata { values })
    }

    /// Every key, in no particular order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.values.keys().map(String::as_str)
    }

    /// Whether `key` is present.
    pub fn has(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    fn wrong(&self, key: &str, wanted: &str) -> Error {
        let found = self.values.get(key).map_or("nothing", |(kind, _)| kind.name());
        Error::new(
            Kind::Parse,
            format!("metadata key '{key}': expected {wanted}, found {found}"),
        )
    }

    /// What `get` makes of a value; `None` if the key is absent. Errors: `Parse` if `get` finds no `wanted` value.
    fn get<'m, T>(
        &'m self,
        key: &str,
        wanted: &str,
        get: impl FnOnce(Type, &'m Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some((kind, value)) = self.values.get(key) else {
            return Ok(None);
        };
        get(*kind, value).map(Some).ok_or_else(|| self.wrong(key, wanted))
    }

    /// A string; `None` if the key is absent. Errors: `Parse` if it holds something else.
    pub fn string(&self, key: &str) -> Result<Option<&str>> {
        self.get(key, "a string", |_, value| match value {
            Value::String(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// A bool; `None` if absent. Errors: `Parse` if it holds something else.
    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.get(key, "a bool", |_, value| match value {
            Value::Bool(value) => Some(*value),
            _ => None,
        })
    }

    /// A non-negative integer of any width; `None` if absent. Errors: `Parse` if it holds something else.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>> {
        self.get(key, "a non-negative integer", |_, value| match value {
            Value::Unsigned(value) => Some(*value),
            Value::Signed(value) => u64::try_from(*value).ok(),
            _ => None,
        })
    }

    /// A 32-bit unsigned integer; `None` if absent. Errors: `Parse` if it holds something else.
    pub fn uint32(&self, key: &str) -> Result<Option<u32>> {
        self.get(key, "a uint32", |kind, value| match (kind, value) {
            (Type::U32, Value::Unsigned(value)) => u32::try_from(*value).ok(),
            _ => None,
        })
    }

    /// A finite float; `None` if absent. An f32 becomes the f64 of its shortest decimal form, so that 1e-5 stays 1e-5.
    /// Errors: `Parse` if it holds something else.
    pub fn float(&self, key: &str) -> Result<Option<f64>> {
        let value = self.get(key, "a float", |_, value| match value {
            Value::F32(value) => Some(shortest(*value)),
            Value::F64(value) => Some(*value),
            _ => None,
        })?;
        match value {
            Some(value) if !value.is_finite() => Err(self.wrong(key, "a finite number")),
            value => Ok(value),
        }
    }

    /// A number as JSON: an integer, or a float as [`Metadata::float`] returns it; `None` if absent.
    /// Errors: `Parse` if it holds something else.
    pub fn number(&self, key: &str) -> Result<Option<serde_json::Value>> {
        match self.values.get(key) {
            Some((_, Value::Unsigned(value))) => Ok(Some((*value).into())),
            Some((_, Value::Signed(value))) => Ok(Some((*value).into())),
            _ => Ok(self.float(key)?.map(serde_json::Value::from)),
        }
    }

    /// Whether the key is present and holds an array.
    pub fn is_array(&self, key: &str) -> bool {
        matches!(self.values.get(key), Some((_, Value::Array { .. })))
    }

    /// The strings of an array; `bytes` is the file. `None` if absent. Errors: `Parse` if the key holds something else.
    pub fn strings<'a>(&self, key: &str, bytes: &'a [u8]) -> Result<Option<Vec<&'a str>>> {
        let place = self.get(key, "an array of strings", |_, value| match value {
            Value::Array {
                of: Type::String,
                len,
                at,
            } => Some((*len, *at)),
            _ => None,
        })?;
        let Some((len, at)) = place else { return Ok(None) };
        let mut cursor = Cursor::new(bytes, at);
        let strings = (0..len).map(|_| cursor.string(MAX_STRING, key));
        strings.collect::<Result<_>>().map(Some)
    }

    /// The integers of an array; `bytes` is the file. `None` if absent. Errors: `Parse` if the key holds something else.
    pub fn integers(&self, key: &str, bytes: &[u8]) -> Result<Option<Vec<i64>>> {
        self.numbers(key, bytes, "an array of integers", |value| match value {
            Value::Unsigned(value) => i64::try_from(*value).ok(),
            Value::Signed(value) => Some(*value),
            _ => None,
        })
    }

    /// The bools of an array, or its integers, of which those other than 0 are true; `bytes` is the file. `None` if absent.
    /// Errors: `Parse` if the key holds something else.
    pub fn switches(&self, key: &str, bytes: &[u8]) -> Result<Option<Vec<bool>>> {
        self.numbers(key, bytes, "an array of bools", |value| match value {
            Value::Bool(value) => Some(*value),
            Value::Unsigned(value) => Some(*value != 0),
            Value::Signed(value) => Some(*value != 0),
            _ => None,
        })
    }

    /// The 32-bit floats of an array; `bytes` is the file. `None` if absent. Errors: `Parse` if the key holds something else.
    pub fn floats(&self, key: &str, bytes: &[u8]) -> Result<Option<Vec<f32>>> {
        self.numbers(key, bytes, "an array of float32", |value| match value {
            Value::F32(value) => Some(*value),
            _ => None,
        })
    }

    /// The bytes of an array of 8-bit integers; `bytes` is the file. `None` if absent. Errors: `Parse` if the key holds
    /// something else.
    pub fn bytes<'a>(&self, key: &str, bytes: &'a [u8]) -> Result<Option<&'a [u8]>> {
        let place = self.get(key, "an array of bytes", |_, value| match value {
            Value::Array {
                of: Type::U8 | Type::I8,
                len,
                at,
            } => Some((*len, *at)),
            _ => None,
        })?;
        place.map(|(len, at)| Cursor::new(bytes, at).take(len, key)).transpose()
    }

    fn numbers<T>(
        &self,
        key: &str,
        bytes: &[u8],
        wanted: &str,
        get: fn(&Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>> {
        let place = self.get(key, wanted, |_, value| match value {
            Value::Array { of, len, at } => Some((*of, *len, *at)),
            _ => None,
        })?;
        let Some((of, len, at)) = place else { return Ok(None) };
        let mut cursor = Cursor::new(bytes, at);
        let mut item = || {
            let value = read_value(&mut cursor, of, key)?;
            get(&value).ok_or_else(|| {
                Error::new(
                    Kind::Parse,
                    format!("metadata key '{key}': expected {wanted}, found {}s", of.name()),
                )
            })
        };
        (0..len).map(|_| item()).collect::<Result<_>>().map(Some)
    }
}

/// The f64 with the float's shortest decimal form.
pub fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

fn read_value(cursor: &mut Cursor, kind: Type, key: &str) -> Result<Value> {
    Ok(match kind {
        Type::U8 => Value::Unsigned(u64::from(u8::from_le_bytes(cursor.array(key)?))),
        Type::I8 => Value::Signed(i64::from(i8::from_le_bytes(cursor.array(key)?))),
        Type::U16 => Value::Unsigned(u64::from(u16::from_le_bytes(cursor.array(key)?))),
        Type::I16 => Value::Signed(i64::from(i16::from_le_bytes(cursor.array(key)?))),
        Type::U32 => Value::Unsigned(u64::from(cursor.u32(key)?)),
        Type::I32 => Value::Signed(i64::from(i32::from_le_bytes(cursor.array(key)?))),
        Type::U64 => Value::Unsigned(cursor.u64(key)?),
        Type::I64 => Value::Signed(i64::from_le_bytes(cursor.array(key)?)),
        Type::F32 => Value::F32(f32::from_le_bytes(cursor.array(key)?)),
        Type::F64 => Value::F64(f64::from_le_bytes(cursor.array(key)?)),
        Type::Bool => match u8::from_le_bytes(cursor.array(key)?) {
            0 => Value::Bool(false),
            1 => Value::Bool(true),
            other => bail!(Parse, "metadata key '{key}': a bool is 0 or 1, found {other}"),
        },
        Type::String => Value::String(cursor.string(MAX_STRING, key)?.to_owned()),
        Type::Array => {
            let of = Type::from_id(cursor.u32(key)?, key)?;
            if of == Type::Array {
                bail!(Parse, "metadata key '{key}': nested arrays are not supported");
            }
            let len = cursor.u64(key)?;
            if len > cursor.left() / of.min_bytes() {
                bail!(
                    Bounds,
                    "metadata key '{key}': {len} values of {} do not fit the {} bytes left",
                    of.name(),
                    cursor.left()
                );
            }
            let at = cursor.offset();
            if of == Type::String {
                for _ in 0..len {
                    cursor.string(MAX_STRING, key)?;
                }
            } else {
                let values = cursor.take(len * of.min_bytes(), key)?;
                if of == Type::Bool && values.iter().any(|&value| value > 1) {
                    bail!(Parse, "metadata key '{key}': a bool is 0 or 1");
                }
            }
            Value::Array { of, len, at }
        }
    })
}

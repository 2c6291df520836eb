//! The key-value section of a GGUF file: a bounded cursor and typed values.
//!
//! Arrays stay where they are in the file; only their place is kept, so a vocabulary costs nothing until it is asked for.
//! Knows no key's meaning except that a getter names the key it could not satisfy.

use crate::error::{Error, Kind, Result, bail};
use std::collections::HashMap;

/// A key longer than this is damage, not a name (the format's own limit).
const MAX_KEY: u64 = 65_535;
/// A single string, such as a chat template or a licence, may not exceed this many bytes.
const MAX_STRING: u64 = 1 << 30;

/// Reads little-endian fields front to back and never past the end.
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
    // The length field alone; the text follows.
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

    /// Bytes of one value, or of the smallest one for strings and arrays.
    fn min_bytes(self) -> u64 {
        TYPES[self as usize].2
    }
}

/// One value. Arrays are a place in the file.
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
        // Key length, one byte of key, value type, one byte of value.
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
            format!("metadata key '{key}': wanted {wanted}, found {found}"),
        )
    }

    /// A text, `None` when the key is absent. Errors: `Parse` when it is something else.
    pub fn string(&self, key: &str) -> Result<Option<&str>> {
        match self.values.get(key) {
            None => Ok(None),
            Some((_, Value::String(text))) => Ok(Some(text)),
            Some(_) => Err(self.wrong(key, "a string")),
        }
    }

    /// A truth value, `None` when absent. Errors: `Parse` when it is something else.
    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        match self.values.get(key) {
            None => Ok(None),
            Some((_, Value::Bool(value))) => Ok(Some(*value)),
            Some(_) => Err(self.wrong(key, "a bool")),
        }
    }

    /// A non-negative integer of any width, `None` when absent. Errors: `Parse` when it is something else.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>> {
        match self.values.get(key) {
            None => Ok(None),
            Some((_, Value::Unsigned(value))) => Ok(Some(*value)),
            Some((_, Value::Signed(value))) if *value >= 0 => Ok(Some(value.unsigned_abs())),
            Some(_) => Err(self.wrong(key, "a non-negative integer")),
        }
    }

    /// Exactly a 32-bit unsigned integer, `None` when absent. Errors: `Parse` when it is something else.
    pub fn uint32(&self, key: &str) -> Result<Option<u32>> {
        match self.values.get(key) {
            None => Ok(None),
            Some((Type::U32, Value::Unsigned(value))) => {
                Ok(Some(u32::try_from(*value).map_err(|_| self.wrong(key, "a uint32"))?))
            }
            Some(_) => Err(self.wrong(key, "a uint32")),
        }
    }

    /// A finite number, `None` when absent. A 32-bit value becomes the double of its shortest decimal spelling, so that
    /// what was written as 1e-5 is 1e-5 again. Errors: `Parse` when it is something else.
    pub fn float(&self, key: &str) -> Result<Option<f64>> {
        let value = match self.values.get(key) {
            None => return Ok(None),
            Some((_, Value::F32(value))) => shortest(*value),
            Some((_, Value::F64(value))) => *value,
            Some(_) => return Err(self.wrong(key, "a float")),
        };
        if !value.is_finite() {
            return Err(self.wrong(key, "a finite number"));
        }
        Ok(Some(value))
    }

    /// A number as JSON: an integer, or a finite float as [`Metadata::float`] gives it; `None` when absent.
    /// Errors: `Parse` when it is something else.
    pub fn number(&self, key: &str) -> Result<Option<serde_json::Value>> {
        match self.values.get(key) {
            Some((_, Value::Unsigned(value))) => Ok(Some((*value).into())),
            Some((_, Value::Signed(value))) => Ok(Some((*value).into())),
            _ => Ok(self.float(key)?.map(serde_json::Value::from)),
        }
    }

    /// Whether the key is there and holds an array.
    pub fn is_array(&self, key: &str) -> bool {
        matches!(self.values.get(key), Some((_, Value::Array { .. })))
    }

    /// The strings of an array in `bytes`, the file it was read from; `None` when absent.
    /// Errors: `Parse` when it is something else.
    pub fn strings<'a>(&self, key: &str, bytes: &'a [u8]) -> Result<Option<Vec<&'a str>>> {
        let (len, at) = match self.values.get(key) {
            None => return Ok(None),
            Some((
                _,
                Value::Array {
                    of: Type::String,
                    len,
                    at,
                },
            )) => (*len, *at),
            Some(_) => return Err(self.wrong(key, "an array of strings")),
        };
        let mut cursor = Cursor::new(bytes, at);
        (0..len)
            .map(|_| cursor.string(MAX_STRING, key))
            .collect::<Result<_>>()
            .map(Some)
    }

    /// The integers of an array in `bytes`, the file it was read from; `None` when absent.
    /// Errors: `Parse` when it is something else.
    pub fn integers(&self, key: &str, bytes: &[u8]) -> Result<Option<Vec<i64>>> {
        self.numbers(key, bytes, "an array of integers", |value| match value {
            Value::Unsigned(value) => i64::try_from(*value).ok(),
            Value::Signed(value) => Some(*value),
            _ => None,
        })
    }

    /// The truth values of an array in `bytes`, the file it was read from, or its integers as such; `None` when absent.
    /// Errors: `Parse` when it is something else.
    pub fn switches(&self, key: &str, bytes: &[u8]) -> Result<Option<Vec<bool>>> {
        self.numbers(key, bytes, "an array of bools", |value| match value {
            Value::Bool(value) => Some(*value),
            Value::Unsigned(value) => Some(*value != 0),
            Value::Signed(value) => Some(*value != 0),
            _ => None,
        })
    }

    /// The 32-bit floats of an array in `bytes`, the file it was read from; `None` when absent.
    /// Errors: `Parse` when it is something else.
    pub fn floats(&self, key: &str, bytes: &[u8]) -> Result<Option<Vec<f32>>> {
        self.numbers(key, bytes, "an array of float32", |value| match value {
            Value::F32(value) => Some(*value),
            _ => None,
        })
    }

    /// The bytes of an array of 8-bit integers in `bytes`, the file it was read from; `None` when absent.
    /// Errors: `Parse` when it is something else.
    pub fn bytes<'a>(&self, key: &str, bytes: &'a [u8]) -> Result<Option<&'a [u8]>> {
        match self.values.get(key) {
            None => Ok(None),
            Some((
                _,
                Value::Array {
                    of: Type::U8 | Type::I8,
                    len,
                    at,
                },
            )) => Cursor::new(bytes, *at).take(*len, key).map(Some),
            Some(_) => Err(self.wrong(key, "an array of bytes")),
        }
    }

    fn numbers<T>(
        &self,
        key: &str,
        bytes: &[u8],
        wanted: &str,
        get: fn(&Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>> {
        let (of, len, at) = match self.values.get(key) {
            None => return Ok(None),
            Some((_, Value::Array { of, len, at })) => (*of, *len, *at),
            Some(_) => return Err(self.wrong(key, wanted)),
        };
        let mut cursor = Cursor::new(bytes, at);
        let mut item = || {
            let value = read_value(&mut cursor, of, key)?;
            get(&value).ok_or_else(|| {
                Error::new(
                    Kind::Parse,
                    format!("metadata key '{key}': wanted {wanted}, found {}s", of.name()),
                )
            })
        };
        (0..len).map(|_| item()).collect::<Result<_>>().map(Some)
    }
}

/// The double that is written like the float's shortest decimal.
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
                bail!(Parse, "metadata key '{key}': arrays of arrays are not read");
            }
            let len = cursor.u64(key)?;
            // Checked once for the whole array, so that a long vocabulary stays cheap.
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

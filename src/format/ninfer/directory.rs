//! The directory of a file: parsed, and checked against the file's length.

use super::format::Format;
use crate::error::{Error, Kind, Result, bail};
use crate::format::bytes::u64_at;
use crate::format::json;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::ops::Range;

/// The first seven bytes of a file. The eighth is the version.
pub const MAGIC: [u8; 7] = *b"NINFER\0";
pub(super) const VERSION: u8 = 2;
/// Bytes before the directory.
pub(super) const PREFIX: u64 = 16;
/// Objects begin at a multiple of this.
pub(super) const PAYLOAD_ALIGNMENT: u64 = 4096;
/// Offsets of tensors are multiples of this; those of resources are free.
pub(super) const TENSOR_ALIGNMENT: u64 = 256;
/// The longest directory that is read. The largest published files have 300 KB.
const MAX_DIRECTORY: u64 = 4 << 20;
pub(super) const RESOURCE_ENCODING: &str = "raw-bytes-v1";

/// What a file says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// The network, for example `qwen3.6-27b`.
    pub model_id: String,
    /// The kind of weights, for example `folded-ternary`.
    pub weights_id: String,
}

/// One tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Row-major shape; empty for a scalar.
    pub shape: Vec<u64>,
    /// The encoding of its bytes.
    pub format: Format,
}

/// An object of the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// The name.
    pub name: String,
    /// `None` for a resource: bytes without a shape, such as a tokenizer.
    pub tensor: Option<Tensor>,
    /// The byte range in the file, checked to be inside it.
    pub range: Range<usize>,
}

/// The directory of a file, without the file's bytes.
#[derive(Debug)]
pub struct Ninfer {
    /// What the file says of itself.
    pub identity: Identity,
    /// Every object, in file order.
    pub objects: Vec<Object>,
    ids: HashMap<String, usize>,
}

impl Ninfer {
    /// Reads and checks the directory of the file `bytes`. Reads no object.
    ///
    /// Errors: `InvalidMagic`; `UnsupportedVersion`; `UnsupportedTensorType` for unknown formats and layouts;
    /// `UnsupportedFeature` for resources of unknown encoding; `Bounds` for sizes and offsets that do not fit; `Parse` for
    /// everything else that a directory must not contain.
    pub fn parse(bytes: &[u8]) -> Result<Ninfer> {
        let (directory, start) = directory(bytes)?;
        let mut root = json::parse_object(directory, "directory")?;
        members(&root, &["identity", "objects"], "directory")?;
        let identity = identity(root.remove("identity").unwrap_or_default())?;
        let entries = match root.remove("objects") {
            Some(Value::Array(entries)) if !entries.is_empty() => entries,
            _ => bail!(Parse, "directory: 'objects' must be an array of at least one object"),
        };
        let mut ids = HashMap::new();
        let mut objects: Vec<Object> = Vec::with_capacity(entries.len());
        let mut end = 0;
        for (i, entry) in entries.into_iter().enumerate() {
            let entry = Entry::read(entry, i)?;
            let name = entry.name.clone();
            if ids.insert(name.clone(), i).is_some() {
                bail!(Parse, "duplicate object name: {name}");
            }
            let object = entry.place(end, start, bytes.len() as u64)?;
            end = object.range.end as u64 - start;
            objects.push(object);
        }
        Ok(Ninfer { identity, objects, ids })
    }

    /// The object of this name.
    pub fn find(&self, name: &str) -> Option<&Object> {
        self.ids.get(name).and_then(|&i| self.objects.get(i))
    }
}

/// The text of the directory, and the offset in the file from which the offsets of objects count.
fn directory(bytes: &[u8]) -> Result<(&[u8], u64)> {
    let len = bytes.len() as u64;
    if len < PREFIX {
        bail!(
            Bounds,
            "a file of {len} bytes is shorter than the v2 prefix of {PREFIX}"
        );
    }
    if !bytes.starts_with(&MAGIC) {
        bail!(
            InvalidMagic,
            "expected 'NINFER', found bytes {:02x?}",
            &bytes[..MAGIC.len()]
        );
    }
    if bytes[MAGIC.len()] != VERSION {
        let found = bytes[MAGIC.len()];
        bail!(UnsupportedVersion, ".ninfer version {found}, supported: {VERSION}");
    }
    let json_bytes = u64_at(bytes, 8).unwrap_or(0);
    if json_bytes == 0 {
        bail!(Parse, "the directory has 0 bytes, expected at least 1");
    }
    let end = PREFIX.checked_add(json_bytes);
    let start = end.and_then(|end| end.checked_next_multiple_of(PAYLOAD_ALIGNMENT));
    let Some((end, start)) = end.zip(start).filter(|&(_, start)| start <= len) else {
        bail!(
            Bounds,
            "a directory of {json_bytes} bytes and the start of the objects do not fit a file of {len} bytes"
        );
    };
    if json_bytes > MAX_DIRECTORY {
        bail!(
            Parse,
            "a directory of {json_bytes} bytes, expected at most {MAX_DIRECTORY}"
        );
    }
    Ok((&bytes[PREFIX as usize..end as usize], start))
}

/// Errors: `Parse` unless `object` has exactly these members, none of them null.
fn members(object: &Map<String, Value>, expected: &[&str], what: &str) -> Result<()> {
    if let Some(missing) = expected.iter().find(|key| object.get(**key).is_none_or(Value::is_null)) {
        bail!(Parse, "{what}: member '{missing}' is missing");
    }
    if let Some(extra) = object.keys().find(|key| !expected.contains(&key.as_str())) {
        bail!(Parse, "{what}: unknown member '{extra}'");
    }
    Ok(())
}

fn identity(value: Value) -> Result<Identity> {
    let Value::Object(object) = &value else {
        bail!(Parse, "identity: expected an object, found {}", json::kind_of(&value));
    };
    members(object, &["model_id", "weights_id"], "identity")?;
    let identity = Identity::deserialize(value);
    let identity = identity.map_err(|err| Error::new(Kind::Parse, format!("identity: {err}")))?;
    for (key, text) in [("model_id", &identity.model_id), ("weights_id", &identity.weights_id)] {
        if text.is_empty() {
            bail!(Parse, "identity: '{key}' is empty");
        }
    }
    Ok(identity)
}

/// An entry of the directory, its place in the file not yet checked.
struct Entry {
    name: String,
    tensor: Option<Tensor>,
    offset: u64,
    bytes: u64,
}

impl Entry {
    fn read(value: Value, index: usize) -> Result<Entry> {
        let what = || format!("object {index}");
        let Value::Object(entry) = value else {
            bail!(Parse, "{}: expected an object, found {}", what(), json::kind_of(&value));
        };
        let kind = text(&entry, "kind", &what())?;
        let name = text(&entry, "name", &what())?.to_owned();
        let what = format!("object '{name}'");
        let tensor = match kind {
            "tensor" => {
                members(
                    &entry,
                    &["name", "kind", "shape", "format", "layout", "offset", "bytes"],
                    &what,
                )?;
                Some(tensor(&entry, &name, &what)?)
            }
            "resource" => {
                members(&entry, &["name", "kind", "encoding", "offset", "bytes"], &what)?;
                let encoding = text(&entry, "encoding", &what)?;
                if encoding != RESOURCE_ENCODING {
                    bail!(
                        UnsupportedFeature,
                        "{what}: encoding '{encoding}', supported: {RESOURCE_ENCODING}"
                    );
                }
                None
            }
            other => bail!(Parse, "{what}: kind '{other}', expected 'tensor' or 'resource'"),
        };
        let offset = integer(&entry["offset"], 0, "offset", &what)?;
        let bytes = integer(&entry["bytes"], 1, "bytes", &what)?;
        Ok(Entry {
            name,
            tensor,
            offset,
            bytes,
        })
    }

    /// Checks size and place. `end`: where the previous object ends, counted from `start`; `len`: bytes of the file.
    fn place(self, end: u64, start: u64, len: u64) -> Result<Object> {
        let Entry {
            name,
            tensor,
            offset,
            bytes,
        } = self;
        let mut alignment = 1;
        if let Some(tensor) = &tensor {
            alignment = TENSOR_ALIGNMENT;
            let what = |err: Error| err.context(format_args!("tensor {name}"));
            let size = tensor.format.size(&tensor.shape).map_err(what)?;
            if size != bytes {
                bail!(Bounds, "tensor {name} stores {bytes} bytes; layout requires {size}");
            }
        }
        if offset < end {
            bail!(
                Bounds,
                "object '{name}' is at offset {offset}, before the end of the previous object at {end}"
            );
        }
        if !offset.is_multiple_of(alignment) {
            bail!(
                Bounds,
                "object '{name}' is at offset {offset}, not a multiple of {alignment}"
            );
        }
        let first = start.checked_add(offset);
        let range = first.and_then(|first| Some(first..first.checked_add(bytes)?));
        match range.filter(|range| range.end <= len) {
            Some(range) => Ok(Object {
                name,
                tensor,
                range: range.start as usize..range.end as usize,
            }),
            None => bail!(
                Bounds,
                "object '{name}': {bytes} bytes at offset {offset} end after the file, whose objects have {}",
                len.saturating_sub(start)
            ),
        }
    }
}

fn tensor(entry: &Map<String, Value>, name: &str, what: &str) -> Result<Tensor> {
    let Value::Array(dims) = &entry["shape"] else {
        bail!(
            Parse,
            "{what}: 'shape' must be an array, found {}",
            json::kind_of(&entry["shape"])
        );
    };
    let shape: Vec<u64> = dims
        .iter()
        .map(|dim| integer(dim, 1, "shape", what))
        .collect::<Result<_>>()?;
    let name_of = text(entry, "format", what)?;
    let layout = text(entry, "layout", what)?;
    let Some(format) = Format::from_name(name_of) else {
        bail!(
            UnsupportedTensorType,
            "tensor {name}: format {name_of}, known are {}",
            Format::ALL.map(Format::name).join(", ")
        );
    };
    if !Format::ALL.iter().any(|format| format.layout() == layout) {
        bail!(
            UnsupportedTensorType,
            "tensor {name}: layout {layout}, expected {}",
            format.layout()
        );
    }
    if format.layout() != layout {
        bail!(
            Parse,
            "{what}: format {name_of} in layout {layout}, expected {}",
            format.layout()
        );
    }
    Ok(Tensor { shape, format })
}

/// The non-empty string `key`.
fn text<'a>(entry: &'a Map<String, Value>, key: &str, what: &str) -> Result<&'a str> {
    match entry.get(key) {
        Some(Value::String(text)) if !text.is_empty() => Ok(text),
        Some(Value::String(_)) => bail!(Parse, "{what}: '{key}' is empty"),
        Some(other) if !other.is_null() => {
            bail!(
                Parse,
                "{what}: '{key}' must be a string, found {}",
                json::kind_of(other)
            )
        }
        _ => bail!(Parse, "{what}: member '{key}' is missing"),
    }
}

/// An integer of at least `least` that was written as one: no fraction, no exponent.
fn integer(value: &Value, least: u64, key: &str, what: &str) -> Result<u64> {
    match value.as_u64().filter(|&number| number >= least) {
        Some(number) => Ok(number),
        None => bail!(
            Parse,
            "{what}: '{key}': expected an integer of at least {least}, found {value}"
        ),
    }
}

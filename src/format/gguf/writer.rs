//! Writing a file, version 3, under a temporary name that is renamed at the end.

use super::{ALIGNMENT, MAGIC, MAX_DIMS, MAX_NAME};
use crate::dtype::{Dtype, Size};
use crate::error::{Error, Result, bail, error};
use crate::format::output::{publish, target, temporary_beside};
use std::collections::HashSet;
use std::io::{BufWriter, Write};
use std::path::Path;

const VERSION: u32 = 3;
/// The number of the value type of arrays.
const ARRAY: u32 = 9;

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum Item {
    /// uint32.
    Unsigned(u32),
    /// float32.
    Float(f32),
    /// bool.
    Bool(bool),
    /// A string.
    Text(String),
    /// An array of int32.
    Integers(Vec<i32>),
    /// An array of strings.
    Texts(Vec<String>),
}

/// A tensor to be written.
pub struct NewTensor<'a> {
    /// The name.
    pub name: String,
    /// The type, one of those that have a number in GGUF.
    pub dtype: Dtype,
    /// Row-major shape, rows first.
    pub shape: Vec<u64>,
    /// Makes the payload. Called once, when its turn comes.
    pub payload: Box<dyn FnOnce() -> Result<Vec<u8>> + 'a>,
}

/// Writes a file of these keys and tensors, in this order, replacing a regular file at `path`. Returns its length in bytes.
///
/// Errors: `UnsupportedTensorType` for a type without a number; `Internal` for tensors that the format cannot hold, keys that
/// occur twice, and payloads of another length than the shape has; `Io`; those of the payloads. After an error no file is left.
pub fn write(path: &Path, metadata: &[(String, Item)], tensors: Vec<NewTensor>) -> Result<u64> {
    let (mut head, sizes) = head(metadata, &tensors)?;
    pad(&mut head);
    let path = target(path)?;
    let file = temporary_beside(&path)?;
    let io = |err: std::io::Error| Error::io(&path, &err);
    let mut out = BufWriter::new(file);
    out.write_all(&head).map_err(io)?;
    let mut written = head.len() as u64;
    for (tensor, size) in tensors.into_iter().zip(sizes) {
        let mut payload = (tensor.payload)()?;
        if payload.len() as u64 != size {
            let (name, found) = (tensor.name, payload.len());
            bail!(Internal, "tensor '{name}' has {found} bytes, expected {size}");
        }
        pad(&mut payload);
        out.write_all(&payload).map_err(io)?;
        written += payload.len() as u64;
    }
    let file = out.into_inner().map_err(|err| io(err.into_error()))?;
    file.as_file().sync_all().map_err(io)?;
    publish(file.into_temp_path(), &path)?;
    Ok(written)
}

/// Header, keys and records, and the size of each payload.
fn head(metadata: &[(String, Item)], tensors: &[NewTensor]) -> Result<(Vec<u8>, Vec<u64>)> {
    let mut head = MAGIC.to_vec();
    head.extend(VERSION.to_le_bytes());
    head.extend((tensors.len() as u64).to_le_bytes());
    head.extend((metadata.len() as u64).to_le_bytes());
    let mut names = HashSet::new();
    for (key, item) in metadata {
        if key.is_empty() || !names.insert(key) {
            bail!(Internal, "metadata key '{key}' is empty or occurs twice");
        }
        text(&mut head, key);
        item.write(&mut head);
    }
    let mut names = HashSet::new();
    let mut sizes = Vec::with_capacity(tensors.len());
    let mut offset = 0u64;
    for NewTensor { name, dtype, shape, .. } in tensors {
        let dims = 1..=MAX_DIMS as usize;
        if name.is_empty() || name.len() as u64 > MAX_NAME || !dims.contains(&shape.len()) || !names.insert(name) {
            bail!(
                Internal,
                "tensor '{name}' of shape {shape:?} cannot be written, or occurs twice"
            );
        }
        let number = dtype.gguf().ok_or_else(|| {
            error!(
                UnsupportedTensorType,
                "tensor '{name}': GGUF has no type for {}",
                dtype.name()
            )
        })?;
        let (Size::Exact(size) | Size::AtLeast(size)) = dtype.size(shape)?;
        text(&mut head, name);
        head.extend((shape.len() as u32).to_le_bytes());
        head.extend(shape.iter().rev().flat_map(|dim| dim.to_le_bytes()));
        head.extend(number.to_le_bytes());
        head.extend(offset.to_le_bytes());
        offset += size.next_multiple_of(ALIGNMENT);
        sizes.push(size);
    }
    Ok((head, sizes))
}

impl Item {
    fn write(&self, out: &mut Vec<u8>) {
        let mut tagged = |kind: u32, bytes: &[u8]| {
            out.extend(kind.to_le_bytes());
            out.extend(bytes);
        };
        match self {
            Item::Unsigned(value) => tagged(4, &value.to_le_bytes()),
            Item::Float(value) => tagged(6, &value.to_le_bytes()),
            Item::Bool(value) => tagged(7, &[u8::from(*value)]),
            Item::Text(value) => {
                tagged(8, &[]);
                text(out, value);
            }
            Item::Integers(values) => {
                array(out, 5, values.len());
                out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
            Item::Texts(values) => {
                array(out, 8, values.len());
                values.iter().for_each(|value| text(out, value));
            }
        }
    }
}

fn array(out: &mut Vec<u8>, of: u32, len: usize) {
    out.extend(ARRAY.to_le_bytes());
    out.extend(of.to_le_bytes());
    out.extend((len as u64).to_le_bytes());
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(ALIGNMENT as usize), 0);
}

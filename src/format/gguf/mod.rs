//! GGUF files, versions 2 and 3: header, metadata and tensor table, checked before anything is used.
//!
//! Layout: magic, version u32, tensor count u64, key count u64, keys, tensor records, then data from the next aligned offset
//! on. Importers interpret keys and tensor names.

mod hadamard;
mod metadata;
mod types;
#[cfg(feature = "tools")]
mod writer;

pub use hadamard::Rotation;
pub use metadata::{Metadata, shortest};
#[cfg(feature = "tools")]
pub use writer::{Item, NewTensor, write};

use crate::dtype::{Dtype, Size};
use crate::error::{Error, Kind, Result, bail};
use metadata::Cursor;
use std::collections::HashMap;
use std::ops::Range;

/// The first four bytes of a file.
pub const MAGIC: [u8; 4] = *b"GGUF";
/// The format's limit on the length of a tensor name.
const MAX_NAME: u64 = 64;
const MAX_DIMS: u32 = 4;
const ALIGNMENT_KEY: &str = "general.alignment";
/// The alignment of files that do not state one.
const ALIGNMENT: u64 = 32;
/// The largest plausible alignment; a larger one is taken as damage.
const MAX_ALIGNMENT: u32 = 1 << 20;

/// One tensor of a file.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// The name in the file.
    pub name: String,
    /// The encoding of its bytes.
    pub dtype: Dtype,
    /// Row-major shape, rows first; the file stores the dimensions in reverse order.
    pub shape: Vec<u64>,
    /// The byte range in the file, checked to be inside it.
    pub range: Range<usize>,
}

/// Metadata and tensor table of a file, without the file's bytes.
#[derive(Debug)]
pub struct Gguf {
    /// The key-value pairs.
    pub metadata: Metadata,
    /// Every tensor, in file order.
    pub tensors: Vec<Tensor>,
    ids: HashMap<String, usize>,
}

impl Gguf {
    /// Reads and checks everything in the file `bytes` except the weights.
    ///
    /// Errors: `InvalidMagic`, `UnsupportedVersion`, `UnsupportedTensorType` with name and number, `Parse` and `Bounds` for
    /// damage.
    pub fn parse(bytes: &[u8]) -> Result<Gguf> {
        if bytes.get(..4) != Some(&MAGIC) {
            let found = bytes.get(..4).unwrap_or(bytes);
            bail!(InvalidMagic, "expected 'GGUF', found bytes {found:02x?}");
        }
        let mut cursor = Cursor::new(bytes, 4);
        let version = cursor.u32("the version")?;
        match version {
            2 | 3 => {}
            _ if matches!(version.swap_bytes(), 1..=3) => {
                bail!(
                    UnsupportedVersion,
                    "this GGUF is big-endian; only little-endian files are read"
                )
            }
            _ => bail!(UnsupportedVersion, "GGUF version {version}; versions 2 and 3 are read"),
        }
        let tensor_count = cursor.u64("the tensor count")?;
        let key_count = cursor.u64("the metadata count")?;
        let metadata = Metadata::read(&mut cursor, key_count)?;
        let alignment = match metadata.uint32(ALIGNMENT_KEY)? {
            None => ALIGNMENT,
            Some(value) if value.is_power_of_two() && (8..=MAX_ALIGNMENT).contains(&value) => u64::from(value),
            Some(value) => bail!(
                Parse,
                "metadata key '{ALIGNMENT_KEY}': expected a power of two from 8 to {MAX_ALIGNMENT}, found {value}"
            ),
        };
        let (tensors, ids) = read_tensors(&mut cursor, tensor_count, alignment)?;
        Ok(Gguf { metadata, tensors, ids })
    }

    /// The tensor called `name`.
    pub fn find(&self, name: &str) -> Option<&Tensor> {
        self.ids.get(name).and_then(|&id| self.tensors.get(id))
    }
}

/// A record of the tensor table, its offset not yet checked.
struct Record {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    offset: u64,
    bytes: u64,
}

/// The tensors, and the place of each name among them.
fn read_tensors(cursor: &mut Cursor, count: u64, alignment: u64) -> Result<(Vec<Tensor>, HashMap<String, usize>)> {
    // The smallest record: name length, one byte of name, dimension count, one dimension, type, offset.
    if count > cursor.left() / 33 {
        bail!(
            Bounds,
            "{count} tensor records do not fit the {} bytes left in the file",
            cursor.left()
        );
    }
    let mut ids = HashMap::new();
    let mut records = Vec::new();
    for _ in 0..count {
        let record = read_record(cursor)?;
        if !record.offset.is_multiple_of(alignment) {
            bail!(
                Parse,
                "tensor '{}' is at offset {}, not a multiple of {alignment}",
                record.name,
                record.offset
            );
        }
        if ids.insert(record.name.clone(), records.len()).is_some() {
            bail!(Parse, "tensor '{}' occurs twice", record.name);
        }
        records.push(record);
    }
    let overflow = || Error::new(Kind::Bounds, "the start of the data overflows".to_owned());
    let start = (cursor.offset() as u64)
        .checked_next_multiple_of(alignment)
        .ok_or_else(overflow)?;
    let end = cursor.offset() as u64 + cursor.left();
    let tensors = records
        .into_iter()
        .map(|record| place(record, start, end))
        .collect::<Result<Vec<_>>>()?;
    let mut order: Vec<&Tensor> = tensors.iter().collect();
    order.sort_by_key(|tensor| tensor.range.start);
    for pair in order.windows(2) {
        if let [a, b] = pair
            && a.range.end > b.range.start
        {
            bail!(Bounds, "tensors '{}' and '{}' overlap", a.name, b.name);
        }
    }
    Ok((tensors, ids))
}

fn read_record(cursor: &mut Cursor) -> Result<Record> {
    let name = cursor.string(MAX_NAME, "a tensor name")?.to_owned();
    if name.is_empty() {
        bail!(Parse, "empty tensor name before offset {}", cursor.offset());
    }
    let dims = cursor.u32(&name)?;
    if !(1..=MAX_DIMS).contains(&dims) {
        bail!(Parse, "tensor '{name}' has {dims} dimensions, expected 1 to {MAX_DIMS}");
    }
    let mut shape = (0..dims).map(|_| cursor.u64(&name)).collect::<Result<Vec<_>>>()?;
    // Dimensions of 1 at the end change nothing: the format pads shapes with them.
    while shape.len() > 1 && shape.last() == Some(&1) {
        shape.pop();
    }
    shape.reverse();
    let count = shape.iter().try_fold(1u64, |count, &dim| count.checked_mul(dim));
    let Some(count) = count else {
        bail!(
            Bounds,
            "tensor '{name}': the element count of shape {shape:?} overflows"
        );
    };
    if count == 0 {
        bail!(Parse, "tensor '{name}' of shape {shape:?} has no elements");
    }
    let dtype = types::dtype(cursor.u32(&name)?, &name)?;
    let offset = cursor.u64(&name)?;
    let size = dtype.size(&shape);
    let (Size::Exact(bytes) | Size::AtLeast(bytes)) = size.map_err(|err| err.context(format!("tensor '{name}'")))?;
    Ok(Record {
        name,
        dtype,
        shape,
        offset,
        bytes,
    })
}

fn place(record: Record, start: u64, end: u64) -> Result<Tensor> {
    let Record {
        name,
        dtype,
        shape,
        offset,
        bytes,
    } = record;
    let first = start.checked_add(offset);
    let range = first
        .zip(first.and_then(|first| first.checked_add(bytes)))
        .filter(|&(_, last)| last <= end);
    let range = range.and_then(|(first, last)| Some(usize::try_from(first).ok()?..usize::try_from(last).ok()?));
    match range {
        Some(range) => Ok(Tensor {
            name,
            dtype,
            shape,
            range,
        }),
        None => bail!(
            Bounds,
            "tensor '{name}' needs {bytes} bytes at data offset {offset}, the file's data has {}",
            end.saturating_sub(start)
        ),
    }
}

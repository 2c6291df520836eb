//! The tensor directory of one file: names, types, shapes and payload positions (section 3 of the format).

use super::envelope::{Envelope, QUANT_2F};
use crate::dtype::Dtype;
use crate::error::{Result, bail};
use crate::format::bytes::{u16_at, u32_at, u64_at};
use crate::format::pipeline::{CONFIG, is_config};
use crate::format::tensor::{TensorInfo, TensorSpec};

pub(super) const HEAD: u64 = 16;
pub(super) const RECORD: u64 = 56;
const MAX_NDIM: usize = 6;
/// The alignment of payloads within the blob.
pub(super) const TENSOR_ALIGN: u64 = 64;
/// The largest directory that is read, about ten million tensors. A sparse file can claim any size at no cost.
const MAX_BYTES: u64 = 1 << 30;

/// The stored bytes of a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Payload {
    /// The index of the file that holds it, 0 for shard 1.
    pub shard: usize,
    /// Bytes from the start of that file's weight blob.
    pub offset: u64,
    /// The stored [`hash64`](crate::format::hash64).
    pub hash: u64,
}

/// One entry of a directory.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub info: TensorInfo,
    pub payload: Payload,
}

impl Entry {
    /// An entry whose payload is not written yet.
    pub fn unwritten(TensorSpec { name, dtype, shape }: TensorSpec) -> Entry {
        Entry {
            info: TensorInfo {
                name,
                dtype,
                shape,
                nbytes: 0,
            },
            payload: Payload::default(),
        }
    }

    /// Errors: `Parse` for a payload of a length that type and shape do not allow.
    pub fn check_length(&self, payload: &[u8]) -> Result<()> {
        let TensorInfo { name, dtype, shape, .. } = &self.info;
        let checked = dtype.check_length(shape, payload);
        checked.map_err(|err| err.context(format_args!("tensor '{name}'")))
    }

    /// Notes where the payload is, in the only file.
    pub fn place(&mut self, offset: u64, nbytes: u64, hash: u64) {
        self.info.nbytes = nbytes;
        self.payload = Payload { shard: 0, offset, hash };
    }
}

/// Reads and checks the whole directory of a file.
///
/// Errors: `Bounds` for positions outside the pool or blob and for misaligned or overlapping payloads; `Parse` for invalid
/// names, types, shapes and sizes. Duplicate names are not checked here, but when directories are joined.
pub(super) fn parse(file: &[u8], envelope: &Envelope) -> Result<Vec<Entry>> {
    let directory = envelope.directory.of(file);
    let len = directory.len() as u64;
    if len > MAX_BYTES {
        bail!(Bounds, "directory of {len} bytes, expected at most {MAX_BYTES}");
    }
    let Some(head) = directory.first_chunk::<{ HEAD as usize }>() else {
        bail!(Bounds, "directory of {len} bytes, expected at least {HEAD}");
    };
    let [count, pool_off] = [0, 8].map(|at| u64_at(head, at).unwrap_or(0));
    if count > (len - HEAD) / RECORD {
        bail!(
            Bounds,
            "directory of {len} bytes is too short for {count} records of {RECORD} bytes"
        );
    }
    let records_end = HEAD + count * RECORD;
    if pool_off < records_end || pool_off > len {
        bail!(
            Bounds,
            "name pool at {pool_off} of the directory, allowed is {records_end} to {len}"
        );
    }
    let pool = &directory[pool_off as usize..];
    let records = &directory[HEAD as usize..records_end as usize];
    let blob = envelope.data.of(file);
    let records = records.as_chunks().0.iter().enumerate();
    let entries = records.map(|(i, record)| tensor(i, record, pool, blob, envelope.features));
    let entries = entries.collect::<Result<Vec<_>>>()?;
    check_overlap(&entries)?;
    Ok(entries)
}

fn tensor(i: usize, record: &[u8; RECORD as usize], pool: &[u8], blob: &[u8], features: u32) -> Result<Entry> {
    let name_off = u32_at(record, 0).unwrap_or(0);
    let name_len = u16_at(record, 4).unwrap_or(0);
    let start = name_off as usize;
    let Some(name) = pool.get(start..).and_then(|rest| rest.get(..usize::from(name_len))) else {
        bail!(
            Bounds,
            "record {i}: name at {name_off} with {name_len} bytes, the name pool has {}",
            pool.len()
        );
    };
    let Ok(name) = std::str::from_utf8(name) else {
        let name = name.escape_ascii().to_string();
        bail!(Parse, "record {i}: name {name:?} is not UTF-8");
    };
    if name.is_empty() {
        bail!(Parse, "record {i}: the name is empty");
    }
    body(record, name, blob, features).map_err(|err| err.context(format_args!("record {i}, tensor '{name}'")))
}

fn body(record: &[u8; RECORD as usize], name: &str, blob: &[u8], features: u32) -> Result<Entry> {
    let (id, ndim) = (record[6], usize::from(record[7]));
    let Some(dtype) = Dtype::from_id(id) else {
        let what = match id {
            5 => "mix8_4, a reserved type",
            7 => "q4_col, a reserved type",
            16 => "q2tp, a type of newer files",
            _ => "an unknown type",
        };
        bail!(Parse, "element type id {id} ({what}) is not supported");
    };
    if ndim == 0 || ndim > MAX_NDIM {
        bail!(Parse, "{ndim} dimensions, expected 1 to {MAX_NDIM}");
    }
    let dims: [u64; MAX_NDIM] = std::array::from_fn(|d| u64::from(u32_at(record, 8 + 4 * d).unwrap_or(0)));
    let (shape, tail) = dims.split_at(ndim);
    if tail.iter().any(|&dim| dim != 0) {
        bail!(
            Parse,
            "{ndim} dimensions, but the rest of the shape {dims:?} is not zero"
        );
    }
    let [offset, nbytes, hash] = [32, 40, 48].map(|at| u64_at(record, at).unwrap_or(0));
    let blob_len = blob.len() as u64;
    if offset.checked_add(nbytes).is_none_or(|end| end > blob_len) {
        bail!(
            Bounds,
            "payload at {offset:#x} with {nbytes} bytes, the weight blob has {blob_len}"
        );
    }
    if !offset.is_multiple_of(TENSOR_ALIGN) {
        bail!(
            Bounds,
            "payload at {offset:#x} of the weight blob, expected a multiple of {TENSOR_ALIGN}"
        );
    }
    if matches!(dtype, Dtype::Vbit | Dtype::Q82f) && features & QUANT_2F == 0 {
        bail!(
            Parse,
            "element type {}, but feature bit 2 (QUANT_2F) is clear",
            dtype.name()
        );
    }
    check_text(name, dtype, shape)?;
    dtype.check_length(shape, &blob[offset as usize..(offset + nbytes) as usize])?;
    Ok(Entry {
        info: TensorInfo {
            name: name.to_owned(),
            dtype,
            shape: shape.to_vec(),
            nbytes,
        },
        // The caller sets the shard.
        payload: Payload { shard: 0, offset, hash },
    })
}

/// Refuses bytes that are no configuration, and a configuration that is no vector of bytes. Errors: `Parse`.
fn check_text(name: &str, dtype: Dtype, shape: &[u64]) -> Result<()> {
    match (dtype == Dtype::U8, is_config(name)) {
        (true, false) => bail!(
            Parse,
            "element type id 6 (u8, bytes of a text) is for configurations only, whose names end with {CONFIG}"
        ),
        (_, true) if dtype != Dtype::U8 || shape.len() != 1 => bail!(
            Parse,
            "expected the bytes of a configuration, u8 of one dimension, found {} of {} dimensions",
            dtype.name(),
            shape.len()
        ),
        _ => Ok(()),
    }
}

/// Refuses payloads that overlap, unless they are the same bytes: a tensor may have two names.
fn check_overlap(entries: &[Entry]) -> Result<()> {
    let mut order: Vec<(u64, u64, &str)> = entries
        .iter()
        .map(|entry| (entry.payload.offset, entry.info.nbytes, entry.info.name.as_str()))
        .collect();
    order.sort_by_key(|&(offset, bytes, _)| (offset, bytes));
    for pair in order.windows(2) {
        let [(at, bytes, name), (next, next_bytes, next_name)] = [pair[0], pair[1]];
        if next < at + bytes && (at, bytes) != (next, next_bytes) {
            bail!(
                Bounds,
                "tensors '{name}' ({at:#x}, {bytes} bytes) and '{next_name}' ({next:#x}, {next_bytes} bytes) overlap"
            );
        }
    }
    Ok(())
}

/// No type has this id. An entry never does, because it was read or [`check_writable`] has checked it.
const NO_TYPE: u8 = u8::MAX;

/// The directory section for `entries`, in their order. The caller has checked names and shapes.
pub(super) fn to_bytes(entries: &[Entry]) -> Vec<u8> {
    let pool_off = HEAD + entries.len() as u64 * RECORD;
    let mut records = Vec::new();
    records.extend_from_slice(&(entries.len() as u64).to_le_bytes());
    records.extend_from_slice(&pool_off.to_le_bytes());
    let mut pool = Vec::new();
    for Entry { info, payload } in entries {
        records.extend_from_slice(&(pool.len() as u32).to_le_bytes());
        records.extend_from_slice(&(info.name.len() as u16).to_le_bytes());
        records.extend_from_slice(&[info.dtype.id().unwrap_or(NO_TYPE), info.shape.len() as u8]);
        for d in 0..MAX_NDIM {
            let dim = info.shape.get(d).copied().unwrap_or(0);
            records.extend_from_slice(&(dim as u32).to_le_bytes());
        }
        for word in [payload.offset, info.nbytes, payload.hash] {
            records.extend_from_slice(&word.to_le_bytes());
        }
        pool.extend_from_slice(info.name.as_bytes());
    }
    records.append(&mut pool);
    records
}

/// Errors: `Usage` for a name or shape that a directory cannot hold; `UnsupportedTensorType` for a type that it has no id for;
/// those of [`Dtype::size`].
pub(super) fn check_writable(name: &str, dtype: Dtype, shape: &[u64]) -> Result<()> {
    if name.is_empty() || name.len() > usize::from(u16::MAX) {
        bail!(Usage, "tensor name of {} bytes, expected 1 to {}", name.len(), u16::MAX);
    }
    if shape.len() > MAX_NDIM || shape.iter().any(|&dim| dim > u64::from(u32::MAX)) {
        bail!(
            Usage,
            "tensor '{name}': shape {shape:?}, expected at most {MAX_NDIM} dimensions up to {}",
            u32::MAX
        );
    }
    if dtype.id().is_none() {
        bail!(
            UnsupportedTensorType,
            "tensor '{name}': a container cannot hold {}",
            dtype.name()
        );
    }
    check_text(name, dtype, shape)
        .and_then(|()| dtype.size(shape).map(drop))
        .map_err(|err| err.context(format_args!("tensor '{name}'")))
}

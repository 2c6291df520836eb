//! The tensor directory: names, types, shapes and where payloads lie (section 3 of the format). Knows one file.

use super::TensorInfo;
use super::envelope::{Envelope, QUANT_2F};
use super::payload;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result, bail};

pub(super) const HEAD: u64 = 16;
pub(super) const RECORD: u64 = 56;
const MAX_NDIM: usize = 6;
/// Payloads start at multiples of this.
pub(super) const TENSOR_ALIGN: u64 = 64;
/// The largest directory that is read: some ten million tensors. A sparse file can claim any size for free.
const MAX_BYTES: u64 = 1 << 30;

/// Reads and checks the whole directory of a file.
///
/// Errors: `Bounds` for what lies outside of what it indexes, a misaligned payload or overlapping payloads; `Parse` for
/// names, types, shapes and sizes that make no sense. Names may repeat; who joins directories looks at that.
pub(super) fn parse(file: &[u8], envelope: &Envelope) -> Result<Vec<TensorInfo>> {
    let directory = envelope.directory.of(file);
    let len = directory.len() as u64;
    if len > MAX_BYTES {
        bail!(Bounds, "directory of {len} bytes, allowed are {MAX_BYTES}");
    }
    let Some(head) = directory.first_chunk::<{ HEAD as usize }>() else {
        bail!(Bounds, "directory of {len} bytes, wanted at least {HEAD}");
    };
    let count = u64_at(head, 0);
    let pool_off = u64_at(head, 8);
    if count > (len - HEAD) / RECORD {
        bail!(
            Bounds,
            "directory of {len} bytes has no room for {count} records of {RECORD} bytes"
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
    let infos = records
        .as_chunks::<{ RECORD as usize }>()
        .0
        .iter()
        .enumerate()
        .map(|(i, record)| tensor(i, record, pool, blob, envelope.features))
        .collect::<Result<Vec<_>>>()?;
    check_overlap(&infos)?;
    Ok(infos)
}

fn tensor(i: usize, record: &[u8; RECORD as usize], pool: &[u8], blob: &[u8], features: u32) -> Result<TensorInfo> {
    let (name_off, name_len) = (u32_at(record, 0), u16_at(record, 4));
    let start = name_off as usize;
    let Some(name) = pool.get(start..).and_then(|rest| rest.get(..usize::from(name_len))) else {
        bail!(
            Bounds,
            "record {i}: name at {name_off} with {name_len} bytes, the name pool has {}",
            pool.len()
        );
    };
    let name = std::str::from_utf8(name).map_err(|_| {
        Error::new(
            Kind::Parse,
            format!("record {i}: name {:?} is not UTF-8", name.escape_ascii().to_string()),
        )
    })?;
    if name.is_empty() {
        bail!(Parse, "record {i}: the name is empty");
    }
    body(record, blob, features)
        .map(|info| TensorInfo {
            name: name.to_owned(),
            ..info
        })
        .map_err(|err| err.context(format_args!("record {i}, tensor '{name}'")))
}

/// Everything about a tensor but its name.
fn body(record: &[u8; RECORD as usize], blob: &[u8], features: u32) -> Result<TensorInfo> {
    let (id, ndim) = (record[6], usize::from(record[7]));
    let Some(dtype) = Dtype::from_id(id) else {
        let what = match id {
            5 => "mix8_4, a reserved type",
            6 => "u8, opaque bytes and no weight",
            7 => "q4_col, a reserved type",
            16 => "q2tp, a type of newer files",
            _ => "an unknown type",
        };
        bail!(Parse, "element type id {id} ({what}) is not one this program reads");
    };
    if ndim == 0 || ndim > MAX_NDIM {
        bail!(Parse, "{ndim} dimensions, allowed are 1 to {MAX_NDIM}");
    }
    let dims: [u64; MAX_NDIM] = std::array::from_fn(|d| u64::from(u32_at(record, 8 + 4 * d)));
    let (shape, tail) = dims.split_at(ndim);
    if tail.iter().any(|&dim| dim != 0) {
        bail!(
            Parse,
            "{ndim} dimensions, but the rest of the shape {dims:?} is not zero"
        );
    }
    let (offset, nbytes, hash) = (u64_at(record, 32), u64_at(record, 40), u64_at(record, 48));
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
            "payload at {offset:#x} of the weight blob, wanted a multiple of {TENSOR_ALIGN}"
        );
    }
    if matches!(dtype, Dtype::Vbit | Dtype::Q82f) && features & QUANT_2F == 0 {
        bail!(
            Parse,
            "element type {}, but feature bit 2 (QUANT_2F) is clear",
            dtype.name()
        );
    }
    payload::check_length(dtype, shape, &blob[offset as usize..(offset + nbytes) as usize])?;
    // The name is the caller's, and so is the number of the shard.
    Ok(TensorInfo {
        name: String::new(),
        dtype,
        shape: shape.to_vec(),
        offset,
        nbytes,
        hash,
        shard: 0,
    })
}

/// Payloads are apart or the very same bytes: one tensor may be known by two names.
fn check_overlap(infos: &[TensorInfo]) -> Result<()> {
    let mut order: Vec<&TensorInfo> = infos.iter().collect();
    order.sort_unstable_by_key(|info| (info.offset, info.nbytes));
    for pair in order.windows(2) {
        let (a, b) = (pair[0], pair[1]);
        if b.offset < a.offset + a.nbytes && (a.offset, a.nbytes) != (b.offset, b.nbytes) {
            bail!(
                Bounds,
                "tensors '{}' ({:#x}, {} bytes) and '{}' ({:#x}, {} bytes) overlap",
                a.name,
                a.offset,
                a.nbytes,
                b.name,
                b.offset,
                b.nbytes
            );
        }
    }
    Ok(())
}

/// The directory section for `infos`, in their order. Whoever calls this has checked names and shapes.
pub(super) fn to_bytes(infos: &[TensorInfo]) -> Vec<u8> {
    let pool_off = HEAD + infos.len() as u64 * RECORD;
    let mut records = Vec::new();
    records.extend_from_slice(&(infos.len() as u64).to_le_bytes());
    records.extend_from_slice(&pool_off.to_le_bytes());
    let mut pool = Vec::new();
    for info in infos {
        records.extend_from_slice(&(pool.len() as u32).to_le_bytes());
        records.extend_from_slice(&(info.name.len() as u16).to_le_bytes());
        records.extend_from_slice(&[info.dtype.id(), info.shape.len() as u8]);
        for d in 0..MAX_NDIM {
            let dim = info.shape.get(d).copied().unwrap_or(0);
            records.extend_from_slice(&(dim as u32).to_le_bytes());
        }
        for word in [info.offset, info.nbytes, info.hash] {
            records.extend_from_slice(&word.to_le_bytes());
        }
        pool.extend_from_slice(info.name.as_bytes());
    }
    records.append(&mut pool);
    records
}

/// Refuses what [`to_bytes`] could not express: shape and name of a tensor to be written.
pub(super) fn check_writable(name: &str, dtype: Dtype, shape: &[u64]) -> Result<()> {
    if name.is_empty() || name.len() > usize::from(u16::MAX) {
        bail!(
            Usage,
            "a tensor's name takes 1 to {} bytes, found {}",
            u16::MAX,
            name.len()
        );
    }
    if shape.len() > MAX_NDIM || shape.iter().any(|&dim| dim > u64::from(u32::MAX)) {
        bail!(
            Usage,
            "tensor '{name}': shape {shape:?}, allowed are {MAX_NDIM} dimensions up to {}",
            u32::MAX
        );
    }
    dtype
        .size(shape)
        .map(drop)
        .map_err(|err| err.context(format_args!("tensor '{name}'")))
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].first_chunk().map_or(0, |word| u32::from_le_bytes(*word))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word))
}

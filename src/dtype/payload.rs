//! Payloads as they are in the file: sections with the same number of bytes for every row, then a tail.

use crate::error::{Error, Kind, Result, bail};
use half::f16;

/// Weights per group. Scales of the group types belong to 32 neighbouring columns of a row.
pub const GROUP: usize = 32;

/// A section of a payload, which holds the same number of bytes for every row.
#[derive(Clone, Copy, Debug)]
pub enum Section {
    /// Bytes per weight.
    Weights(u64),
    /// Bytes per group.
    Groups(u64),
    /// Bytes for every so many weights; rows are whole blocks.
    Blocks { weights: u64, bytes: u64 },
    /// Bits per group, each row filled up to whole bytes.
    GroupBits(u64),
    /// Bytes per row.
    Rows(u64),
}

impl Section {
    /// Bytes of a row with `cols` columns. `None` on overflow.
    pub fn row_bytes(self, cols: u64) -> Option<u64> {
        let groups = cols.div_ceil(GROUP as u64);
        match self {
            Section::Weights(bytes) => cols.checked_mul(bytes),
            Section::Groups(bytes) => groups.checked_mul(bytes),
            Section::Blocks { weights, bytes } => cols.div_ceil(weights).checked_mul(bytes),
            Section::GroupBits(bits) => groups.checked_mul(bits).map(|bits| bits.div_ceil(8)),
            Section::Rows(bytes) => Some(bytes),
        }
    }
}

/// The payload of a `rows` × `cols` matrix.
#[derive(Clone, Copy)]
pub struct Payload<'a> {
    pub bytes: &'a [u8],
    pub rows: usize,
    pub cols: usize,
    pub sections: &'static [Section],
}

impl<'a> Payload<'a> {
    /// Groups per row.
    pub fn groups(&self) -> usize {
        self.cols.div_ceil(GROUP)
    }

    /// Bytes of each row in section `index`. Errors: `Bounds` on overflow.
    fn row_bytes(&self, index: usize) -> Result<usize> {
        let bytes = self.sections[index].row_bytes(self.cols as u64);
        bytes
            .and_then(|bytes| usize::try_from(bytes).ok())
            .ok_or_else(too_large)
    }

    /// Where section `index` begins, or where the tail does after the last one. Errors: `Bounds` on overflow.
    fn start(&self, index: usize) -> Result<usize> {
        (0..index).try_fold(0usize, |start, before| {
            let bytes = self.rows.checked_mul(self.row_bytes(before)?);
            bytes.and_then(|bytes| start.checked_add(bytes)).ok_or_else(too_large)
        })
    }

    /// The bytes of row `row` in section `index`. Errors: `Bounds` for a payload that is too short.
    pub fn row(&self, index: usize, row: usize) -> Result<&'a [u8]> {
        let bytes = self.row_bytes(index)?;
        let at = row.checked_mul(bytes).ok_or_else(too_large)?;
        slice(self.bytes, self.start(index)?.saturating_add(at), bytes)
    }

    /// What follows the sections. Errors: `Bounds` for a payload that is too short.
    pub fn tail(&self) -> Result<&'a [u8]> {
        let start = self.start(self.sections.len())?;
        slice(self.bytes, start, self.bytes.len().saturating_sub(start))
    }

    /// Copies row `row` of section `index` to `out` and fills the rest of `out` with zeros. Errors: as [`Payload::row`].
    pub fn copy_row(&self, index: usize, row: usize, out: &mut [u8]) -> Result<()> {
        let bytes = self.row(index, row)?;
        let (data, padding) = out.split_at_mut(bytes.len());
        data.copy_from_slice(bytes);
        padding.fill(0);
        Ok(())
    }

    /// Appends the rows `keep` of every section to `selected`. Errors: as [`Payload::row`].
    pub fn select_sections(&self, keep: &[usize], selected: &mut Vec<u8>) -> Result<()> {
        for index in 0..self.sections.len() {
            for &row in keep {
                selected.extend_from_slice(self.row(index, row)?);
            }
        }
        Ok(())
    }
}

/// `len` bytes from byte `at` on. Errors: `Bounds` for a payload that is too short.
pub fn slice(payload: &[u8], at: usize, len: usize) -> Result<&[u8]> {
    match at.checked_add(len).and_then(|end| payload.get(at..end)) {
        Some(bytes) => Ok(bytes),
        None => bail!(Bounds, "payload of {} bytes ends before {at} + {len}", payload.len()),
    }
}

/// A table of `rows + 1` u32, and the bytes after it. Errors: `Bounds` for a payload that is too short.
pub fn row_table(bytes: &[u8], rows: usize) -> Result<(&[u8], &[u8])> {
    let len = rows
        .checked_add(1)
        .and_then(|n| n.checked_mul(4))
        .ok_or_else(too_large)?;
    Ok((slice(bytes, 0, len)?, &bytes[len..]))
}

/// The `index`-th u32 of `bytes`, which have no alignment.
pub fn u32_at(bytes: &[u8], index: usize) -> u32 {
    let at = 4 * index;
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

pub fn too_large() -> Error {
    Error::new(Kind::Bounds, "payload: its size overflows")
}

/// Copies the f16 scale that every tile of `TILE` bytes in a row's first section begins with, and fills the rest with zeros.
pub fn tile_scales<const TILE: usize>(payload: &Payload, row: usize, out: &mut [u8]) -> Result<()> {
    let (scales, padding) = out.split_at_mut(payload.groups() * 2);
    padding.fill(0);
    let tiles = payload.row(0, row)?.as_chunks::<TILE>().0;
    for (tile, scale) in tiles.iter().zip(scales.as_chunks_mut::<2>().0) {
        *scale = [tile[0], tile[1]];
    }
    Ok(())
}

/// Fills `bytes` with the f16 nearest to `value`.
pub fn fill_halves(bytes: &mut [u8], value: f64) {
    let half = f16::from_f64(value).to_le_bytes();
    bytes.as_chunks_mut().0.fill(half);
}

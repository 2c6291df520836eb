//! The row-split layout: three planes of a matrix whose columns are coded in groups.
//!
//! Each plane holds row after row, group after group: the base plane, the high plane from the next multiple of 256 bytes on,
//! and an f16 scale per group from the multiple of 256 after that. Columns past the last one are padding up to 128.
//!
//! A ternary block of a GGUF file is the three slices of a group side by side, so blocks become planes, and planes become
//! blocks, by moving bytes.

use super::format::{Coding, Format};
use crate::error::{Result, bail};
use std::ops::Range;

/// Where the planes of a matrix are in its object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowSplit {
    format: Format,
    /// Rows of the matrix.
    pub rows: usize,
    /// Groups of a row, padding included.
    pub groups: usize,
    /// Bytes of the object.
    pub bytes: u64,
    /// Bytes of a group in each plane: base, high, scale.
    group_bytes: [usize; 3],
    /// Offsets of the planes.
    plane_at: [usize; 3],
}

impl RowSplit {
    /// The planes of a `rows` × `cols` matrix; `None` if the format has no groups, or on overflow.
    pub fn new(format: Format, rows: u64, cols: u64) -> Option<RowSplit> {
        let Coding::Groups { columns, base, high } = format.coding() else {
            return None;
        };
        let groups = cols.checked_next_multiple_of(128)? / columns;
        let all = rows.checked_mul(groups)?;
        let high_at = all.checked_mul(base)?.checked_next_multiple_of(256)?;
        let scale_at = high_at.checked_add(all.checked_mul(high)?.checked_next_multiple_of(256)?)?;
        let bytes = scale_at.checked_add(all.checked_mul(2)?)?;
        Some(RowSplit {
            format,
            rows: usize::try_from(rows).ok()?,
            groups: usize::try_from(groups).ok()?,
            bytes,
            group_bytes: [base as usize, high as usize, 2],
            plane_at: [0, usize::try_from(high_at).ok()?, usize::try_from(scale_at).ok()?],
        })
    }

    fn plane(&self, plane: usize, row: usize) -> Range<usize> {
        let len = self.groups * self.group_bytes[plane];
        let first = self.plane_at[plane] + row * len;
        first..first + len
    }

    /// Errors: `Bounds` for a row past the last, or a payload of another size.
    fn check(&self, payload: usize, row: usize) -> Result<()> {
        if row >= self.rows || payload as u64 != self.bytes {
            let RowSplit { rows, bytes, .. } = self;
            bail!(
                Bounds,
                "row {row} of {rows} in planes of {payload} bytes, expected {bytes} bytes"
            );
        }
        Ok(())
    }

    /// The base, high and scale bytes of a row. Errors: `Bounds` for a row past the last, or a payload of another size.
    pub fn row<'a>(&self, payload: &'a [u8], row: usize) -> Result<[&'a [u8]; 3]> {
        self.check(payload.len(), row)?;
        Ok([0, 1, 2].map(|plane| payload.get(self.plane(plane, row)).unwrap_or_default()))
    }

    /// Bytes of a row's blocks.
    pub fn block_row_bytes(&self) -> usize {
        self.groups * self.group_bytes.iter().sum::<usize>()
    }

    /// Writes the ternary blocks of a row to `out`, [`RowSplit::block_row_bytes`] long. Errors: as [`RowSplit::row`];
    /// `Internal` for a format without blocks, and for another length.
    pub fn blocks(&self, payload: &[u8], row: usize, out: &mut [u8]) -> Result<()> {
        let planes = self.row(payload, row)?;
        let (size, parts) = self.block_parts(out.len())?;
        for (group, block) in out.chunks_exact_mut(size).enumerate() {
            for (plane, part) in planes.iter().zip(&parts) {
                let first = group * part.len();
                block[part.clone()].copy_from_slice(&plane[first..first + part.len()]);
            }
        }
        Ok(())
    }

    /// Writes the planes of a row, whose ternary blocks are `blocks`, into `payload`. Errors: as [`RowSplit::blocks`].
    #[cfg(feature = "tools")]
    pub fn set_blocks(&self, payload: &mut [u8], row: usize, blocks: &[u8]) -> Result<()> {
        self.check(payload.len(), row)?;
        let (size, parts) = self.block_parts(blocks.len())?;
        for (plane, part) in parts.into_iter().enumerate().filter(|(_, part)| !part.is_empty()) {
            let out = &mut payload[self.plane(plane, row)];
            for (out, block) in out.chunks_exact_mut(part.len()).zip(blocks.chunks_exact(size)) {
                out.copy_from_slice(&block[part.clone()]);
            }
        }
        Ok(())
    }

    /// The size of a block, and which of its bytes are base, high and scale. A PQ2_0 block begins with its scale, a PTQ1_0
    /// block ends with it. `len`: bytes of the blocks of a row.
    fn block_parts(&self, len: usize) -> Result<(usize, [Range<usize>; 3])> {
        if len != self.block_row_bytes() {
            bail!(
                Internal,
                "{len} bytes for the blocks of a row, expected {}",
                self.block_row_bytes()
            );
        }
        let [base, high, scale] = self.group_bytes;
        let parts = match self.format {
            Format::Pq2_0 => [scale..scale + base, 0..0, 0..scale],
            Format::Ptq1_0 => [0..base, base..base + high, base + high..base + high + scale],
            other => bail!(Internal, "format {} has no blocks", other.name()),
        };
        Ok((base + high + scale, parts))
    }
}

//! q1s: q1, then `[u32 count]` and count × `{u32 flat index, f16 value}` that replace base values.
//!
//! The entries may come in any order; of two entries for one weight the later one counts.

use super::layout::{Bytes, groups_per_row, half, split, u32_at};
use super::q1::{TILE, decode_tiles};
use super::{BadPayload, RowDecoder};

const ENTRY: usize = 6;

struct Q1s<'a> {
    tiles: &'a [u8],
    groups: usize,
    cols: usize,
    /// Flat index and value, ascending, each index once.
    overlay: Vec<(u32, f32)>,
}

/// A decoder of q1s. Errors: columns that are no whole groups, any other length, an index outside of the matrix.
pub fn decoder(payload: &[u8], rows: usize, cols: usize) -> Result<Box<dyn RowDecoder + '_>, BadPayload> {
    let groups = groups_per_row(rows, cols)?;
    let elements = Bytes::none().plus(&[rows, cols]).get()?;
    let (tiles, rest) = split(payload, Bytes::none().plus(&[rows, groups, TILE]).get()?, "tiles")?;
    let (count, entries) = split(rest, 4, "overlay count")?;
    let count = u32_at(count, 0) as usize;
    Bytes::none()
        .plus(&[count, ENTRY])
        .exactly(entries)
        .map_err(|bad| BadPayload(format!("overlay of {count}: {}", bad.0)))?;
    let mut overlay = Vec::with_capacity(count);
    for (i, entry) in entries.chunks_exact(ENTRY).enumerate() {
        let index = u32_at(entry, 0);
        if index as usize >= elements {
            return Err(BadPayload(format!(
                "overlay entry {i}: wanted an index below {elements}, found {index}"
            )));
        }
        overlay.push((index, half(&entry[4..])));
    }
    // Reversed and stable: of equal indices the last of the file comes first and survives.
    overlay.reverse();
    overlay.sort_by_key(|&(index, _)| index);
    overlay.dedup_by_key(|&mut (index, _)| index);
    Ok(Box::new(Q1s {
        tiles,
        groups,
        cols,
        overlay,
    }))
}

impl RowDecoder for Q1s<'_> {
    fn row(&self, row: usize, out: &mut [f32]) {
        decode_tiles(&self.tiles[row * self.groups * TILE..][..self.groups * TILE], out);
        let first = row * self.cols;
        let from = self.overlay.partition_point(|&(index, _)| (index as usize) < first);
        for &(index, value) in &self.overlay[from..] {
            match out.get_mut(index as usize - first) {
                Some(weight) => *weight = value,
                None => break,
            }
        }
    }
}

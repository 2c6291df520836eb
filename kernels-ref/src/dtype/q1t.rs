//! q1t: per group of 32 `[f16 scale][7 bytes]`, then `[u32 row_ptr rows+1]`, then `{u16 col, f16 value}` by row.
//!
//! A byte is Σ c_j·3^j, five weights each, least significant first; c: 0 → 0, 1 → +scale, 2 → −scale. The last byte's
//! upper three digits mean nothing. Overlay entries replace base values; of two for one weight the later one counts.

use super::layout::{Bytes, GROUP, check_offsets, groups_per_row, half, split, u32_at};
use super::{BadPayload, RowDecoder};

const TILE: usize = 9;
const ENTRY: usize = 4;

/// The factors of the scale in each valid byte.
const TRITS: [[f32; 5]; 243] = {
    let mut table = [[0.0; 5]; 243];
    let mut byte = 0;
    while byte < 243 {
        let mut rest = byte;
        let mut digit = 0;
        while digit < 5 {
            table[byte][digit] = [0.0, 1.0, -1.0][rest % 3];
            rest /= 3;
            digit += 1;
        }
        byte += 1;
    }
    table
};

struct Q1t<'a> {
    tiles: &'a [u8],
    row_ptr: &'a [u8],
    entries: &'a [u8],
    groups: usize,
}

/// A decoder of q1t. Errors: columns that are no whole groups, any other length, bytes above 242, row pointers that do not
/// ascend from 0, a column outside of the matrix.
pub fn decoder(payload: &[u8], rows: usize, cols: usize) -> Result<Box<dyn RowDecoder + '_>, BadPayload> {
    let groups = groups_per_row(rows, cols)?;
    let (tiles, rest) = split(payload, Bytes::none().plus(&[rows, groups, TILE]).get()?, "tiles")?;
    for (group, tile) in tiles.chunks_exact(TILE).enumerate() {
        if let Some(byte) = tile[2..].iter().find(|&&byte| usize::from(byte) >= TRITS.len()) {
            return Err(BadPayload(format!(
                "group {group}: wanted base-3 bytes up to 242, found {byte}"
            )));
        }
    }
    let (row_ptr, entries) = split(rest, Bytes::none().plus(&[rows, 4]).plus(&[4]).get()?, "row pointers")?;
    check_offsets(row_ptr, rows, "row_ptr")?;
    let count = u32_at(row_ptr, rows) as usize;
    Bytes::none()
        .plus(&[count, ENTRY])
        .exactly(entries)
        .map_err(|bad| BadPayload(format!("overlay of {count}: {}", bad.0)))?;
    for (i, entry) in entries.chunks_exact(ENTRY).enumerate() {
        if col(entry) >= cols {
            return Err(BadPayload(format!(
                "overlay entry {i}: wanted a column below {cols}, found {}",
                col(entry)
            )));
        }
    }
    Ok(Box::new(Q1t {
        tiles,
        row_ptr,
        entries,
        groups,
    }))
}

fn col(entry: &[u8]) -> usize {
    usize::from(u16::from_le_bytes([entry[0], entry[1]]))
}

impl RowDecoder for Q1t<'_> {
    fn row(&self, row: usize, out: &mut [f32]) {
        let tiles = &self.tiles[row * self.groups * TILE..][..self.groups * TILE];
        for (values, tile) in out.chunks_exact_mut(GROUP).zip(tiles.chunks_exact(TILE)) {
            let scale = half(tile);
            for (five, &byte) in values.chunks_mut(5).zip(&tile[2..]) {
                for (value, trit) in five.iter_mut().zip(TRITS[usize::from(byte)]) {
                    *value = trit * scale;
                }
            }
        }
        let (from, to) = (
            u32_at(self.row_ptr, row) as usize,
            u32_at(self.row_ptr, row + 1) as usize,
        );
        for entry in self.entries[from * ENTRY..to * ENTRY].chunks_exact(ENTRY) {
            out[col(entry)] = half(&entry[2..]);
        }
    }
}

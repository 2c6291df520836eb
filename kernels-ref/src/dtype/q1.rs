//! q1, q1s and q1t: groups of 32 signs or base-3 digits with an f16 scale, and overlays that replace single weights.
//!
//! Overlay entries may come in any order. Of two entries for one weight the later one counts.

use super::layout::{Bytes, GROUP, check_offsets, groups_per_row, half, part, split, u32_at};
use super::{BadPayload, Decoder};

/// Bytes of a group: `[f16 scale][4 bytes]` in q1 and q1s, `[f16 scale][7 bytes]` in q1t.
const SIGNS: usize = 6;
const TRITS: usize = 9;
/// Bytes of an overlay entry: q1s `{u32 flat index, f16 value}`, q1t `{u16 col, f16 value}`.
const FLAT_ENTRY: usize = 6;
const ROW_ENTRY: usize = 4;

/// The factors of the scale that each valid byte of q1t stands for.
const DIGITS: [[f32; 5]; 243] = {
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

/// A decoder of q1: per group `[f16 scale][4 bytes]`, bit k of byte j is weight 8j+k, value scale·(2·bit−1). Errors: columns
/// that are not whole groups, any other length.
pub fn q1(payload: &[u8], rows: usize, cols: usize) -> Decoder<'_> {
    let groups = groups_per_row(rows, cols)?;
    Bytes::none().plus(&[rows, groups, SIGNS]).exactly(payload)?;
    Ok(Box::new(move |row: usize, out: &mut [f32]| {
        decode_signs(part(payload, row, groups * SIGNS), out);
    }))
}

/// A decoder of q1s: q1, then `[u32 count]` and count overlay entries `{u32 flat index, f16 value}`. Errors: columns that are
/// not whole groups, any other length, an index outside of the matrix.
pub fn q1s(payload: &[u8], rows: usize, cols: usize) -> Decoder<'_> {
    let groups = groups_per_row(rows, cols)?;
    let elements = Bytes::none().plus(&[rows, cols]).get()?;
    let (tiles, rest) = split(payload, Bytes::none().plus(&[rows, groups, SIGNS]).get()?, "tiles")?;
    let (count, entries) = split(rest, 4, "overlay count")?;
    check_overlay(u32_at(count, 0) as usize, FLAT_ENTRY, entries)?;
    // Flat index and value, ascending, each index once.
    let mut overlay = Vec::with_capacity(entries.len() / FLAT_ENTRY);
    for (i, entry) in entries.chunks_exact(FLAT_ENTRY).enumerate() {
        let index = u32_at(entry, 0);
        if index as usize >= elements {
            return Err(BadPayload(format!(
                "overlay entry {i}: expected an index below {elements}, found {index}"
            )));
        }
        overlay.push((index, half(&entry[4..])));
    }
    // The sort is stable: after the reversal the file's last entry for an index comes first and is the one kept.
    overlay.reverse();
    overlay.sort_by_key(|&(index, _)| index);
    overlay.dedup_by_key(|&mut (index, _)| index);
    Ok(Box::new(move |row: usize, out: &mut [f32]| {
        decode_signs(part(tiles, row, groups * SIGNS), out);
        let first = row * cols;
        let from = overlay.partition_point(|&(index, _)| (index as usize) < first);
        for &(index, value) in &overlay[from..] {
            match out.get_mut(index as usize - first) {
                Some(weight) => *weight = value,
                None => break,
            }
        }
    }))
}

/// A decoder of q1t: per group `[f16 scale][7 bytes]`, then `[u32 row_ptr: rows+1]`, then overlay entries `{u16 col, f16 value}`
/// by row.
///
/// A byte is Σ c_j·3^j over five weights, least significant first; c: 0 → 0, 1 → +scale, 2 → −scale. The upper three digits of
/// a group's last byte are ignored. Errors: columns that are not whole groups, any other length, bytes above 242, row pointers
/// that do not ascend from 0, a column outside of the matrix.
pub fn q1t(payload: &[u8], rows: usize, cols: usize) -> Decoder<'_> {
    let groups = groups_per_row(rows, cols)?;
    let (tiles, rest) = split(payload, Bytes::none().plus(&[rows, groups, TRITS]).get()?, "tiles")?;
    for (group, tile) in tiles.chunks_exact(TRITS).enumerate() {
        if let Some(byte) = tile[2..].iter().find(|&&byte| usize::from(byte) >= DIGITS.len()) {
            return Err(BadPayload(format!(
                "group {group}: expected base-3 bytes up to 242, found {byte}"
            )));
        }
    }
    let (row_ptr, entries) = split(rest, Bytes::none().plus(&[rows, 4]).plus(&[4]).get()?, "row pointers")?;
    check_offsets(row_ptr, rows, "row_ptr")?;
    check_overlay(u32_at(row_ptr, rows) as usize, ROW_ENTRY, entries)?;
    let col = |entry: &[u8]| usize::from(u16::from_le_bytes([entry[0], entry[1]]));
    for (i, entry) in entries.chunks_exact(ROW_ENTRY).enumerate() {
        if col(entry) >= cols {
            return Err(BadPayload(format!(
                "overlay entry {i}: expected a column below {cols}, found {}",
                col(entry)
            )));
        }
    }
    Ok(Box::new(move |row: usize, out: &mut [f32]| {
        let tiles = part(tiles, row, groups * TRITS).chunks_exact(TRITS);
        for (values, tile) in out.chunks_exact_mut(GROUP).zip(tiles) {
            let scale = half(tile);
            for (five, &byte) in values.chunks_mut(5).zip(&tile[2..]) {
                for (value, digit) in five.iter_mut().zip(DIGITS[usize::from(byte)]) {
                    *value = digit * scale;
                }
            }
        }
        let (from, to) = (u32_at(row_ptr, row) as usize, u32_at(row_ptr, row + 1) as usize);
        for entry in entries[from * ROW_ENTRY..to * ROW_ENTRY].chunks_exact(ROW_ENTRY) {
            out[col(entry)] = half(&entry[2..]);
        }
    }))
}

/// Refuses an overlay that is not `count` entries of `entry` bytes.
fn check_overlay(count: usize, entry: usize, entries: &[u8]) -> Result<(), BadPayload> {
    Bytes::none()
        .plus(&[count, entry])
        .exactly(entries)
        .map_err(|bad| BadPayload(format!("overlay of {count}: {}", bad.0)))
}

/// ±scale of the groups of one row.
fn decode_signs(tiles: &[u8], out: &mut [f32]) {
    for (values, tile) in out.as_chunks_mut::<GROUP>().0.iter_mut().zip(tiles.chunks_exact(SIGNS)) {
        let scale = half(tile);
        let bits = u32::from_le_bytes([tile[2], tile[3], tile[4], tile[5]]);
        for (k, value) in values.iter_mut().enumerate() {
            *value = if bits >> k & 1 == 1 { scale } else { -scale };
        }
    }
}

//! Overlay entries of a row in the order that kernels need: by column, each column once, a word an entry.
//!
//! The file's entries may come in any order, and of two for one weight the later one counts.

use super::NO_ENTRY;
use super::source::slice;
use crate::error::{Error, Kind, Result, bail};

/// Bytes of an entry of q1s: `{u32 flat index, f16 value}`.
const FLAT_ENTRY: usize = 6;
/// Bytes of an entry of q1t: `{u16 col, f16 value}`.
const ROW_ENTRY: usize = 4;

/// The overlay of one tensor.
pub(super) enum Overlay<'a> {
    /// q1s: flat index and value, ascending, each index once. The only copy of a part of the file that the repack makes:
    /// 8 bytes an entry, half as much again while it is sorted.
    Flat { entries: Vec<(u32, u16)>, cols: usize },
    /// q1t: pointers into the entries, and the entries, as they lie in the file.
    ByRow {
        row_ptr: &'a [u8],
        entries: &'a [u8],
        cols: usize,
    },
}

impl<'a> Overlay<'a> {
    /// Of q1s, which begins at byte `at`. Errors: `Bounds` for a short payload, `Parse` for an index outside of the matrix.
    pub fn flat(payload: &'a [u8], at: usize, rows: usize, cols: usize) -> Result<Overlay<'a>> {
        let count = u32_at(slice(payload, at, 4)?, 0) as usize;
        let bytes = count.checked_mul(FLAT_ENTRY).ok_or_else(too_large)?;
        let file = slice(payload, at + 4, bytes)?;
        let mut entries = Vec::with_capacity(count);
        for (i, entry) in file.chunks_exact(FLAT_ENTRY).enumerate() {
            let index = u32_at(entry, 0);
            if index as usize / cols >= rows {
                bail!(Parse, "overlay entry {i}: index {index} of {rows} x {cols} weights");
            }
            entries.push((index, u16::from_le_bytes([entry[4], entry[5]])));
        }
        last_of_each(&mut entries, |&(index, _)| index);
        Ok(Overlay::Flat { entries, cols })
    }

    /// Of q1t, whose pointers begin at byte `at`. Errors: as for [`Overlay::flat`], and for pointers that do not ascend.
    pub fn by_row(payload: &'a [u8], at: usize, rows: usize, cols: usize) -> Result<Overlay<'a>> {
        let table = rows
            .checked_add(1)
            .and_then(|n| n.checked_mul(4))
            .ok_or_else(too_large)?;
        let row_ptr = slice(payload, at, table)?;
        for row in 0..rows {
            let (from, to) = (u32_at(row_ptr, row), u32_at(row_ptr, row + 1));
            if to < from || (row == 0 && from != 0) {
                bail!(Parse, "overlay: row {row} has entries {from} to {to}");
            }
        }
        let bytes = (u32_at(row_ptr, rows) as usize).checked_mul(ROW_ENTRY);
        let entries = slice(payload, at + table, bytes.ok_or_else(too_large)?)?;
        Ok(Overlay::ByRow { row_ptr, entries, cols })
    }

    /// Replaces `out` with the row's entries as the device holds them; a NaN of all ones, which is none of theirs, becomes
    /// another. Errors: `Parse` for a column outside of the matrix.
    pub fn row(&self, row: usize, out: &mut Vec<u32>) -> Result<()> {
        out.clear();
        match self {
            Overlay::Flat { entries, cols } => {
                let first = row * cols;
                let from = entries.partition_point(|&(index, _)| (index as usize) < first);
                let here = entries[from..]
                    .iter()
                    .map(|&(index, value)| (index as usize - first, value));
                out.extend(
                    here.take_while(|(col, _)| col < cols)
                        .map(|(col, value)| col as u32 | u32::from(value) << 16),
                );
            }
            Overlay::ByRow { row_ptr, entries, cols } => {
                let (from, to) = (u32_at(row_ptr, row) as usize, u32_at(row_ptr, row + 1) as usize);
                let here = entries[from * ROW_ENTRY..to * ROW_ENTRY].chunks_exact(ROW_ENTRY);
                out.extend(here.map(|entry| u32_at(entry, 0)));
                if let Some(entry) = out.iter().find(|&&entry| col_of(entry) as usize >= *cols) {
                    bail!(
                        Parse,
                        "overlay: row {row} has an entry for column {} of {cols}",
                        col_of(*entry)
                    );
                }
                last_of_each(out, |&entry| col_of(entry));
            }
        }
        let reserved = NO_ENTRY >> 16;
        let is_reserved = |entry: &&mut u32| **entry >> 16 == reserved;
        out.iter_mut().filter(is_reserved).for_each(|entry| *entry ^= 1 << 16);
        Ok(())
    }
}

fn too_large() -> Error {
    Error::new(Kind::Bounds, "overlay: its size overflows")
}

fn col_of(entry: u32) -> u32 {
    entry & 0xffff
}

fn u32_at(bytes: &[u8], index: usize) -> u32 {
    let at = 4 * index;
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Sorts by key, and keeps the last of equal ones.
fn last_of_each<T>(entries: &mut Vec<T>, key: impl Fn(&T) -> u32) {
    if entries.is_sorted_by(|a, b| key(a) < key(b)) {
        return;
    }
    // Reversed and sorted stably: of equal keys the last comes first and stays.
    entries.reverse();
    entries.sort_by_key(&key);
    entries.dedup_by_key(|entry| key(entry));
}

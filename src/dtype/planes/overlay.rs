//! Overlay entries of a row as kernels need them: ordered by column, each column once, one word per entry.
//!
//! The file's entries may come in any order. Of two entries for one weight the later one counts.

use super::amount::{Amount, Measure};
use crate::dtype::payload::{row_table, slice, too_large, u32_at};
use crate::error::{Result, bail};

/// An overlay entry that changes nothing: its value is a NaN that no other entry has.
pub const NO_ENTRY: u32 = 0xffff_0000;

/// Bytes of an entry of q1s: `{u32 flat index, f16 value}`.
const FLAT_ENTRY: usize = 6;
/// Bytes of an entry of q1t: `{u16 col, f16 value}`.
const ROW_ENTRY: usize = 4;

/// The overlay of one tensor.
pub enum Overlay<'a> {
    /// q1s: flat index and value, ascending, each index once. The repack copies no other part of the file: 8 bytes per entry,
    /// 12 while they are sorted.
    Flat { entries: Vec<(u32, u16)>, cols: usize },
    /// q1t: pointers into the entries, and the entries, as they are in the file.
    ByRow {
        row_ptr: &'a [u8],
        entries: &'a [u8],
        cols: usize,
    },
}

impl<'a> Overlay<'a> {
    /// That of q1s: `tail` is `[u32 count][entries]`. Errors: `Bounds` for a short tail, `Parse` for an index outside of the
    /// matrix.
    pub fn flat(tail: &'a [u8], rows: usize, cols: usize) -> Result<Overlay<'a>> {
        let count = u32_at(slice(tail, 0, 4)?, 0) as usize;
        let bytes = count.checked_mul(FLAT_ENTRY).ok_or_else(too_large)?;
        let file = slice(tail, 4, bytes)?;
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

    /// That of q1t: `tail` is `[u32 row_ptr: rows+1][entries]`. Errors: `Bounds` for a short tail, `Parse` for pointers that do
    /// not ascend from 0.
    pub fn by_row(tail: &'a [u8], rows: usize, cols: usize) -> Result<Overlay<'a>> {
        let (row_ptr, rest) = row_table(tail, rows)?;
        for row in 0..rows {
            let (from, to) = (u32_at(row_ptr, row), u32_at(row_ptr, row + 1));
            if to < from || (row == 0 && from != 0) {
                bail!(Parse, "overlay: row {row} has entries {from} to {to}");
            }
        }
        let bytes = (u32_at(row_ptr, rows) as usize).checked_mul(ROW_ENTRY);
        let entries = slice(rest, 0, bytes.ok_or_else(too_large)?)?;
        Ok(Overlay::ByRow { row_ptr, entries, cols })
    }

    /// The number of entries of each of `rows` rows. Errors: those of [`Overlay::row`]; `Bounds` for more than 32 bits can
    /// count.
    pub fn measure(&self, rows: usize) -> Result<Measure> {
        let mut entries = Vec::new();
        Measure::sums((0..rows).map(|row| {
            self.row(row, &mut entries)?;
            let words = entries.len();
            Ok(Amount { vectors: 0, words })
        }))
    }

    /// Replaces `out` with the row's entries as the device holds them. The NaN of [`NO_ENTRY`] becomes another NaN.
    ///
    /// Errors: `Parse` for a column outside of the matrix.
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

fn col_of(entry: u32) -> u32 {
    entry & 0xffff
}

/// Sorts by key, and keeps the last of entries with equal keys.
fn last_of_each<T>(entries: &mut Vec<T>, key: impl Fn(&T) -> u32) {
    if entries.is_sorted_by(|a, b| key(a) < key(b)) {
        return;
    }
    // The sort is stable: after the reversal the last entry of equal keys comes first and is the one kept.
    entries.reverse();
    entries.sort_by_key(&key);
    entries.dedup_by_key(|entry| key(entry));
}

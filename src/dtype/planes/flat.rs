//! Rows whose groups cross row boundaries.

use super::amount::{Origin, PAIR};
use crate::dtype::payload::{Payload, slice};
use crate::error::Result;
use std::ops::Range;

/// Writes the part of every pair that belongs to the rows `range`, `BYTES` bytes each, from the part of the payload that begins
/// at byte `at`. A pair belongs to the row that it begins in; the first pair of all belongs to the first row stored. Zeros
/// follow the last group of the file.
pub fn pairs<const BYTES: usize>(
    payload: &Payload,
    origin: Origin,
    range: Range<usize>,
    at: usize,
    out: &mut [u8],
) -> Result<()> {
    let first = match range.start == origin.first {
        true => range.start * payload.cols / PAIR,
        false => (range.start * payload.cols).div_ceil(PAIR),
    };
    let file = slice(payload.bytes, at, groups(payload) * BYTES / 2)?;
    let file = file.get(first * BYTES..).unwrap_or_default();
    let (data, padding) = out.split_at_mut(file.len().min(out.len()));
    data.copy_from_slice(&file[..data.len()]);
    padding.fill(0);
    Ok(())
}

/// Groups of the whole tensor.
pub fn groups(payload: &Payload) -> usize {
    (payload.rows * payload.cols).div_ceil(32)
}

/// The index of the first code of `row` in the code plane.
pub fn first_code(payload: &Payload, origin: Origin, row: usize) -> usize {
    let skipped = origin.first * payload.cols / PAIR * PAIR;
    origin.before.vectors * 32 + row * payload.cols - skipped
}

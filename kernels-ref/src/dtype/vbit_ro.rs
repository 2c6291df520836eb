//! vbit_ro: vbit with `[u32 row_offsets rows+1]`, counted from the packed area, between the scales and the packed rows.
//!
//! The offsets say where rows are; bytes between the end of one row and the start of the next mean nothing.

use super::layout::{Bytes, GROUP, check_offsets, split, u32_at};
use super::vbit::{Vbit, planes, row_bytes};
use super::{BadPayload, RowDecoder};

/// A decoder of vbit_ro. Errors: columns that are no whole groups, a width outside of {3,4,5,6,8}, offsets that do not
/// ascend from 0, a row that does not fit before the next one, a last offset that is not the end of the payload.
pub fn decoder(payload: &[u8], rows: usize, cols: usize) -> Result<Box<dyn RowDecoder + '_>, BadPayload> {
    let [bits, scales, rest] = planes(payload, rows, cols)?;
    let groups = cols / GROUP;
    let (table, packed) = split(rest, Bytes::none().plus(&[rows, 4]).plus(&[4]).get()?, "row offsets")?;
    check_offsets(table, rows, "row_offsets")?;
    let mut offsets = Vec::with_capacity(rows);
    for (row, &width) in bits.iter().enumerate() {
        let (from, to) = (u32_at(table, row) as usize, u32_at(table, row + 1) as usize);
        let wanted = row_bytes(width, groups);
        if to - from < wanted {
            return Err(BadPayload(format!(
                "row {row} of {width} bits: wanted {wanted} bytes, found {}",
                to - from
            )));
        }
        offsets.push(from);
    }
    let end = u32_at(table, rows) as usize;
    Bytes::none()
        .plus(&[end])
        .exactly(packed)
        .map_err(|bad| BadPayload(format!("packed rows: {}", bad.0)))?;
    Ok(Box::new(Vbit {
        bits,
        scales,
        packed,
        offsets,
        groups,
    }))
}

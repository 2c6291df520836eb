//! vbit and vbit_ro: rows of 3, 4, 5, 6 or 8 bits per weight, codes u with value (u−L)·scale\[row, group\], L = 2^(bits−1)−1.
//!
//! Both begin with `[u8 bits: rows][f16 scales: rows·groups]`. A row is packed with its most significant bits first.

use super::layout::{Bytes, GROUP, check_offsets, groups_per_row, half_at, split, u32_at};
use super::{BadPayload, Decoder};

/// A decoder of vbit, whose packed rows follow the scales without gaps. Errors: columns that are not whole groups, a width
/// other than 3, 4, 5, 6 and 8, any other length.
pub fn vbit(payload: &[u8], rows: usize, cols: usize) -> Decoder<'_> {
    let [bits, scales, packed] = sections(payload, rows, cols)?;
    let groups = cols / GROUP;
    let mut end = Bytes::none();
    let mut starts = Vec::with_capacity(rows);
    for &width in bits {
        let start = end.get()?;
        starts.push(start);
        end = Bytes::none().plus(&[start]).plus(&[row_bytes(width, groups)]);
    }
    end.exactly(packed)
        .map_err(|bad| BadPayload(format!("packed rows: {}", bad.0)))?;
    Ok(decoder([bits, scales, packed], starts, groups))
}

/// A decoder of vbit_ro: `[u32 row_offsets: rows+1]`, counted from the packed area, come between scales and packed rows. Bytes
/// between the end of one row and the start of the next are ignored.
///
/// Errors: columns that are not whole groups, a width other than 3, 4, 5, 6 and 8, offsets that do not ascend from 0, a row
/// that does not fit before the next one, a last offset that is not the end of the payload.
pub fn vbit_ro(payload: &[u8], rows: usize, cols: usize) -> Decoder<'_> {
    let [bits, scales, rest] = sections(payload, rows, cols)?;
    let groups = cols / GROUP;
    let (table, packed) = split(rest, Bytes::none().plus(&[rows, 4]).plus(&[4]).get()?, "row offsets")?;
    check_offsets(table, rows, "row_offsets")?;
    let mut starts = Vec::with_capacity(rows);
    for (row, &width) in bits.iter().enumerate() {
        let (from, to) = (u32_at(table, row) as usize, u32_at(table, row + 1) as usize);
        let wanted = row_bytes(width, groups);
        if to - from < wanted {
            return Err(BadPayload(format!(
                "row {row} of {width} bits: expected {wanted} bytes, found {}",
                to - from
            )));
        }
        starts.push(from);
    }
    let end = u32_at(table, rows) as usize;
    Bytes::none()
        .plus(&[end])
        .exactly(packed)
        .map_err(|bad| BadPayload(format!("packed rows: {}", bad.0)))?;
    Ok(decoder([bits, scales, packed], starts, groups))
}

/// The widths, which are checked, the scales, and the rest of the payload.
fn sections(payload: &[u8], rows: usize, cols: usize) -> Result<[&[u8]; 3], BadPayload> {
    let groups = groups_per_row(rows, cols)?;
    let (bits, rest) = split(payload, rows, "bit widths")?;
    if let Some(row) = bits.iter().position(|width| !matches!(width, 3..=6 | 8)) {
        return Err(BadPayload(format!(
            "row {row}: expected a bit width of 3, 4, 5, 6 or 8, found {}",
            bits[row]
        )));
    }
    let (scales, rest) = split(rest, Bytes::none().plus(&[rows, groups, 2]).get()?, "scales")?;
    Ok([bits, scales, rest])
}

/// Bytes of a packed row. A group of 32 always fills whole bytes. No overflow: each group has a scale in the payload.
fn row_bytes(width: u8, groups: usize) -> usize {
    groups * 4 * usize::from(width)
}

/// Decodes rows that begin at `starts` in the packed area.
fn decoder<'a>(
    [bits, scales, packed]: [&'a [u8]; 3],
    starts: Vec<usize>,
    groups: usize,
) -> Box<dyn super::RowDecoder + 'a> {
    Box::new(move |row: usize, out: &mut [f32]| {
        let width = usize::from(bits[row]);
        let mask = u8::MAX >> (8 - width);
        let level = f32::from(mask >> 1);
        let packed = &packed[starts[row]..][..row_bytes(bits[row], groups)];
        for (group, (values, bytes)) in out
            .chunks_exact_mut(GROUP)
            .zip(packed.chunks_exact(4 * width))
            .enumerate()
        {
            let scale = half_at(scales, row * groups + group);
            // Eight codes fill `width` bytes exactly.
            for (eight, bytes) in values.chunks_exact_mut(8).zip(bytes.chunks_exact(width)) {
                let word = bytes.iter().fold(0u64, |word, &byte| word << 8 | u64::from(byte));
                for (k, value) in eight.iter_mut().enumerate() {
                    *value = (f32::from((word >> (width * (7 - k))) as u8 & mask) - level) * scale;
                }
            }
        }
    })
}

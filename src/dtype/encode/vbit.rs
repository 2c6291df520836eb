//! Encoder of vbit and vbit_ro: rows of 3, 4, 5, 6 or 8 bits a weight. A code u means (u−L)·scale, L = 2^(bits−1)−1.

use super::levels::Levels;
use super::{GROUP, Source};
use crate::error::{Result, bail};

/// The widths a row can have, narrowest first.
pub const WIDTHS: [u8; 5] = [3, 4, 5, 6, 8];

/// `[u8 bits: rows][f16 rows·groups]`, with `table` `[u32 row_offsets rows+1]`, `[rows]`; row r has `widths[r]` bits a weight,
/// MSB first.
///
/// Errors: `Parse` for widths that are not one of [`WIDTHS`] for every row; `UnsupportedTensorType` for a magnitude whose
/// scale no f16 holds, and with `table` for rows of more than 2^32 bytes in all.
pub fn encode(source: &Source, widths: &[u8], table: bool) -> Result<Vec<u8>> {
    if widths.len() != source.rows {
        bail!(
            Parse,
            "wanted {} bit widths, one a row, found {}",
            source.rows,
            widths.len()
        );
    }
    if let Some(row) = widths.iter().position(|width| !WIDTHS.contains(width)) {
        bail!(
            Parse,
            "row {row}: wanted a width of 3, 4, 5, 6 or 8 bits, found {}",
            widths[row]
        );
    }
    let groups = source.cols / GROUP;
    let mut starts = Vec::with_capacity(source.rows + 1);
    starts.push(0usize);
    for &width in widths {
        starts.push(starts[starts.len() - 1] + groups * 4 * usize::from(width));
    }
    let packed = starts[source.rows];
    if table && u32::try_from(packed).is_err() {
        bail!(
            UnsupportedTensorType,
            "vbit_ro holds rows of 2^32 bytes in all, found {packed}"
        );
    }
    // The table's first word is 0 and belongs to the first row.
    let words = |rows: usize| if table && rows > 0 { rows + 1 } else { 0 };
    let planes = |rows: usize| [rows, rows * groups * 2, words(rows) * 4, starts[rows]];
    let mut payload = vec![0; planes(source.rows).iter().sum()];
    source.fill(
        &mut payload,
        planes,
        |first, values, [bits, scales, offsets, packed]| {
            let rows = values.len() / source.cols;
            let widths = &widths[first..first + rows];
            bits.copy_from_slice(widths);
            let ends = starts[first + 1..=first + rows].iter().rev();
            for (bytes, &end) in offsets.as_rchunks_mut().1.iter_mut().rev().zip(ends) {
                *bytes = (end as u32).to_le_bytes();
            }
            let mut scales = scales.as_chunks_mut().0.iter_mut();
            let mut rest = packed;
            for (index, group) in values.as_chunks::<GROUP>().0.iter().enumerate() {
                let width = widths[index / groups];
                let levels = Levels::of_bits(width);
                let scale = levels.checked_scale(source, first, index, group)?;
                if let Some(bytes) = scales.next() {
                    *bytes = scale.to_le_bytes();
                }
                let (bytes, after) = std::mem::take(&mut rest).split_at_mut(usize::from(width) * 4);
                pack(&levels.codes(group, scale.to_f32()), usize::from(width), bytes);
                rest = after;
            }
            Ok(())
        },
    )?;
    Ok(payload)
}

/// Codes of `width` bits, most significant bit first: eight of them fill `width` bytes.
fn pack(codes: &[u8; GROUP], width: usize, bytes: &mut [u8]) {
    for (eight, bytes) in codes.as_chunks::<8>().0.iter().zip(bytes.chunks_exact_mut(width)) {
        let word = eight.iter().fold(0u64, |word, &code| word << width | u64::from(code));
        bytes.copy_from_slice(&word.to_be_bytes()[8 - width..]);
    }
}

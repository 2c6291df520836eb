//! vbit: `[u8 bits: rows][f16 rows·groups][rows]`, each row packed MSB first with its own width b ∈ {3,4,5,6,8}; value
//! (u−L)·scale\[row, group\], L = 2^(b−1)−1.

use super::layout::{Bytes, GROUP, groups_per_row, half_at, split};
use super::{BadPayload, RowDecoder};

/// A matrix of rows of different bit widths. The packed rows lie where `offsets` says.
pub(super) struct Vbit<'a> {
    pub bits: &'a [u8],
    pub scales: &'a [u8],
    pub packed: &'a [u8],
    /// Where each row starts in `packed`.
    pub offsets: Vec<usize>,
    pub groups: usize,
}

/// A decoder of vbit. Errors: columns that are no whole groups, a width outside of {3,4,5,6,8}, any other length.
pub fn decoder(payload: &[u8], rows: usize, cols: usize) -> Result<Box<dyn RowDecoder + '_>, BadPayload> {
    let [bits, scales, packed] = planes(payload, rows, cols)?;
    let groups = cols / GROUP;
    let mut end = Bytes::none();
    let mut offsets = Vec::with_capacity(rows);
    for &width in bits {
        let start = end.get()?;
        offsets.push(start);
        end = Bytes::none().plus(&[start]).plus(&[row_bytes(width, groups)]);
    }
    end.exactly(packed)
        .map_err(|bad| BadPayload(format!("packed rows: {}", bad.0)))?;
    Ok(Box::new(Vbit {
        bits,
        scales,
        packed,
        offsets,
        groups,
    }))
}

/// The widths, which are checked, the scales, and what follows them.
pub(super) fn planes(payload: &[u8], rows: usize, cols: usize) -> Result<[&[u8]; 3], BadPayload> {
    let groups = groups_per_row(rows, cols)?;
    let (bits, rest) = split(payload, rows, "bit widths")?;
    if let Some(row) = bits.iter().position(|width| !matches!(width, 3..=6 | 8)) {
        return Err(BadPayload(format!(
            "row {row}: wanted a bit width of 3, 4, 5, 6 or 8, found {}",
            bits[row]
        )));
    }
    let (scales, rest) = split(rest, Bytes::none().plus(&[rows, groups, 2]).get()?, "scales")?;
    Ok([bits, scales, rest])
}

/// Bytes of a packed row. A group of 32 is always whole bytes; no overflow, because each group has a scale in the payload.
pub(super) fn row_bytes(width: u8, groups: usize) -> usize {
    groups * 4 * usize::from(width)
}

impl RowDecoder for Vbit<'_> {
    fn row(&self, row: usize, out: &mut [f32]) {
        let width = usize::from(self.bits[row]);
        let mask = u8::MAX >> (8 - width);
        let level = f32::from(mask >> 1);
        let packed = &self.packed[self.offsets[row]..][..row_bytes(self.bits[row], self.groups)];
        for (group, (values, bytes)) in out
            .chunks_exact_mut(GROUP)
            .zip(packed.chunks_exact(4 * width))
            .enumerate()
        {
            let scale = half_at(self.scales, row * self.groups + group);
            // Eight codes fill `width` bytes exactly.
            for (eight, bytes) in values.chunks_exact_mut(8).zip(bytes.chunks_exact(width)) {
                let word = bytes.iter().fold(0u64, |word, &byte| word << 8 | u64::from(byte));
                for (k, value) in eight.iter_mut().enumerate() {
                    *value = (f32::from((word >> (width * (7 - k))) as u8 & mask) - level) * scale;
                }
            }
        }
    }
}

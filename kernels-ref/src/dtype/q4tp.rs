//! q4tp: `[nibbles rows·groups·16][rows × (f16 lo, f16 step)][rows × ⌈groups·5/8⌉ bytes of 5-bit codes, LSB first]`,
//! value (q−8)·2^(lo + code·step), nibbles as in q4_block.
//!
//! The scale is the closed form in f64, rounded once to f32; the value is the f32 product.

use super::layout::{Bytes, GROUP, groups_per_row, half_at};
use super::{BadPayload, RowDecoder};

struct Q4tp<'a> {
    nibbles: &'a [u8],
    ladders: &'a [u8],
    codes: &'a [u8],
    groups: usize,
    code_bytes: usize,
}

/// A decoder of q4tp. Errors: columns that are no whole groups, any other length.
pub fn decoder(payload: &[u8], rows: usize, cols: usize) -> Result<Box<dyn RowDecoder + '_>, BadPayload> {
    let groups = groups_per_row(rows, cols)?;
    let code_bytes = Bytes::none().plus(&[groups, 5]).get()?.div_ceil(8);
    Bytes::none()
        .plus(&[rows, groups, 16])
        .plus(&[rows, 4])
        .plus(&[rows, code_bytes])
        .exactly(payload)?;
    let (nibbles, rest) = payload.split_at(rows * groups * 16);
    let (ladders, codes) = rest.split_at(rows * 4);
    Ok(Box::new(Q4tp {
        nibbles,
        ladders,
        codes,
        groups,
        code_bytes,
    }))
}

/// The `group`-th 5-bit code of a row's code bytes.
fn code(codes: &[u8], group: usize) -> u8 {
    let bit = group * 5;
    let low = u16::from(codes[bit / 8]);
    // A row's last code may end in its last byte.
    let high = u16::from(codes.get(bit / 8 + 1).copied().unwrap_or(0));
    ((low | high << 8) >> (bit % 8) & 31) as u8
}

impl RowDecoder for Q4tp<'_> {
    fn row(&self, row: usize, out: &mut [f32]) {
        let lo = f64::from(half_at(self.ladders, 2 * row));
        let step = f64::from(half_at(self.ladders, 2 * row + 1));
        let codes = &self.codes[row * self.code_bytes..][..self.code_bytes];
        let nibbles = &self.nibbles[row * self.groups * 16..][..self.groups * 16];
        for (group, (values, bytes)) in out
            .as_chunks_mut::<GROUP>()
            .0
            .iter_mut()
            .zip(nibbles.chunks_exact(16))
            .enumerate()
        {
            let scale = (lo + f64::from(code(codes, group)) * step).exp2() as f32;
            for (pair, &byte) in values.as_chunks_mut::<2>().0.iter_mut().zip(bytes) {
                let value = |q: u8| (f32::from(q) - 8.0) * scale;
                *pair = [value(byte & 15), value(byte >> 4)];
            }
        }
    }
}

//! bf16: the upper half of an f32, little-endian.

use super::layout::{Bytes, check_matrix};
use super::{BadPayload, RowDecoder};

struct Bf16<'a> {
    values: &'a [u8],
    cols: usize,
}

/// A decoder of `[bf16 rows·cols]`. Errors: any other length.
pub fn decoder(payload: &[u8], rows: usize, cols: usize) -> Result<Box<dyn RowDecoder + '_>, BadPayload> {
    check_matrix(rows, cols)?;
    Bytes::none().plus(&[rows, cols, 2]).exactly(payload)?;
    Ok(Box::new(Bf16 { values: payload, cols }))
}

impl RowDecoder for Bf16<'_> {
    fn row(&self, row: usize, out: &mut [f32]) {
        let bytes = &self.values[row * self.cols * 2..][..self.cols * 2];
        for (value, b) in out.iter_mut().zip(bytes.as_chunks().0) {
            *value = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
        }
    }
}

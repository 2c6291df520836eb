//! f32: the value itself, little-endian.

use super::layout::{Bytes, check_matrix};
use super::{BadPayload, RowDecoder};

struct F32<'a> {
    values: &'a [u8],
    cols: usize,
}

/// A decoder of `[f32 rows·cols]`. Errors: any other length.
pub fn decoder(payload: &[u8], rows: usize, cols: usize) -> Result<Box<dyn RowDecoder + '_>, BadPayload> {
    check_matrix(rows, cols)?;
    Bytes::none().plus(&[rows, cols, 4]).exactly(payload)?;
    Ok(Box::new(F32 { values: payload, cols }))
}

impl RowDecoder for F32<'_> {
    fn row(&self, row: usize, out: &mut [f32]) {
        let bytes = &self.values[row * self.cols * 4..][..self.cols * 4];
        for (value, b) in out.iter_mut().zip(bytes.as_chunks().0) {
            *value = f32::from_le_bytes(*b);
        }
    }
}

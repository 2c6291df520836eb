//! f16: IEEE half precision, little-endian.

use super::layout::{Bytes, check_matrix};
use super::{BadPayload, RowDecoder};
use half::slice::HalfFloatSliceExt;

struct F16<'a> {
    values: &'a [u8],
    cols: usize,
}

/// A decoder of `[f16 rows·cols]`. Errors: any other length.
pub fn decoder(payload: &[u8], rows: usize, cols: usize) -> Result<Box<dyn RowDecoder + '_>, BadPayload> {
    check_matrix(rows, cols)?;
    Bytes::none().plus(&[rows, cols, 2]).exactly(payload)?;
    Ok(Box::new(F16 { values: payload, cols }))
}

impl RowDecoder for F16<'_> {
    fn row(&self, row: usize, out: &mut [f32]) {
        // Payloads have no alignment; the conversion instructions want aligned halves, many at a time.
        let mut halves = [half::f16::ZERO; 64];
        let bytes = &self.values[row * self.cols * 2..][..self.cols * 2];
        for (values, bytes) in out.chunks_mut(halves.len()).zip(bytes.chunks(2 * halves.len())) {
            for (half, b) in halves.iter_mut().zip(bytes.as_chunks().0) {
                *half = half::f16::from_le_bytes(*b);
            }
            halves[..values.len()].convert_to_f32_slice(values);
        }
    }
}

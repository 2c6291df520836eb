//! q8_row: `[i8 rows·cols][f16 rows]`, value q·scale\[row\].

use super::layout::{Bytes, check_matrix, half_at};
use super::{BadPayload, RowDecoder};

struct Q8Row<'a> {
    codes: &'a [u8],
    scales: &'a [u8],
    cols: usize,
}

/// A decoder of q8_row. Errors: any other length.
pub fn decoder(payload: &[u8], rows: usize, cols: usize) -> Result<Box<dyn RowDecoder + '_>, BadPayload> {
    check_matrix(rows, cols)?;
    Bytes::none().plus(&[rows, cols]).plus(&[rows, 2]).exactly(payload)?;
    let (codes, scales) = payload.split_at(rows * cols);
    Ok(Box::new(Q8Row { codes, scales, cols }))
}

impl RowDecoder for Q8Row<'_> {
    fn row(&self, row: usize, out: &mut [f32]) {
        let scale = half_at(self.scales, row);
        let codes = &self.codes[row * self.cols..][..self.cols];
        for (value, &code) in out.iter_mut().zip(codes) {
            *value = f32::from(code as i8) * scale;
        }
    }
}

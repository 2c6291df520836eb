//! q8_2f: `[i8 rows·cols][f16 rows][f16 cols]`, value q·row_field\[row\]·col_field\[col\].

use super::layout::{Bytes, check_matrix, half_at};
use super::{BadPayload, RowDecoder};

struct Q82f<'a> {
    codes: &'a [u8],
    row_field: &'a [u8],
    col_field: Vec<f32>,
}

/// A decoder of q8_2f. Errors: any other length.
pub fn decoder(payload: &[u8], rows: usize, cols: usize) -> Result<Box<dyn RowDecoder + '_>, BadPayload> {
    check_matrix(rows, cols)?;
    Bytes::none()
        .plus(&[rows, cols])
        .plus(&[rows, 2])
        .plus(&[cols, 2])
        .exactly(payload)?;
    let (codes, fields) = payload.split_at(rows * cols);
    let (row_field, col_field) = fields.split_at(rows * 2);
    let col_field = (0..cols).map(|col| half_at(col_field, col)).collect();
    Ok(Box::new(Q82f {
        codes,
        row_field,
        col_field,
    }))
}

impl RowDecoder for Q82f<'_> {
    fn row(&self, row: usize, out: &mut [f32]) {
        let cols = self.col_field.len();
        let scale = half_at(self.row_field, row);
        let codes = &self.codes[row * cols..][..cols];
        for ((value, &code), &col) in out.iter_mut().zip(codes).zip(&self.col_field) {
            // The first product has 19 significant bits, so only the second one rounds.
            *value = f32::from(code as i8) * scale * col;
        }
    }
}

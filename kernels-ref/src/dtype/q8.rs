//! q8_row and q8_2f: signed bytes, with one scale per row or with one per row and one per column.

use super::Decoder;
use super::layout::{Bytes, check_matrix, half_at, part};

/// A decoder of q8_row: `[i8 rows·cols][f16 rows]`, value q·scale\[row\]. Errors: any other length.
pub fn q8_row(payload: &[u8], rows: usize, cols: usize) -> Decoder<'_> {
    check_matrix(rows, cols)?;
    Bytes::none().plus(&[rows, cols]).plus(&[rows, 2]).exactly(payload)?;
    let (codes, scales) = payload.split_at(rows * cols);
    Ok(Box::new(move |row: usize, out: &mut [f32]| {
        let scale = half_at(scales, row);
        for (value, &code) in out.iter_mut().zip(part(codes, row, cols)) {
            *value = f32::from(code as i8) * scale;
        }
    }))
}

/// A decoder of q8_2f: `[i8 rows·cols][f16 rows][f16 cols]`, value q·row_scale\[row\]·col_scale\[col\]. Errors: any other
/// length.
pub fn q8_2f(payload: &[u8], rows: usize, cols: usize) -> Decoder<'_> {
    check_matrix(rows, cols)?;
    Bytes::none()
        .plus(&[rows, cols])
        .plus(&[rows, 2])
        .plus(&[cols, 2])
        .exactly(payload)?;
    let (codes, scales) = payload.split_at(rows * cols);
    let (row_scales, col_scales) = scales.split_at(rows * 2);
    let col_scales: Vec<f32> = (0..cols).map(|col| half_at(col_scales, col)).collect();
    Ok(Box::new(move |row: usize, out: &mut [f32]| {
        let scale = half_at(row_scales, row);
        for ((value, &code), &col) in out.iter_mut().zip(part(codes, row, cols)).zip(&col_scales) {
            // The first product has 19 significant bits, so only the second one rounds.
            *value = f32::from(code as i8) * scale * col;
        }
    }))
}

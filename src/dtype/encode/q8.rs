//! Encoders of the 8-bit types: q8_row, q8_2f.

use super::{Source, absmax, half_up, round};
use crate::error::{Kind, Result};
use half::f16;

/// The largest code. −128 is not used, so that positive and negative weights are treated alike.
const TOP: f32 = 127.0;

/// How far below the largest column field the smallest one may lie: small enough to follow any real spread of columns, large
/// enough to keep the fields of common weights out of f16's subnormal numbers.
const FIELD_SPREAD: f64 = 1.0 / 256.0;

/// `[i8 rows·cols][f16 rows]`: scale = absmax/127, rounded up.
pub fn q8_row(source: &Source, payload: &mut [u8]) -> Result<()> {
    let field = vec![1.0; source.cols];
    encode(source, &field, payload)
}

/// `[i8 rows·cols][f16 rows][f16 cols]`.
///
/// A column's field follows its amplitude, (mean w⁴)^(3/16), and a row's field is the absmax of what remains, /127, rounded
/// up. Between the mean square, which forgets a column's large weights, and the absmax, which one outlier decides, the
/// fourth power was best on trained matrices of every role; following it with the power 3/4 of its size beat both more
/// and less.
pub fn q8_2f(source: &Source, payload: &mut [u8]) -> Result<()> {
    let (codes_and_rows, field_bytes) = payload.split_at_mut(source.rows * (source.cols + 2));
    let field = column_field(source)?;
    for (bytes, value) in field_bytes.as_chunks_mut().0.iter_mut().zip(&field) {
        *bytes = value.to_le_bytes();
    }
    let field: Vec<f32> = field.into_iter().map(f16::to_f32).collect();
    encode(source, &field, codes_and_rows)
}

/// `[i8 rows·cols][f16 rows]` of the weights divided by `field`, which holds one positive value per column.
fn encode(source: &Source, field: &[f32], payload: &mut [u8]) -> Result<()> {
    let cols = source.cols;
    source.fill(
        payload,
        |rows| [rows * cols, rows * 2],
        |first, values, [codes, scales]| {
            let mut divided = vec![0.0; cols];
            let rows = values
                .chunks_exact(cols)
                .zip(codes.chunks_exact_mut(cols))
                .zip(scales.as_chunks_mut().0);
            for (row, ((values, codes), scale_bytes)) in rows.enumerate() {
                for ((divided, &value), &field) in divided.iter_mut().zip(values).zip(field) {
                    *divided = value / field;
                }
                let top = absmax(&divided);
                let scale = half_up(f64::from(top) / f64::from(TOP));
                if scale.is_infinite() {
                    let col = divided.iter().position(|value| value.abs() == top).unwrap_or(0);
                    let at = row * cols + col;
                    let wanted = "wanted a magnitude whose 127th part fits f16";
                    return Err(source.refuse(Kind::UnsupportedTensorType, first, at, wanted, values[col]));
                }
                *scale_bytes = scale.to_le_bytes();
                if top > 0.0 {
                    let scale = scale.to_f32();
                    for (code, &value) in codes.iter_mut().zip(&divided) {
                        *code = round(value / scale) as i8 as u8;
                    }
                }
            }
            Ok(())
        },
    )
}

/// The column field of q8_2f: positive and finite, even where a column holds nothing but zeros.
fn column_field(source: &Source) -> Result<Vec<f16>> {
    let blocks = source.map(|_, values| {
        let mut sums = vec![0.0; source.cols];
        for row in values.chunks_exact(source.cols) {
            for (sum, &value) in sums.iter_mut().zip(row) {
                let square = f64::from(value) * f64::from(value);
                *sum += square * square;
            }
        }
        Ok((sums, absmax(values)))
    })?;
    let mut amplitudes = vec![0.0; source.cols];
    let mut top = 0f32;
    // In block order, whichever thread was first: sums depend on their order.
    for (sums, block_top) in blocks {
        amplitudes
            .iter_mut()
            .zip(sums)
            .for_each(|(amplitude, sum)| *amplitude += sum);
        top = top.max(block_top);
    }
    amplitudes
        .iter_mut()
        .for_each(|amplitude| *amplitude = (*amplitude / source.rows as f64).powf(3.0 / 16.0));
    let largest = amplitudes.iter().copied().fold(0.0, f64::max);
    // Rows and columns share the magnitude evenly, so that both stay inside of f16's range.
    let largest_field = (f64::from(top) / f64::from(TOP)).sqrt();
    let field = |amplitude: f64| {
        let share = if largest > 0.0 { amplitude / largest } else { 1.0 };
        let field = f16::from_f64(largest_field * share.max(FIELD_SPREAD));
        field.clamp(f16::MIN_POSITIVE_SUBNORMAL, f16::MAX)
    };
    Ok(amplitudes.into_iter().map(field).collect())
}

//! Encoders of the 8-bit types: q8_row, q8_2f.

use super::{Source, absmax, half_up, round};
use crate::error::{Kind, Result};
use half::f16;

/// The largest code. −128 is not used, so that positive and negative weights are treated alike.
const TOP: f32 = 127.0;

/// `[i8 rows·cols][f16 rows]`: scale = absmax/127, rounded up.
pub fn q8_row(source: &Source, payload: &mut [u8]) -> Result<()> {
    let field = vec![1.0; source.cols];
    encode(source, &field, payload)
}

/// `[i8 rows·cols][f16 rows][f16 cols]`.
///
/// A column's field follows the square root of its amplitude, ((mean w⁴)^(1/4))^(1/2), so that rows and columns share the
/// work; a row's field is the absmax of what remains, /127, rounded up. Before that, each column takes back what no row
/// needs. On a trained model, powers between 1/2 and 3/4 of the amplitude had the lowest perplexity.
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
    let filled = source.fill(
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
    );
    filled.map(drop)
}

/// The column field of q8_2f: positive and finite, even where a column holds nothing but zeros.
fn column_field(source: &Source) -> Result<Vec<f16>> {
    let start = amplitudes(source)?;
    // The rows take what the columns leave, and the columns what those rows leave: this only tightens.
    let field = largest(source, |values, shares| {
        let row = values
            .iter()
            .zip(&start)
            .map(|(value, field)| value.abs() / field)
            .fold(0.0, f32::max);
        if row > 0.0 {
            shares
                .iter_mut()
                .zip(values)
                .for_each(|(share, value)| *share = share.max(value.abs() / row));
        }
    })?;
    Ok(field
        .into_iter()
        .map(|share| half_up(f64::from(share)).max(f16::MIN_POSITIVE))
        .collect())
}

/// For each column the largest of what `share` raised it to over all rows; 1 for columns that nothing raised.
fn largest(source: &Source, share: impl Fn(&[f32], &mut [f32]) + Sync) -> Result<Vec<f32>> {
    let blocks = source.map(|_, values| {
        let mut shares = vec![0f32; source.cols];
        values.chunks_exact(source.cols).for_each(|row| share(row, &mut shares));
        Ok(shares)
    })?;
    let mut all = vec![0f32; source.cols];
    for block in blocks {
        all.iter_mut().zip(block).for_each(|(all, one)| *all = all.max(one));
    }
    Ok(all
        .into_iter()
        .map(|share| if share > 0.0 { share } else { 1.0 })
        .collect())
}

/// (mean w⁴)^(1/8) of each column, relative to the largest.
fn amplitudes(source: &Source) -> Result<Vec<f32>> {
    let blocks = source.map(|_, values| {
        let mut sums = vec![0.0; source.cols];
        for row in values.chunks_exact(source.cols) {
            for (sum, &value) in sums.iter_mut().zip(row) {
                let square = f64::from(value) * f64::from(value);
                *sum += square * square;
            }
        }
        Ok(sums)
    })?;
    let mut all = vec![0f64; source.cols];
    for block in blocks {
        all.iter_mut().zip(block).for_each(|(all, one)| *all += one);
    }
    let top = all.iter().copied().fold(0.0, f64::max);
    Ok(all
        .iter()
        .map(|sum| {
            if *sum > 0.0 {
                (sum / top).powf(1.0 / 8.0) as f32
            } else {
                1.0
            }
        })
        .collect())
}

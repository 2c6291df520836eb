//! q8_row and q8_2f: signed bytes.
//!
//! q8_row is `[i8 rows·cols][f16 rows]`, code·scale\[row\]. q8_2f is `[i8 rows·cols][f16 rows][f16 cols]`,
//! code·row_scale\[row\]·col_scale\[col\].

use super::payload::{Section, fill_halves};
use super::planes::{Planes, Repack};
use super::quantise::{Weights, absmax, half_up, round};
use super::spec::{Encode, Shapes, Size, Spec, Tail};
use crate::error::{Kind, Result};
use cmf_kernels_ref::dtype::q8;
use half::f16;

pub const Q8_ROW: Spec = Spec {
    id: Some(3),
    gguf: None,
    name: "q8_row",
    quant: "q8",
    code_bits: 8,
    shapes: Shapes::Matrix,
    max_cols: u64::MAX,
    sections: &[Section::Weights(1), Section::Rows(2)],
    tail: Tail::NONE,
    decoder: q8::q8_row,
    encode: Encode::Exact(|weights, payload| encode(weights, &vec![1.0; weights.cols], payload)),
    planes: |_| Ok(Planes::I8),
    repack: Repack::COPY,
    verify: |_| Ok(()),
    random: Some(|payload, [rows, cols], deviation, random| {
        let (codes, scales) = payload.split_at_mut(rows * cols);
        random(codes);
        fill_halves(scales, deviation / CODE_DEVIATION);
    }),
};

pub const Q8_2F: Spec = Spec {
    id: Some(9),
    gguf: None,
    name: "q8_2f",
    quant: "q8_2f",
    tail: Tail {
        size: |_, cols| cols.checked_mul(2).map(Size::Exact),
        select: |payload, _, selected| {
            selected.extend_from_slice(payload.tail()?);
            Ok(())
        },
        ..Tail::NONE
    },
    decoder: q8::q8_2f,
    encode: Encode::Exact(encode_2f),
    planes: |_| Ok(Planes::I8Col),
    random: Some(|payload, [rows, cols], deviation, random| {
        let (codes, scales) = payload.split_at_mut(rows * cols);
        random(codes);
        fill_halves(scales, (deviation / CODE_DEVIATION).sqrt());
    }),
    ..Q8_ROW
};

/// The standard deviation of random codes.
const CODE_DEVIATION: f64 = 73.0;

/// The largest code. −128 is not used, so that positive and negative weights are treated alike.
const TOP: f32 = 127.0;

/// Column scales start as the square root of the columns' amplitudes, ((mean w⁴)^(1/4))^(1/2), so that row and column scales
/// share the range. Each is then lowered as far as possible without raising a row scale. A row scale is the absmax of the
/// divided row / 127, rounded up. On a trained model, powers between 1/2 and 3/4 of the amplitude gave the lowest perplexity.
fn encode_2f(weights: &Weights, payload: &mut [u8]) -> Result<()> {
    let (codes_and_rows, col_bytes) = payload.split_at_mut(weights.rows * (weights.cols + 2));
    let scales = column_scales(weights)?;
    for (bytes, value) in col_bytes.as_chunks_mut().0.iter_mut().zip(&scales) {
        *bytes = value.to_le_bytes();
    }
    let scales: Vec<f32> = scales.into_iter().map(f16::to_f32).collect();
    encode(weights, &scales, codes_and_rows)
}

/// `[i8 rows·cols][f16 rows]` of the weights divided by `col_scales`, one positive value per column.
fn encode(weights: &Weights, col_scales: &[f32], payload: &mut [u8]) -> Result<()> {
    let cols = weights.cols;
    let filled = weights.fill(
        payload,
        |rows| [rows * cols, rows * 2],
        |first, values, [codes, scales]| {
            let mut divided = vec![0.0; cols];
            let rows = values
                .chunks_exact(cols)
                .zip(codes.chunks_exact_mut(cols))
                .zip(scales.as_chunks_mut().0);
            for (row, ((values, codes), scale_bytes)) in rows.enumerate() {
                for ((divided, &value), &scale) in divided.iter_mut().zip(values).zip(col_scales) {
                    *divided = value / scale;
                }
                let top = absmax(&divided);
                let scale = half_up(f64::from(top) / f64::from(TOP));
                if scale.is_infinite() {
                    let col = divided.iter().position(|value| value.abs() == top).unwrap_or(0);
                    let at = row * cols + col;
                    let wanted = "expected a magnitude whose 127th part fits f16";
                    return Err(weights.refuse(Kind::UnsupportedTensorType, first, at, wanted, values[col]));
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

/// The column scales of q8_2f: positive and finite, even in columns of zeros.
fn column_scales(weights: &Weights) -> Result<Vec<f16>> {
    let start = amplitudes(weights)?;
    // A row whose largest quotient is r needs no column scale above |w| / r.
    let scales = column_maxima(weights, |values, maxima| {
        let row = values
            .iter()
            .zip(&start)
            .map(|(value, scale)| value.abs() / scale)
            .fold(0.0, f32::max);
        if row > 0.0 {
            maxima
                .iter_mut()
                .zip(values)
                .for_each(|(max, value)| *max = max.max(value.abs() / row));
        }
    })?;
    Ok(scales
        .into_iter()
        .map(|scale| half_up(f64::from(scale)).max(f16::MIN_POSITIVE))
        .collect())
}

/// The maximum over all rows of what `raise` makes of each column, 1 where it stayed 0.
fn column_maxima(weights: &Weights, raise: impl Fn(&[f32], &mut [f32]) + Sync) -> Result<Vec<f32>> {
    let blocks = weights.map(|_, values| {
        let mut maxima = vec![0f32; weights.cols];
        values
            .chunks_exact(weights.cols)
            .for_each(|row| raise(row, &mut maxima));
        Ok(maxima)
    })?;
    let mut all = vec![0f32; weights.cols];
    for block in blocks {
        all.iter_mut().zip(block).for_each(|(all, one)| *all = all.max(one));
    }
    Ok(all.into_iter().map(|max| if max > 0.0 { max } else { 1.0 }).collect())
}

/// (mean w⁴)^(1/8) of each column, relative to the largest.
fn amplitudes(weights: &Weights) -> Result<Vec<f32>> {
    let blocks = weights.map(|_, values| {
        let mut sums = vec![0.0; weights.cols];
        for row in values.chunks_exact(weights.cols) {
            for (sum, &value) in sums.iter_mut().zip(row) {
                let square = f64::from(value) * f64::from(value);
                *sum += square * square;
            }
        }
        Ok(sums)
    })?;
    let mut all = vec![0f64; weights.cols];
    for block in blocks {
        all.iter_mut().zip(block).for_each(|(all, one)| *all += one);
    }
    let top = all.iter().copied().fold(0.0, f64::max);
    let amplitude = |&sum: &f64| match sum > 0.0 {
        true => (sum / top).powf(1.0 / 8.0) as f32,
        false => 1.0,
    };
    Ok(all.iter().map(amplitude).collect())
}

//! linear: the product of a weight matrix and activations.

use crate::dtype::RowDecoder;
use rayon::prelude::*;
use std::ops::Range;

/// Rows decoded by one thread before it asks for more work.
const ROWS_PER_TASK: usize = 8;

/// y\[t\]\[r\] = Σ_k w\[rows.start + r\]\[k\] · x\[t\]\[k\] for `n` tokens t.
///
/// `weights` decodes rows of `cols` values. `x` is \[n, x_stride\]: the first `cols` values of each token are used, and the last
/// token may end after them. `y` is \[n, rows.len()\]. Each weight row is decoded once, whatever `n`.
pub fn linear(
    weights: &dyn RowDecoder,
    rows: Range<usize>,
    cols: usize,
    x: &[f32],
    x_stride: usize,
    n: usize,
    y: &mut [f64],
) {
    assert_eq!(y.len(), n * rows.len(), "y is [n, rows]");
    if n == 0 {
        return;
    }
    let tokens: Vec<&[f32]> = (0..n).map(|t| &x[t * x_stride..][..cols]).collect();
    // Threads share the rows, so products are collected row by row and transposed afterwards.
    let mut by_row = vec![0.0; y.len()];
    by_row
        .par_chunks_mut(n)
        .enumerate()
        .with_min_len(ROWS_PER_TASK)
        .for_each_init(
            || vec![0.0; cols],
            |weight, (r, products)| {
                weights.row(rows.start + r, weight);
                for (product, token) in products.iter_mut().zip(&tokens) {
                    *product = dot(weight, token);
                }
            },
        );
    for (t, token) in y.chunks_exact_mut(rows.len().max(1)).enumerate() {
        for (r, value) in token.iter_mut().enumerate() {
            *value = by_row[r * n + t];
        }
    }
}

/// Σ a\[k\]·b\[k\]. Products of two f32 are exact in f64.
fn dot(a: &[f32], b: &[f32]) -> f64 {
    // Eight partial sums, because each addition to a single sum would wait for the one before.
    let mut sums = [0.0; 8];
    let ((a, a_tail), (b, b_tail)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    for (a, b) in a.iter().zip(b) {
        for ((sum, &a), &b) in sums.iter_mut().zip(a).zip(b) {
            *sum += f64::from(a) * f64::from(b);
        }
    }
    let tail: f64 = a_tail
        .iter()
        .zip(b_tail)
        .map(|(&a, &b)| f64::from(a) * f64::from(b))
        .sum();
    sums.iter().sum::<f64>() + tail
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype;

    /// Weight (row, col) is 10·row + col.
    struct Digits;

    impl RowDecoder for Digits {
        fn row(&self, row: usize, out: &mut [f32]) {
            for (col, value) in out.iter_mut().enumerate() {
                *value = (10 * row + col) as f32;
            }
        }
    }

    #[test]
    fn a_range_of_rows_times_tokens_with_a_stride() {
        // Tokens (1, 0, 2) and (0, 1, 0); a stride of 4 leaves one value unused.
        let x = [1.0, 0.0, 2.0, f32::NAN, 0.0, 1.0, 0.0];
        let mut y = [f64::NAN; 4];
        linear(&Digits, 1..3, 3, &x, 4, 2, &mut y);
        // Row 1 is (10, 11, 12), row 2 is (20, 21, 22).
        assert_eq!(y, [34.0, 64.0, 11.0, 21.0]);
    }

    #[test]
    fn every_length_uses_every_weight() {
        for cols in 1..40 {
            let x: Vec<f32> = (0..cols).map(|k| k as f32).collect();
            let mut y = [0.0];
            linear(&Digits, 0..1, cols, &x, cols, 1, &mut y);
            // Σ k² below `cols`.
            assert_eq!(y[0], ((cols - 1) * cols * (2 * cols - 1) / 6) as f64, "{cols} columns");
        }
    }

    #[test]
    fn products_are_summed_in_f64() {
        let bytes: Vec<u8> = [1e8f32, 1.0, -1e8].iter().flat_map(|v| v.to_le_bytes()).collect();
        let weights = dtype::float::f32(&bytes, 1, 3).unwrap();
        let mut y = [0.0];
        linear(&*weights, 0..1, 3, &[1.0; 3], 3, 1, &mut y);
        assert_eq!(y[0], 1.0);
    }

    #[test]
    fn no_rows_and_no_tokens_are_allowed() {
        linear(&Digits, 2..2, 3, &[0.0; 3], 3, 1, &mut []);
        linear(&Digits, 0..2, 3, &[], 3, 0, &mut []);
    }
}

//! rms_norm: a vector divided by its root mean square, times a weight.

/// out\[i\] = x\[i\] · weight\[i\] / √(mean(x²) + eps). All three slices have the same length.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f64, out: &mut [f64]) {
    assert!(
        x.len() == weight.len() && x.len() == out.len(),
        "x, weight and out have the same length"
    );
    let mean = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>() / x.len() as f64;
    let factor = 1.0 / (mean + eps).sqrt();
    for ((out, &x), &weight) in out.iter_mut().zip(x).zip(weight) {
        *out = f64::from(x) * f64::from(weight) * factor;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_mean_square_is_divided_out() {
        // Squares 1, 1, 7, 7 have mean 4.
        let root = 7f32.sqrt();
        let mut out = [0.0; 4];
        rms_norm(&[1.0, -1.0, root, root], &[2.0, 4.0, 0.0, 2.0], 0.0, &mut out);
        for (found, wanted) in out.iter().zip([1.0, -2.0, 0.0, 7f64.sqrt()]) {
            assert!((found - wanted).abs() < 1e-7, "expected {wanted}, found {found}");
        }
    }

    #[test]
    fn eps_is_added_to_the_mean_of_squares() {
        let mut out = [0.0; 2];
        // Mean 1, eps 3: the root is 2.
        rms_norm(&[1.0, 1.0], &[1.0, 1.0], 3.0, &mut out);
        assert_eq!(out, [0.5, 0.5]);
        rms_norm(&[0.0, 0.0], &[1.0, 1.0], 1e-6, &mut out);
        assert_eq!(out, [0.0, 0.0]);
    }
}

//! layer_norm: a vector with mean 0 and variance 1.

/// out\[i\] = (x\[i\] − mean) / √(variance + eps), with the biased variance. Both slices have the same length.
pub fn layer_norm(x: &[f32], eps: f64, out: &mut [f64]) {
    assert_eq!(x.len(), out.len(), "x and out have the same length");
    let (mean, variance) = moments(x.iter().map(|&v| f64::from(v)));
    let factor = 1.0 / (variance + eps).sqrt();
    for (out, &x) in out.iter_mut().zip(x) {
        *out = (f64::from(x) - mean) * factor;
    }
}

/// Mean and biased variance.
pub fn moments(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let count = values.clone().count() as f64;
    let mean = values.clone().sum::<f64>() / count;
    (mean, values.map(|v| (v - mean).powi(2)).sum::<f64>() / count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mean_and_variance_are_divided_out() {
        let mut out = [0.0; 4];
        // Mean 5, variance 4.
        layer_norm(&[3.0, 7.0, 3.0, 7.0], 0.0, &mut out);
        assert_eq!(out, [-1.0, 1.0, -1.0, 1.0]);
        layer_norm(&[3.0, 7.0, 3.0, 7.0], 12.0, &mut out);
        assert_eq!(out, [-0.5, 0.5, -0.5, 0.5]);
    }
}

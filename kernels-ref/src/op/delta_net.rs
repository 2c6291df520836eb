//! delta_net: the parts of a Gated DeltaNet layer for one value head and one position.

use crate::op::glu::silu;

/// Σ weights\[taps − 1 − lag\] · inputs\[lag\]: a causal convolution of one channel. The newest input comes first, and its weight
/// last. Both slices have the same length.
pub fn causal_conv(inputs: &[f32], weights: &[f32]) -> f64 {
    assert_eq!(inputs.len(), weights.len(), "one weight for each input");
    let pairs = inputs.iter().zip(weights.iter().rev());
    pairs.map(|(&x, &w)| f64::from(x) * f64::from(w)).sum()
}

/// 1 / (1 + exp(−x)).
pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The factor of the state at each position: exp(−exp(a_log) · log(1 + exp(a + dt_bias))).
pub fn decay(a: f64, dt_bias: f64, a_log: f64) -> f64 {
    let x = a + dt_bias;
    // log(1 + exp(x)), without overflow.
    let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
    (-a_log.exp() * softplus).exp()
}

/// x · scale / √(Σx² + eps).
pub fn scale_to_length(x: &mut [f64], scale: f64, eps: f64) {
    let factor = scale / (x.iter().map(|v| v * v).sum::<f64>() + eps).sqrt();
    x.iter_mut().for_each(|v| *v *= factor);
}

/// S = decay · S; S += k (beta · (v − Sᵀk))ᵀ; out = Sᵀq.
///
/// `state` is \[k.len(), v.len()\], `q` as long as `k`, `out` as long as `v`.
pub fn step(state: &mut [f64], [q, k, v]: [&[f64]; 3], decay: f64, beta: f64, out: &mut [f64]) {
    assert!(
        q.len() == k.len() && out.len() == v.len() && state.len() == k.len() * v.len(),
        "the state is [key, value]"
    );
    state.iter_mut().for_each(|s| *s *= decay);
    let mut known = vec![0.0; v.len()];
    for (row, &k) in state.chunks_exact(v.len()).zip(k) {
        known.iter_mut().zip(row).for_each(|(known, s)| *known += k * s);
    }
    out.fill(0.0);
    for ((row, &k), &q) in state.chunks_exact_mut(v.len()).zip(k).zip(q) {
        for (((s, &v), known), out) in row.iter_mut().zip(v).zip(&known).zip(out.iter_mut()) {
            *s += k * beta * (v - known);
            *out += q * *s;
        }
    }
}

/// out = x / √(mean(x²) + eps) · weight · silu(z). All four slices have the same length.
pub fn gated_norm(x: &[f64], weight: &[f32], z: &[f32], eps: f64, out: &mut [f64]) {
    assert!(
        x.len() == weight.len() && x.len() == z.len() && x.len() == out.len(),
        "x, weight, z and out have the same length"
    );
    let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    let factor = 1.0 / (mean + eps).sqrt();
    for (((out, &x), &weight), &z) in out.iter_mut().zip(x).zip(weight).zip(z) {
        *out = x * factor * f64::from(weight) * silu(f64::from(z));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(found: f64, wanted: f64) {
        assert!((found - wanted).abs() < 1e-12, "expected {wanted}, found {found}");
    }

    #[test]
    fn the_newest_input_has_the_last_weight() {
        assert_eq!(causal_conv(&[2.0, 3.0, 5.0], &[100.0, 10.0, 1.0]), 532.0);
    }

    #[test]
    fn decay_and_beta_at_known_points() {
        // softplus(0) = ln 2, exp(a_log) = 2: a quarter is left.
        close(decay(1.5, -1.5, 2f64.ln()), 0.25);
        // softplus(ln 3) = ln 4.
        close(decay(3f64.ln(), 0.0, 0.0), 0.25);
        close(decay(-1e4, 0.0, 3.0), 1.0);
        close(decay(1e4, 0.0, 3.0), 0.0);
        close(sigmoid(3f64.ln()), 0.75);
    }

    #[test]
    fn lengths_are_set() {
        let mut x = [3.0, 4.0];
        scale_to_length(&mut x, 2.0, 0.0);
        close(x[0], 1.2);
        close(x[1], 1.6);
        // Squares 25, eps 11: the root is 6.
        let mut x = [3.0, 4.0];
        scale_to_length(&mut x, 6.0, 11.0);
        assert_eq!(x, [3.0, 4.0]);
    }

    #[test]
    fn a_key_reads_the_value_that_it_wrote() {
        // beta 1 and keys of length 1: a new value replaces the key's old one, and other keys keep theirs.
        let mut state = [0.0; 4];
        let mut out = [f64::NAN; 2];
        let (x, y) = ([1.0, 0.0], [0.0, 1.0]);
        step(&mut state, [&x, &x, &[5.0, 6.0]], 1.0, 1.0, &mut out);
        assert_eq!(out, [5.0, 6.0]);
        step(&mut state, [&x, &y, &[7.0, 8.0]], 1.0, 1.0, &mut out);
        assert_eq!(out, [5.0, 6.0]);
        step(&mut state, [&x, &x, &[1.0, 2.0]], 1.0, 1.0, &mut out);
        assert_eq!((out, state), ([1.0, 2.0], [1.0, 2.0, 7.0, 8.0]));
    }

    #[test]
    fn the_state_decays_before_it_is_corrected() {
        // 8 decays to 4; a quarter of the difference to 12 is added.
        let mut state = [8.0];
        let mut out = [f64::NAN];
        step(&mut state, [&[3.0], &[1.0], &[12.0]], 0.5, 0.25, &mut out);
        assert_eq!((state, out), ([6.0], [18.0]));
    }

    #[test]
    fn the_norm_is_gated_by_silu() {
        // Mean of squares 4, eps 0; silu(ln 3) = 3/4 ln 3.
        let mut out = [0.0; 2];
        let z = 3f32.ln();
        gated_norm(&[2.0, -2.0], &[3.0, 5.0], &[z, z], 0.0, &mut out);
        let gate = silu(f64::from(z));
        close(out[0], 3.0 * gate);
        close(out[1], -5.0 * gate);
    }
}

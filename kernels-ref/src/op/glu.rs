//! glu: the gated unit of a feed-forward block, and its activations.

/// x · sigmoid(x).
pub fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// The tanh form of gelu: x/2 · (1 + tanh(√(2/π) · (x + 0.044715·x³))).
pub fn gelu_tanh(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
    0.5 * x * (1.0 + inner.tanh())
}

/// out\[i\] = act(gate\[i\]) · up\[i\]. All three slices have the same length.
pub fn glu(gate: &[f32], up: &[f32], act: impl Fn(f64) -> f64, out: &mut [f64]) {
    assert!(
        gate.len() == up.len() && gate.len() == out.len(),
        "gate, up and out have the same length"
    );
    for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
        *out = act(f64::from(gate)) * f64::from(up);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silu_at_known_points() {
        assert_eq!(silu(0.0), 0.0);
        // sigmoid(ln 3) = 3/4.
        assert!((silu(3f64.ln()) - 0.75 * 3f64.ln()).abs() < 1e-15);
        assert!((silu(-(3f64.ln())) + 0.25 * 3f64.ln()).abs() < 1e-15);
        assert_eq!((silu(1e4), silu(-1e4)), (1e4, 0.0));
    }

    #[test]
    fn gelu_at_known_points() {
        assert_eq!(gelu_tanh(0.0), 0.0);
        // The odd part of gelu is x/2: gelu(x) − gelu(−x) = x.
        assert!((gelu_tanh(1.5) - gelu_tanh(-1.5) - 1.5).abs() < 1e-15);
        // tanh(√(2/π)·1.044715) = 0.68238…
        assert!((gelu_tanh(1.0) - 0.841_191_990_6).abs() < 1e-9);
        assert_eq!((gelu_tanh(50.0), gelu_tanh(-50.0)), (50.0, 0.0));
    }

    #[test]
    fn the_gate_is_activated_and_multiplied_with_up() {
        let mut out = [0.0; 2];
        glu(&[2.0, -1.0], &[10.0, 5.0], |x| x + 1.0, &mut out);
        assert_eq!(out, [30.0, 0.0]);
    }
}

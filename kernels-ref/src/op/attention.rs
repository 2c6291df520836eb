//! attention: what one query head reads from the positions it sees.

use std::ops::Range;

/// out = Σ softmax(cap(q·k(p)·scale)) v(p) over the visible `positions`, with cap(x) = softcap·tanh(x / softcap).
///
/// `q` has as many values as each `k`, `out` as many as each `v`. At least one position is visible.
pub fn attend<'a>(
    q: &[f64],
    positions: Range<usize>,
    k: impl Fn(usize) -> &'a [f32],
    v: impl Fn(usize) -> &'a [f32],
    scale: f64,
    softcap: Option<f64>,
    out: &mut [f64],
) {
    assert!(!positions.is_empty(), "wanted a visible position, found {positions:?}");
    let mut weights: Vec<f64> = positions
        .clone()
        .map(|position| {
            let key = k(position);
            assert_eq!(key.len(), q.len(), "a key is as long as the query");
            let score = q.iter().zip(key).map(|(&q, &k)| q * f64::from(k)).sum::<f64>() * scale;
            softcap.map_or(score, |cap| cap * (score / cap).tanh())
        })
        .collect();
    // The largest exponent becomes 0: no overflow, and the sum is at least 1. `f64::max` would lose a NaN, the sum keeps it.
    let largest = weights.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    weights
        .iter_mut()
        .for_each(|weight| *weight = (*weight - largest).exp());
    let total: f64 = weights.iter().sum();
    out.fill(0.0);
    for (position, weight) in positions.zip(weights) {
        let value = v(position);
        assert_eq!(value.len(), out.len(), "a value is as long as the result");
        for (out, &value) in out.iter_mut().zip(value) {
            *out += weight / total * f64::from(value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: [[f32; 2]; 3] = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]];
    const VALUES: [[f32; 2]; 3] = [[1.0, 0.0], [0.0, 2.0], [4.0, 4.0]];

    fn run(q: [f64; 2], len: usize, first: usize, scale: f64, softcap: Option<f64>) -> [f64; 2] {
        let mut out = [f64::NAN; 2];
        attend(&q, first..len, |p| &KEYS[p], |p| &VALUES[p], scale, softcap, &mut out);
        out
    }

    fn close(found: [f64; 2], wanted: [f64; 2]) {
        assert!(
            found.iter().zip(wanted).all(|(f, w)| (f - w).abs() < 1e-12),
            "wanted {wanted:?}, found {found:?}"
        );
    }

    #[test]
    fn scores_weigh_values() {
        // Scores ln 3 and 0: weights 3/4 and 1/4.
        close(run([3f64.ln(), 0.0], 2, 0, 1.0, None), [0.75, 0.5]);
        close(run([3f64.ln() * 2.0, 0.0], 2, 0, 0.5, None), [0.75, 0.5]);
    }

    #[test]
    fn positions_before_the_window_and_after_the_end_are_not_read() {
        close(run([5.0, -3.0], 2, 1, 1.0, None), [0.0, 2.0]);
        close(run([0.0, 0.0], 3, 1, 1.0, None), [2.0, 3.0]);
    }

    #[test]
    fn the_cap_bends_scores() {
        // cap·tanh(x/cap) with cap = 2, x = 2·atanh(ln(3)/2) is ln 3.
        let x = 2.0 * (3f64.ln() / 2.0).atanh();
        close(run([x, 0.0], 2, 0, 1.0, Some(2.0)), [0.75, 0.5]);
    }

    #[test]
    fn large_scores_do_not_overflow_and_nan_is_not_hidden() {
        close(run([1e6, 0.0], 2, 0, 1.0, None), [1.0, 0.0]);
        assert!(run([f64::NAN, 0.0], 2, 0, 1.0, None).iter().all(|v| v.is_nan()));
    }
}

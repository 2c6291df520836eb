//! attention: the result of one query head over the positions it sees.

use std::ops::Range;

/// The share of some positions in a head's result, before the division. Blocks of positions can be joined.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    /// The largest score.
    pub largest: f64,
    /// Σ exp(score − largest).
    pub total: f64,
    /// Σ exp(score − largest) · v, as many elements as a value.
    pub sum: Vec<f64>,
}

/// The [`Block`] of the visible `positions`, with score = cap(q·k(p)·scale) and cap(x) = softcap·tanh(x / softcap).
///
/// `q` has as many values as each `k`. At least one position is visible.
pub fn block<'a>(
    q: &[f64],
    positions: Range<usize>,
    k: impl Fn(usize) -> &'a [f32],
    v: impl Fn(usize) -> &'a [f32],
    scale: f64,
    softcap: Option<f64>,
) -> Block {
    assert!(
        !positions.is_empty(),
        "expected a visible position, found {positions:?}"
    );
    let scores: Vec<f64> = positions
        .clone()
        .map(|position| {
            let key = k(position);
            assert_eq!(key.len(), q.len(), "a key is as long as the query");
            let score = q.iter().zip(key).map(|(&q, &k)| q * f64::from(k)).sum::<f64>() * scale;
            softcap.map_or(score, |cap| cap * (score / cap).tanh())
        })
        .collect();
    // The largest exponent becomes 0, so nothing overflows and the sum is at least 1. `f64::max` loses a NaN, the sum keeps it.
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut block = Block {
        largest,
        total: 0.0,
        sum: vec![0.0; v(positions.start).len()],
    };
    for (position, score) in positions.zip(scores) {
        let weight = (score - largest).exp();
        let value = v(position);
        assert_eq!(value.len(), block.sum.len(), "all values have the same length");
        block.total += weight;
        for (sum, &value) in block.sum.iter_mut().zip(value) {
            *sum += weight * f64::from(value);
        }
    }
    block
}

/// out = Σ exp(largest_b − m) sum_b / Σ exp(largest_b − m) total_b over all blocks b, with m the largest score of all.
///
/// `out` is as long as each block's sum; there is at least one block.
pub fn join(blocks: &[Block], out: &mut [f64]) {
    assert!(!blocks.is_empty(), "expected a block");
    let largest = blocks.iter().map(|b| b.largest).fold(f64::NEG_INFINITY, f64::max);
    let factor = |b: &Block| (b.largest - largest).exp();
    let total: f64 = blocks.iter().map(|b| factor(b) * b.total).sum();
    out.fill(0.0);
    for b in blocks {
        assert_eq!(b.sum.len(), out.len(), "a block is as long as the result");
        for (out, &sum) in out.iter_mut().zip(&b.sum) {
            *out += factor(b) * sum / total;
        }
    }
}

/// out = Σ softmax(score) v(p) over the visible `positions`, with the scores of [`block`].
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
    join(&[block(q, positions, k, v, scale, softcap)], out);
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
            "expected {wanted:?}, found {found:?}"
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

    #[test]
    fn blocks_join_to_the_whole() {
        let q = [0.7, -1.9];
        let part = |positions| block(&q, positions, |p| &KEYS[p], |p| &VALUES[p], 3.0, None);
        let mut out = [f64::NAN; 2];
        join(&[part(0..1), part(1..3)], &mut out);
        close(out, run(q, 3, 0, 3.0, None));
    }

    #[test]
    fn a_block_is_not_divided() {
        // Scores 0 and ln 3: weights 1/3 and 1.
        let found = block(&[0.0, 3f64.ln()], 0..2, |p| &KEYS[p], |p| &VALUES[p], 1.0, None);
        assert!((found.largest - 3f64.ln()).abs() < 1e-15 && (found.total - 4.0 / 3.0).abs() < 1e-15);
        close([found.sum[0], found.sum[1]], [1.0 / 3.0, 2.0]);
    }
}

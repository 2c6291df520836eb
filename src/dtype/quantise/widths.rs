//! The bit widths of the rows of vbit: rows of larger amplitude get more bits, within a mean.

use super::rounding::absmax;
use super::weights::Weights;
use crate::dtype::payload::GROUP;
use crate::error::{Result, bail};

/// The widths a row can have, narrowest first.
pub const WIDTHS: [u8; 5] = [3, 4, 5, 6, 8];

/// The amplitude of every row: the root mean square of its groups' largest magnitudes. Rounding errors are in proportion to it.
pub fn amplitudes(weights: &Weights) -> Result<Vec<f64>> {
    let amplitude = |row: &[f32]| {
        let squares: f64 = row.chunks(GROUP).map(|group| f64::from(absmax(group)).powi(2)).sum();
        (squares / row.len().div_ceil(GROUP) as f64).sqrt()
    };
    let blocks = weights.map(|_, values| Ok(values.chunks_exact(weights.cols).map(amplitude).collect::<Vec<_>>()))?;
    Ok(blocks.concat())
}

/// Bit widths for rows of one length with these amplitudes. Their sum is at most `mean_bits` times the number of rows, and at
/// most one bit less, unless no row can use more: 8 bits are the most, and rows of zeros keep 3.
///
/// A row's squared rounding error is in proportion to (amplitude / (2^bits − 2))². Bits are given out greedily, one width at a
/// time, to the row where a bit lowers the sum of the errors most; among equal rows to the first.
///
/// Errors: `Usage` for a mean outside of 3..=8, `Parse` for an amplitude that is negative or not finite.
pub fn spread(amplitudes: &[f64], mean_bits: f64) -> Result<Vec<u8>> {
    let [least, .., most] = WIDTHS.map(f64::from);
    if !(least..=most).contains(&mean_bits) {
        bail!(Usage, "expected a mean of {least} to {most} bits, found {mean_bits}");
    }
    if let Some(row) = amplitudes.iter().position(|a| !a.is_finite() || *a < 0.0) {
        bail!(
            Parse,
            "row {row}: expected a finite amplitude of at least 0, found {}",
            amplitudes[row]
        );
    }
    let error = |bits: u8| (f64::from(bits).exp2() - 2.0).powi(-2);
    let steps: Vec<(u8, u8, f64)> = WIDTHS
        .windows(2)
        .map(|pair| {
            let gain = (error(pair[0]) - error(pair[1])) / f64::from(pair[1] - pair[0]);
            (pair[0], pair[1], gain.log2())
        })
        .collect();
    let gain = |amplitude: f64, step: usize| 2.0 * amplitude.log2() + steps[step].2;
    let mut candidates: Vec<(f64, usize, usize)> = Vec::with_capacity(amplitudes.len() * steps.len());
    for (row, &amplitude) in amplitudes.iter().enumerate().filter(|(_, amplitude)| **amplitude > 0.0) {
        candidates.extend((0..steps.len()).map(|step| (gain(amplitude, step), row, step)));
    }
    // Each further step of a row gains less, so the steps of a row keep their order.
    candidates.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2)));
    let mut widths = vec![WIDTHS[0]; amplitudes.len()];
    let mut left = ((mean_bits - least) * amplitudes.len() as f64).floor() as u64;
    for (_, row, step) in candidates {
        let (from, to, _) = steps[step];
        let cost = u64::from(to - from);
        if widths[row] == from && cost <= left {
            widths[row] = to;
            left -= cost;
        }
    }
    Ok(widths)
}

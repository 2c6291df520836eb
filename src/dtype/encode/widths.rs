//! How many bits each row of vbit gets: louder rows more, within a mean.

use super::vbit::WIDTHS;
use super::{GROUP, Source, absmax};
use crate::error::{Result, bail};

/// The loudness of every row: the root mean square of what its groups peak at, which is what their rounding error follows.
pub(super) fn amplitudes(source: &Source) -> Result<Vec<f64>> {
    let amplitude = |row: &[f32]| {
        let squares: f64 = row.chunks(GROUP).map(|group| f64::from(absmax(group)).powi(2)).sum();
        (squares / row.len().div_ceil(GROUP) as f64).sqrt()
    };
    let blocks = source.map(|_, values| Ok(values.chunks_exact(source.cols).map(amplitude).collect::<Vec<_>>()))?;
    Ok(blocks.concat())
}

/// Bits for rows of one length with these amplitudes, so that their mean is at most `mean_bits`, and less by at most one bit
/// in all, unless nothing is left that a row could use: 8 bits are the most, and rows of zeros stay at 3.
///
/// A row's rounding error is in proportion to (amplitude / (2^bits − 2))². Bits go, one width at a time, where they take
/// most off the sum of the errors: water over log2 of the amplitude. Of equal rows the first gets them.
///
/// Errors: `Usage` for a mean outside of 3..=8, `Parse` for an amplitude that is negative or not finite.
pub fn spread(amplitudes: &[f64], mean_bits: f64) -> Result<Vec<u8>> {
    let [least, .., most] = WIDTHS.map(f64::from);
    if !(least..=most).contains(&mean_bits) {
        bail!(Usage, "wanted a mean of {least} to {most} bits, found {mean_bits}");
    }
    if let Some(row) = amplitudes.iter().position(|a| !a.is_finite() || *a < 0.0) {
        bail!(Parse, "row {row}: wanted an amplitude, found {}", amplitudes[row]);
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
    let mut wishes: Vec<(f64, usize, usize)> = Vec::with_capacity(amplitudes.len() * steps.len());
    for (row, &amplitude) in amplitudes.iter().enumerate().filter(|(_, amplitude)| **amplitude > 0.0) {
        wishes.extend((0..steps.len()).map(|step| (gain(amplitude, step), row, step)));
    }
    // A row's steps gain less and less, so that they keep their order.
    wishes.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2)));
    let mut widths = vec![WIDTHS[0]; amplitudes.len()];
    let mut left = ((mean_bits - least) * amplitudes.len() as f64).floor() as u64;
    for (_, row, step) in wishes {
        let (from, to, _) = steps[step];
        let cost = u64::from(to - from);
        if widths[row] == from && cost <= left {
            widths[row] = to;
            left -= cost;
        }
    }
    Ok(widths)
}

//! The choice of outliers, the weights that an overlay keeps: those with the largest magnitude, or the largest product of
//! magnitude and root mean square of the column's input.

use super::weights::Weights;
use crate::error::{Result, bail};
use std::sync::{Mutex, PoisonError};

/// The score of a weight, |weight| · rms\[col\].
pub struct Score<'a> {
    /// The root mean square of each column's input; `None`: 1 for all.
    rms: Option<&'a [f32]>,
}

/// The score that every outlier exceeds.
pub struct Threshold<'a> {
    score: &'a Score<'a>,
    least: f32,
}

impl Threshold<'_> {
    /// Whether this weight of this column is an outlier.
    pub fn exceeded(&self, weight: f32, col: usize) -> bool {
        self.score.of(weight, col) > self.least
    }
}

impl<'a> Score<'a> {
    /// Errors: `Parse` unless there is one finite, non-negative number per column.
    pub fn new(rms: Option<&'a [f32]>, cols: usize) -> Result<Score<'a>> {
        if let Some(rms) = rms {
            if rms.len() != cols {
                bail!(
                    Parse,
                    "expected the root mean square of {cols} inputs, found {}",
                    rms.len()
                );
            }
            if let Some(col) = rms.iter().position(|value| !value.is_finite() || *value < 0.0) {
                bail!(Parse, "col {col}: expected a root mean square, found {}", rms[col]);
            }
        }
        Ok(Score { rms })
    }

    fn of(&self, weight: f32, col: usize) -> f32 {
        weight.abs() * self.rms.and_then(|rms| rms.get(col)).copied().unwrap_or(1.0)
    }

    /// The least threshold that at most `fraction` of the weights exceed. Weights of equal score are all outliers or none is.
    ///
    /// Errors: `Usage` for a fraction outside of 0..=1.
    pub fn threshold(&'a self, weights: &Weights, fraction: f64) -> Result<Threshold<'a>> {
        if !(0.0..=1.0).contains(&fraction) {
            bail!(Usage, "expected a fraction of outliers from 0 to 1, found {fraction}");
        }
        let allowed = (weights.rows as f64 * weights.cols as f64 * fraction).floor() as u64;
        // Non-negative floats are ordered like their bits, so two histograms find the threshold: one of the upper 16 bits, one of
        // the lower 16 bits within the bin found.
        let upper = self.count(weights, |bits| Some(bits >> 16))?;
        let (upper, left) = cut(&upper, allowed);
        let lower = self.count(weights, |bits| (bits >> 16 == upper).then_some(bits & 0xFFFF))?;
        let (lower, _) = cut(&lower, left);
        let least = f32::from_bits(upper << 16 | lower);
        Ok(Threshold { score: self, least })
    }

    /// A histogram of the scores with 2^16 bins.
    fn count(&self, weights: &Weights, bin: impl Fn(u32) -> Option<u32> + Sync) -> Result<Vec<u64>> {
        let all = Mutex::new(vec![0u64; 1 << 16]);
        weights.map(|_, values| {
            let mut bins = vec![0u32; 1 << 16];
            for row in values.chunks_exact(weights.cols) {
                let scores = row.iter().enumerate().map(|(col, &weight)| self.of(weight, col));
                for bin in scores.filter_map(|score| bin(score.to_bits())) {
                    bins[bin as usize] += 1;
                }
            }
            let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
            all.iter_mut().zip(bins).for_each(|(all, bin)| *all += u64::from(bin));
            Ok(())
        })?;
        Ok(all.into_inner().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The highest bin that holds weights which are not outliers, because with it more than `allowed` would be, and how many of it
/// may still be outliers.
fn cut(bins: &[u64], allowed: u64) -> (u32, u64) {
    let mut left = allowed;
    for (bin, &count) in bins.iter().enumerate().rev() {
        if count > left {
            return (bin as u32, left);
        }
        left -= count;
    }
    (0, left)
}

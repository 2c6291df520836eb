//! Which weights an overlay keeps: those whose magnitude, or magnitude times what their column is multiplied by, is largest.

use super::Source;
use crate::error::{Result, bail};
use std::sync::{Mutex, PoisonError};

/// What weights are compared by.
pub struct Score<'a> {
    /// The root mean square of what each column is multiplied by; `None`: the same for all.
    rms: Option<&'a [f32]>,
}

/// What an outlier exceeds.
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
    /// Errors: `Parse` unless there is one finite, non-negative number a column.
    pub fn new(rms: Option<&'a [f32]>, cols: usize) -> Result<Score<'a>> {
        if let Some(rms) = rms {
            if rms.len() != cols {
                bail!(
                    Parse,
                    "wanted the root mean square of {cols} inputs, found {}",
                    rms.len()
                );
            }
            if let Some(col) = rms.iter().position(|value| !value.is_finite() || *value < 0.0) {
                bail!(Parse, "col {col}: wanted a root mean square, found {}", rms[col]);
            }
        }
        Ok(Score { rms })
    }

    fn of(&self, weight: f32, col: usize) -> f32 {
        weight.abs() * self.rms.and_then(|rms| rms.get(col)).copied().unwrap_or(1.0)
    }

    /// The least threshold that at most `fraction` of the weights exceed. Equal scores are all outliers or none.
    ///
    /// Errors: `Usage` for a fraction outside of 0..=1.
    pub fn threshold(&'a self, source: &Source, fraction: f64) -> Result<Threshold<'a>> {
        if !(0.0..=1.0).contains(&fraction) {
            bail!(Usage, "wanted a fraction of outliers from 0 to 1, found {fraction}");
        }
        let allowed = (source.rows as f64 * source.cols as f64 * fraction).floor() as u64;
        // The bits of numbers from 0 on are in the order of the numbers: first the upper half of the bits, then the lower.
        let upper = self.count(source, |bits| Some(bits >> 16))?;
        let (upper, left) = cut(&upper, allowed);
        let lower = self.count(source, |bits| (bits >> 16 == upper).then_some(bits & 0xFFFF))?;
        let (lower, _) = cut(&lower, left);
        let least = f32::from_bits(upper << 16 | lower);
        Ok(Threshold { score: self, least })
    }

    /// How many scores fall into each of 2^16 bins.
    fn count(&self, source: &Source, bin: impl Fn(u32) -> Option<u32> + Sync) -> Result<Vec<u64>> {
        let all = Mutex::new(vec![0u64; 1 << 16]);
        source.map(|_, values| {
            let mut bins = vec![0u32; 1 << 16];
            for row in values.chunks_exact(source.cols) {
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

/// The highest bin that must stay, since all in it and above are more than `allowed`, and how many of it may go.
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

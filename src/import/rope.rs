//! Rotary scaling: from the schemes of published models to the container's two forms, divisors and YaRN.
//!
//! The importers find the numbers.

use crate::error::{Result, bail};
use crate::format::{Arch, Yarn};

/// Llama-3 scaling: long wavelengths are multiplied by `factor`, short ones are unchanged, those between are interpolated.
#[derive(Clone, Copy, Debug)]
pub(super) struct Llama3 {
    pub factor: f64,
    pub low_freq_factor: f64,
    pub high_freq_factor: f64,
    pub original_max_position_embeddings: f64,
}

impl Llama3 {
    /// The divisor of each of `count` frequencies θ^(−i/count).
    ///
    /// With wavelength w = 2π/f: w > original/low → factor; w < original/high → 1; between, with
    /// s = (original/w − low)/(high − low), the scaled frequency is f·((1−s)/factor + s).
    pub fn divisors(&self, theta: f64, count: usize) -> Result<Vec<f64>> {
        let Llama3 {
            factor,
            low_freq_factor: low,
            high_freq_factor: high,
            original_max_position_embeddings: original,
        } = *self;
        let positive = [factor, low, high, original]
            .iter()
            .all(|value| value.is_finite() && *value > 0.0);
        if !positive || high <= low {
            bail!(
                UnsupportedModel,
                "llama3 rope scaling with factor {factor}, low {low}, high {high}, original {original}"
            );
        }
        let divisor = |i: usize| {
            let wavelength = 2.0 * std::f64::consts::PI * theta.powf(i as f64 / count as f64);
            if wavelength > original / low {
                factor
            } else if wavelength < original / high {
                1.0
            } else {
                let s = (original / wavelength - low) / (high - low);
                1.0 / ((1.0 - s) / factor + s)
            }
        };
        Ok((0..count).map(divisor).collect())
    }
}

/// Linear scaling: every frequency divided by `factor`.
pub(super) fn linear(factor: f64, count: usize) -> Result<Vec<f64>> {
    if !(factor.is_finite() && factor > 0.0) {
        bail!(
            UnsupportedModel,
            "linear rope scaling by {factor}, expected a positive number"
        );
    }
    Ok(vec![factor; count])
}

/// YaRN's default factor of cos and sin: 0.1·weight·ln(factor) + 1, and 1 for factors up to 1.
pub fn yarn_attention(factor: f64, weight: f64) -> f64 {
    if factor <= 1.0 {
        1.0
    } else {
        0.1 * weight * factor.ln() + 1.0
    }
}

/// LongRoPE's default factor of cos and sin: √(1 + ln(factor)/ln(original)), and 1 for factors up to 1.
pub(super) fn long_attention(factor: f64, original: f64) -> Result<f64> {
    if !(factor.is_finite() && original > 1.0) {
        bail!(
            UnsupportedModel,
            "longrope scaling by {factor} of a context of {original} tokens"
        );
    }
    Ok(if factor <= 1.0 {
        1.0
    } else {
        (1.0 + factor.ln() / original.ln()).sqrt()
    })
}

/// Describes LongRoPE within its original context: the short divisors, and the factor of cos and sin, which the header can
/// only hold in a YaRN that does not scale.
pub(super) fn set_long(arch: &mut Arch, short: Vec<f64>, original: usize, attention: f64, notes: &mut Vec<String>) {
    arch.rope_freq_factors = Some(short);
    arch.yarn = Some(Yarn {
        factor: 1.0,
        original_max_position_embeddings: original,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: Some(attention),
    });
    if let Some(trained) = arch.max_position_embeddings.filter(|&trained| trained > original) {
        arch.max_position_embeddings = Some(original);
        notes.push(format!(
            "the context ends at {original} of {trained} tokens: the rotation of longer contexts is not converted"
        ));
    }
}

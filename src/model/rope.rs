//! Rotary frequencies from the header's constants.

use super::network::Rope;
use crate::error::{Result, bail};
use crate::source::Arch;

/// The frequencies of layers without a window.
///
/// `theta^(-2i/rot)`, divided by `rope_freq_factors[i]`; with YaRN blended between the plain and the interpolated frequency
/// (Peng et al., "YaRN", section 3.2, with the correction range floored and ceiled as in transformers).
pub fn global(arch: &Arch) -> Result<Rope> {
    let rot = rotated(arch, arch.partial_rotary_factor)?;
    let mut inv_freq = plain(arch.rope_theta, rot);
    if let Some(factors) = &arch.rope_freq_factors {
        if factors.len() != inv_freq.len() {
            bail!(
                Parse,
                "arch.rope_freq_factors has {} entries, expected {} rotated pairs",
                factors.len(),
                inv_freq.len()
            );
        }
        inv_freq
            .iter_mut()
            .zip(factors)
            .for_each(|(freq, factor)| *freq /= factor);
    }
    let mut factor = 1.0;
    if let Some(yarn) = &arch.yarn {
        let turns = |beta: f64| {
            let original = yarn.original_max_position_embeddings as f64;
            rot as f64 * (original / (beta * std::f64::consts::TAU)).ln() / (2.0 * arch.rope_theta.ln())
        };
        let low = turns(yarn.beta_fast).floor().max(0.0);
        let high = turns(yarn.beta_slow).ceil().min(rot as f64 - 1.0);
        let span = if high == low { 0.001 } else { high - low };
        for (i, freq) in inv_freq.iter_mut().enumerate() {
            let interpolated = ((i as f64 - low) / span).clamp(0.0, 1.0);
            *freq = *freq / yarn.factor * interpolated + *freq * (1.0 - interpolated);
        }
        factor = yarn.attention_factor.unwrap_or(0.1 * yarn.factor.ln() + 1.0);
    }
    Ok(Rope {
        inv_freq: inv_freq.iter().map(|&freq| freq as f32).collect(),
        factor: factor as f32,
    })
}

/// The longest context for which the header's rotation is correct, `None` = any.
///
/// LongRoPE has two lists of divisors, and a header holds only the one for short contexts, with a YaRN of factor 1 for the
/// factor of cos and sin. Longer contexts would need the other list, for all positions.
pub fn ends(arch: &Arch) -> Option<usize> {
    let short = arch.yarn.as_ref().filter(|yarn| yarn.factor == 1.0);
    short
        .filter(|_| arch.rope_freq_factors.is_some())
        .map(|yarn| yarn.original_max_position_embeddings)
}

/// The frequencies of layers with a window: a base of their own, and no scaling.
pub fn local(arch: &Arch) -> Result<Rope> {
    let share = arch.local_partial_rotary_factor.unwrap_or(arch.partial_rotary_factor);
    let rot = rotated(arch, share)?;
    let theta = arch.rope_local_base_freq.unwrap_or(arch.rope_theta);
    Ok(Rope {
        inv_freq: plain(theta, rot).iter().map(|&freq| freq as f32).collect(),
        factor: 1.0,
    })
}

fn plain(theta: f64, rot: usize) -> Vec<f64> {
    (0..rot / 2).map(|i| theta.powf(-2.0 * i as f64 / rot as f64)).collect()
}

/// Rotated elements of a head. The kernels rotate whole vectors of 4 pairs.
fn rotated(arch: &Arch, share: f64) -> Result<usize> {
    let rot = (arch.head_dim as f64 * share) as usize;
    if rot == 0 || !rot.is_multiple_of(8) || !arch.head_dim.is_multiple_of(8) || arch.head_dim > 256 {
        bail!(
            UnsupportedModel,
            "head_dim {} of which {rot} elements are rotated: expected multiples of 8, at most 256",
            arch.head_dim
        );
    }
    Ok(rot)
}

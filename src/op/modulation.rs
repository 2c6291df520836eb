//! Scales and gates that are computed at run time, for the host implementations of operators that read them.

use super::host::Operands;
use crate::error::Result;
use cmf_kernels_ref::op::rms_norm::rms_norm;

/// 1 + the scales from a vector of `mods` on.
pub(super) fn scales(o: &Operands, scale_at: u32, cols: usize) -> Result<Vec<f64>> {
    let scales = o.values("mods", scale_at as usize * 4, cols)?;
    Ok(scales.iter().map(|scale| 1.0 + scale).collect())
}

/// y = RMSNorm(x) · scales.
pub(super) fn modulated(x: &[f32], g: &[f32], eps: f32, scales: &[f64], y: &mut [f64]) {
    rms_norm(x, g, f64::from(eps), y);
    y.iter_mut().zip(scales).for_each(|(y, scale)| *y *= scale);
}

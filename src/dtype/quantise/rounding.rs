//! Rounding of weights and scales.

use half::f16;

/// The smallest f16 that is at least `x`, for x ≥ 0; infinite where there is none.
///
/// A scale rounded like this never clips the largest weight, even where f16 is coarse.
pub fn half_up(x: f64) -> f16 {
    let nearest = f16::from_f64(x);
    if nearest.to_f64() < x {
        f16::from_bits(nearest.to_bits() + 1)
    } else {
        nearest
    }
}

/// The nearest integer, for |x| < 2^22; ties to even. Unlike `f32::round_ties_even` it is two additions on any CPU.
pub fn round(x: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0; // 1.5 · 2^23: the last bit of the sum is worth 1.
    (x + SHIFT) - SHIFT
}

/// The largest magnitude.
pub fn absmax(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |max, value| max.max(value.abs()))
}

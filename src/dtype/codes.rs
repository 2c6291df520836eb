//! The codes of a group, as every type packs them in its own way.

use super::payload::GROUP;
use crate::error::{Result, bail};
use half::f16;

/// The codes of a group, and the scale that multiplies them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Codes {
    pub scale: f16,
    pub codes: [i16; GROUP],
}

/// One row of a payload, in parts.
#[derive(Default)]
pub(super) struct Row {
    /// Codes, in types of tiles with their scales.
    pub packed: Vec<u8>,
    /// Scales, in types that have them in a section of their own.
    pub scales: Vec<u8>,
    /// Entries of the overlay.
    pub overlay: Vec<u8>,
}

impl Codes {
    /// The codes of weights whose blocks have these scales. `None` if the scales differ, or if a weight is not the product of a
    /// small integer and its scale, bit for bit.
    pub fn of(weights: &[f32; GROUP], scales: &[f32; GROUP]) -> Option<Codes> {
        let scale = scales[0];
        let same = scales.iter().all(|other| other.to_bits() == scale.to_bits());
        let half = f16::from_f32(scale);
        if !same || half.to_f32().to_bits() != scale.to_bits() {
            return None;
        }
        let mut codes = [0; GROUP];
        for (code, weight) in codes.iter_mut().zip(weights) {
            *code = match scale == 0.0 {
                // The sign of a zero is that of its code.
                true => -i16::from(weight.is_sign_negative() != scale.is_sign_negative()),
                false => (weight / scale).round() as i16,
            };
            if (f32::from(*code) * scale).to_bits() != weight.to_bits() {
                return None;
            }
        }
        Some(Codes { scale: half, codes })
    }
}

/// The codes plus `zero`, as a type of `bits` bits stores them. Errors: `UnsupportedTensorType`.
pub(super) fn unsigned(codes: &[i16; GROUP], zero: i16, bits: u32) -> Result<[u8; GROUP]> {
    let mut stored = [0; GROUP];
    for (stored, &code) in stored.iter_mut().zip(codes) {
        let value = u8::try_from(i32::from(code) + i32::from(zero));
        match value.ok().filter(|&value| u32::from(value) < 1 << bits) {
            Some(value) => *stored = value,
            None => bail!(UnsupportedTensorType, "code {code} does not fit {bits} bits"),
        }
    }
    Ok(stored)
}

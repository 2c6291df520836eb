//! Encoders of the types that store each weight for itself: f32, f16, bf16.

use super::Source;
use crate::error::{Kind, Result};

/// `[f32 rows·cols]`.
pub fn f32(source: &Source, payload: &mut [u8]) -> Result<()> {
    each(source, payload, |value| Some(value.to_le_bytes()), "")
}

/// `[f16 rows·cols]`, rounded to nearest. Errors: a magnitude above 65504.
pub fn f16(source: &Source, payload: &mut [u8]) -> Result<()> {
    let encode = |value: f32| {
        let fits = value.abs() <= half::f16::MAX.to_f32();
        fits.then(|| half::f16::from_f32(value).to_le_bytes())
    };
    each(source, payload, encode, "wanted a magnitude up to 65504 for f16")
}

/// `[bf16 rows·cols]`, rounded to nearest. Errors: a magnitude that rounds to infinity.
pub fn bf16(source: &Source, payload: &mut [u8]) -> Result<()> {
    let encode = |value: f32| {
        let rounded = half::bf16::from_f32(value);
        rounded.is_finite().then(|| rounded.to_le_bytes())
    };
    each(source, payload, encode, "wanted a magnitude that bf16 can hold")
}

fn each<const BYTES: usize>(
    source: &Source,
    payload: &mut [u8],
    encode: impl Fn(f32) -> Option<[u8; BYTES]> + Sync,
    wanted: &str,
) -> Result<()> {
    let filled = source.fill(
        payload,
        |rows| [rows * source.cols * BYTES],
        |first, values, [out]| {
            for (at, (&value, out)) in values.iter().zip(out.as_chunks_mut().0).enumerate() {
                *out = encode(value)
                    .ok_or_else(|| source.refuse(Kind::UnsupportedTensorType, first, at, wanted, value))?;
            }
            Ok(())
        },
    );
    filled.map(drop)
}

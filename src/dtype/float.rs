//! f32, f16 and bf16: one value per weight, little-endian; and u8, the bytes of a text.

use super::payload::Section;
use super::planes::{Planes, Repack};
use super::quantise::Weights;
use super::spec::{Encode, Shapes, Spec, Tail};
use crate::error::{Kind, Result, bail};
use cmf_kernels_ref::dtype::float;

pub const F32: Spec = Spec {
    id: Some(0),
    gguf: Some(0),
    name: "f32",
    quant: "f32",
    code_bits: 32,
    shapes: Shapes::Any,
    max_cols: u64::MAX,
    sections: &[Section::Weights(4)],
    tail: Tail::NONE,
    decoder: float::f32,
    encode: Encode::Exact(|weights, payload| encode(weights, payload, |value| Some(value.to_le_bytes()), "")),
    planes: |_| Ok(Planes::F32),
    repack: Repack::COPY,
    verify: |_| Ok(()),
    random: Some(|payload, _, deviation, random| {
        uniform(payload, deviation, random, |value| (value as f32).to_le_bytes());
    }),
};

pub const F16: Spec = Spec {
    id: Some(1),
    gguf: Some(1),
    name: "f16",
    quant: "f16",
    code_bits: 16,
    sections: &[Section::Weights(2)],
    decoder: float::f16,
    encode: Encode::Exact(|weights, payload| {
        let round = |value: f32| {
            let fits = value.abs() <= half::f16::MAX.to_f32();
            fits.then(|| half::f16::from_f32(value).to_le_bytes())
        };
        encode(weights, payload, round, "expected a magnitude up to 65504 for f16")
    }),
    planes: |_| Ok(Planes::F16),
    random: Some(|payload, _, deviation, random| {
        uniform(payload, deviation, random, |value| {
            half::f16::from_f64(value).to_le_bytes()
        });
    }),
    ..F32
};

pub const BF16: Spec = Spec {
    id: Some(2),
    gguf: Some(30),
    name: "bf16",
    quant: "bf16",
    code_bits: 16,
    sections: &[Section::Weights(2)],
    decoder: float::bf16,
    encode: Encode::Exact(|weights, payload| {
        let round = |value: f32| {
            let rounded = half::bf16::from_f32(value);
            rounded.is_finite().then(|| rounded.to_le_bytes())
        };
        encode(weights, payload, round, "expected a magnitude that bf16 can hold")
    }),
    planes: |_| Ok(Planes::Bf16),
    random: Some(|payload, _, deviation, random| {
        uniform(payload, deviation, random, |value| {
            half::bf16::from_f64(value).to_le_bytes()
        });
    }),
    ..F32
};

pub const U8: Spec = Spec {
    id: Some(6),
    gguf: None,
    name: "u8",
    quant: "",
    code_bits: 8,
    sections: &[Section::Weights(1)],
    decoder: float::u8,
    encode: Encode::Never,
    planes: |_| bail!(UnsupportedTensorType, "u8 holds bytes of a text, not weights"),
    random: None,
    ..F32
};

/// Writes each weight as `round` gives it. Errors: `UnsupportedTensorType`, with the text `wanted`, where that is `None`.
fn encode<const BYTES: usize>(
    weights: &Weights,
    payload: &mut [u8],
    round: impl Fn(f32) -> Option<[u8; BYTES]> + Sync,
    wanted: &str,
) -> Result<()> {
    let filled = weights.fill(
        payload,
        |rows| [rows * weights.cols * BYTES],
        |first, values, [out]| {
            for (at, (&value, out)) in values.iter().zip(out.as_chunks_mut().0).enumerate() {
                *out = round(value)
                    .ok_or_else(|| weights.refuse(Kind::UnsupportedTensorType, first, at, wanted, value))?;
            }
            Ok(())
        },
    );
    filled.map(drop)
}

/// Uniform weights: the standard deviation of 3.4 · (0..1 − 0.5) is about 1.
fn uniform<const BYTES: usize>(
    payload: &mut [u8],
    deviation: f64,
    random: &dyn Fn(&mut [u8]),
    round: impl Fn(f64) -> [u8; BYTES],
) {
    random(payload);
    for value in payload.as_chunks_mut::<BYTES>().0 {
        let unit = f64::from(u16::from_le_bytes([value[0], value[1]])) / 65536.0 - 0.5;
        *value = round(unit * 3.4 * deviation);
    }
}

//! The tensor types of GGUF: names, sizes and decoders.
//!
//! A block of 32 weights is `[header][codes]`. In the 4- and 5-bit types weight j < 16 is the low nibble of byte j and weight
//! j + 16 the high nibble; the fifth bit of weight j is bit j of a 32-bit word. Blocks of 256 weights are in `superblocks`.

use super::superblocks::{self, half_at};
use crate::error::{Result, bail};
use half::bf16;

/// A readable tensor type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, non_camel_case_types, reason = "the names are the format's own")]
pub enum BlockType {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
}

/// The readable types with their ids.
const READABLE: [(u32, BlockType); 15] = [
    (0, BlockType::F32),
    (1, BlockType::F16),
    (30, BlockType::Bf16),
    (2, BlockType::Q4_0),
    (3, BlockType::Q4_1),
    (6, BlockType::Q5_0),
    (7, BlockType::Q5_1),
    (8, BlockType::Q8_0),
    (10, BlockType::Q2_K),
    (11, BlockType::Q3_K),
    (12, BlockType::Q4_K),
    (13, BlockType::Q5_K),
    (14, BlockType::Q6_K),
    (20, BlockType::IQ4_NL),
    (23, BlockType::IQ4_XS),
];

/// An id that two incompatible layouts use.
const Q2_0: u32 = 42;

/// Names of all ids in use, for error texts.
const NAMES: [(u32, &str); 37] = [
    (0, "F32"),
    (1, "F16"),
    (2, "Q4_0"),
    (3, "Q4_1"),
    (6, "Q5_0"),
    (7, "Q5_1"),
    (8, "Q8_0"),
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (12, "Q4_K"),
    (13, "Q5_K"),
    (14, "Q6_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (30, "BF16"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
    (41, "Q1_0"),
    (Q2_0, "Q2_0"),
    (142, "PQ2_0"),
    (143, "PTQ1_0"),
];

impl BlockType {
    /// The type of `id`. Errors: `UnsupportedTensorType` with `tensor` and the type's name and number.
    pub fn from_id(id: u32, tensor: &str) -> Result<BlockType> {
        if let Some(&(_, kind)) = READABLE.iter().find(|&&(known, _)| known == id) {
            return Ok(kind);
        }
        let name = NAMES
            .iter()
            .find(|(known, _)| *known == id)
            .map_or("an unknown type", |(_, name)| name);
        let hint = match id {
            Q2_0 => "; two layouts use this id, with blocks of 64 and of 128 weights, and the file does not say which",
            _ => "",
        };
        let readable = READABLE.map(|(_, kind)| format!("{kind:?}").to_uppercase());
        bail!(
            UnsupportedTensorType,
            "tensor '{tensor}' has type {id} ({name}); readable are {}{hint}",
            readable.join(", ")
        );
    }

    /// Weights and bytes of a block.
    pub fn block(self) -> (usize, usize) {
        match self {
            BlockType::F32 => (1, 4),
            BlockType::F16 | BlockType::Bf16 => (1, 2),
            BlockType::Q4_0 => (32, 18),
            BlockType::Q4_1 => (32, 20),
            BlockType::Q5_0 => (32, 22),
            BlockType::Q5_1 => (32, 24),
            BlockType::Q8_0 => (32, 34),
            BlockType::Q2_K => (superblocks::WEIGHTS, 84),
            BlockType::Q3_K => (superblocks::WEIGHTS, 110),
            BlockType::Q4_K => (superblocks::WEIGHTS, 144),
            BlockType::Q5_K => (superblocks::WEIGHTS, 176),
            BlockType::Q6_K => (superblocks::WEIGHTS, 210),
            BlockType::IQ4_NL => (32, 18),
            BlockType::IQ4_XS => (superblocks::WEIGHTS, 136),
        }
    }

    /// Writes the values of `bytes` to `out`. Errors: `Bounds` unless `bytes` are exactly the blocks of `out`.
    pub fn decode(self, bytes: &[u8], out: &mut [f32]) -> Result<()> {
        let (weights, size) = self.block();
        if !out.len().is_multiple_of(weights) || Some(bytes.len()) != (out.len() / weights).checked_mul(size) {
            bail!(
                Bounds,
                "{self:?}: {} bytes do not hold {} weights",
                bytes.len(),
                out.len()
            );
        }
        let blocks = bytes.chunks_exact(size).zip(out.chunks_exact_mut(weights));
        match self {
            BlockType::F32 => blocks.for_each(|(b, out)| out[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
            BlockType::F16 => blocks.for_each(|(b, out)| out[0] = half_at(b, 0)),
            BlockType::Bf16 => blocks.for_each(|(b, out)| out[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32()),
            BlockType::Q4_0 => blocks.for_each(|(b, out)| {
                let scale = half_at(b, 0);
                nibbles(&b[2..], out, |code, _| (code as f32 - 8.0) * scale);
            }),
            BlockType::Q4_1 => blocks.for_each(|(b, out)| {
                let (scale, min) = (half_at(b, 0), half_at(b, 2));
                nibbles(&b[4..], out, |code, _| code as f32 * scale + min);
            }),
            BlockType::Q5_0 => blocks.for_each(|(b, out)| {
                let (scale, high) = (half_at(b, 0), word_at(b, 2));
                nibbles(&b[6..], out, |code, j| {
                    ((code | (high >> j & 1) << 4) as f32 - 16.0) * scale
                });
            }),
            BlockType::Q5_1 => blocks.for_each(|(b, out)| {
                let (scale, min, high) = (half_at(b, 0), half_at(b, 2), word_at(b, 4));
                nibbles(&b[8..], out, |code, j| {
                    (code | (high >> j & 1) << 4) as f32 * scale + min
                });
            }),
            BlockType::Q8_0 => blocks.for_each(|(b, out)| {
                let scale = half_at(b, 0);
                for (value, &code) in out.iter_mut().zip(&b[2..]) {
                    *value = f32::from(code.cast_signed()) * scale;
                }
            }),
            BlockType::Q2_K => blocks.for_each(|(b, out)| superblocks::q2_k(b, out)),
            BlockType::Q3_K => blocks.for_each(|(b, out)| superblocks::q3_k(b, out)),
            BlockType::Q4_K => blocks.for_each(|(b, out)| superblocks::q4_k(b, out)),
            BlockType::Q5_K => blocks.for_each(|(b, out)| superblocks::q5_k(b, out)),
            BlockType::Q6_K => blocks.for_each(|(b, out)| superblocks::q6_k(b, out)),
            BlockType::IQ4_NL => blocks.for_each(|(b, out)| superblocks::nonlinear(&b[2..], half_at(b, 0), out)),
            BlockType::IQ4_XS => blocks.for_each(|(b, out)| superblocks::iq4_xs(b, out)),
        }
        Ok(())
    }
}

fn word_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// Calls `value(code, j)` for the 32 weights of a block with 16 bytes of nibbles.
fn nibbles(codes: &[u8], out: &mut [f32], value: impl Fn(u32, usize) -> f32) {
    for (j, &byte) in codes.iter().enumerate() {
        out[j] = value(u32::from(byte & 15), j);
        out[j + 16] = value(u32::from(byte >> 4), j + 16);
    }
}

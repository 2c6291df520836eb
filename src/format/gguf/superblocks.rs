//! Decoders of the GGUF types with blocks of 256 weights, and of the non-linear 4-bit types.
//!
//! A block has one or two f16 scales, small integers that scale groups of 16 or 32 weights relative to them, and codes. Every
//! function takes the bytes and the weights of one block; the caller has checked both lengths. The order of operations is
//! that of the reference package `gguf`, so that values are bit-identical.

use half::f16;

/// Weights of a block.
pub(super) const WEIGHTS: usize = 256;

/// The values of the 16 codes of the non-linear types.
const NONLINEAR: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// 16 × (4-bit scale, 4-bit minimum), 64 bytes of codes, f16 scale, f16 minimum. Groups of 16. Each half of 128 weights has
/// 32 bytes of codes; weight w has bits 2·(w / 32) and up of byte w mod 32.
pub(super) fn q2_k(block: &[u8], out: &mut [f32]) {
    let (scale, min) = (half_at(block, 80), half_at(block, 82));
    let (groups, codes) = (&block[..16], &block[16..80]);
    for (group, (out, &packed)) in out.chunks_exact_mut(16).zip(groups).enumerate() {
        let (scale, min) = (scale * f32::from(packed & 15), min * f32::from(packed >> 4));
        for (value, code) in out.iter_mut().zip(pairs(codes, group)) {
            *value = scale * f32::from(code) - min;
        }
    }
}

/// 32 bytes of third bits, 64 bytes of low bits, 16 6-bit scales in 12 bytes, f16 scale. Groups and low bits as in [`q2_k`];
/// the third bit of weight w is bit w / 32 of byte w mod 32. If it is clear, 4 is subtracted.
pub(super) fn q3_k(block: &[u8], out: &mut [f32]) {
    let scale = half_at(block, 108);
    let (high, codes, scales) = (&block[..32], &block[32..96], &block[96..108]);
    for (group, out) in out.chunks_exact_mut(16).enumerate() {
        let low = scales[group % 8] >> (4 * (group / 8)) & 15;
        let top = scales[8 + group % 4] >> (2 * (group / 4)) & 3;
        let scale = scale * (f32::from(low | top << 4) - 32.0);
        let bits = high[group % 2 * 16..].iter().map(|byte| byte >> (group / 2) & 1);
        for ((value, code), bit) in out.iter_mut().zip(pairs(codes, group)).zip(bits) {
            *value = scale * (f32::from(code) - f32::from(4 - 4 * bit));
        }
    }
}

/// f16 scale, f16 minimum, 8 × (6-bit scale, 6-bit minimum) in 12 bytes, 128 bytes of nibbles. Groups of 32; two groups share
/// 32 bytes, the first one in the low nibbles.
pub(super) fn q4_k(block: &[u8], out: &mut [f32]) {
    let (scale, min) = (half_at(block, 0), half_at(block, 2));
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let (s, m) = scale_and_min(&block[4..16], group);
        let (scale, min) = (scale * f32::from(s), min * f32::from(m));
        for (value, code) in out.iter_mut().zip(nibbles(&block[16..], group)) {
            *value = scale * f32::from(code) - min;
        }
    }
}

/// [`q4_k`] with 32 bytes of fifth bits before the nibbles: the fifth bit of weight j of group g is bit g of byte j.
pub(super) fn q5_k(block: &[u8], out: &mut [f32]) {
    let (scale, min) = (half_at(block, 0), half_at(block, 2));
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let (s, m) = scale_and_min(&block[4..16], group);
        let (scale, min) = (scale * f32::from(s), min * f32::from(m));
        let high = block[16..48].iter().map(|byte| byte >> group & 1);
        for ((value, code), bit) in out.iter_mut().zip(nibbles(&block[48..], group)).zip(high) {
            *value = scale * f32::from(code | bit << 4) - min;
        }
    }
}

/// 128 bytes of nibbles, 64 bytes of upper bits, 16 signed scales, f16 scale. Groups of 16. Each half of 128 weights has 64
/// bytes of nibbles, its first 64 weights in the low ones, and 32 bytes of upper bits, those of weight w in byte w mod 32.
pub(super) fn q6_k(block: &[u8], out: &mut [f32]) {
    let scale = half_at(block, 208);
    for (group, out) in out.chunks_exact_mut(16).enumerate() {
        let scale = scale * f32::from(block[192 + group].cast_signed());
        let (half, within) = (group / 8, group % 8);
        let low = &block[half * 64 + within % 4 * 16..];
        let high = &block[128 + half * 32 + within % 2 * 16..];
        for ((value, low), high) in out.iter_mut().zip(low).zip(high) {
            let code = low >> (4 * (within / 4)) & 15 | (high >> (2 * (within / 2)) & 3) << 4;
            *value = scale * (f32::from(code) - 32.0);
        }
    }
}

/// f16 scale, 8 × 2 upper bits of the group scales, 8 × 4 lower bits, 128 bytes of nibbles. Groups of 32: 16 low nibbles,
/// then 16 high ones.
pub(super) fn iq4_xs(block: &[u8], out: &mut [f32]) {
    let scale = half_at(block, 0);
    let top = u16::from_le_bytes([block[2], block[3]]);
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let low = block[4 + group / 2] >> (4 * (group % 2)) & 15;
        let bits = f32::from(low) + 16.0 * f32::from(top >> (2 * group) & 3);
        nonlinear(&block[8 + 16 * group..], scale * (bits - 32.0), out);
    }
}

/// Decodes 32 weights of the non-linear types from 16 bytes of nibbles.
pub(super) fn nonlinear(codes: &[u8], scale: f32, out: &mut [f32]) {
    let (low, high) = out.split_at_mut(16);
    for ((low, high), &byte) in low.iter_mut().zip(high).zip(codes) {
        *low = scale * f32::from(NONLINEAR[usize::from(byte & 15)]);
        *high = scale * f32::from(NONLINEAR[usize::from(byte >> 4)]);
    }
}

/// The f16 at a byte of a block.
pub(super) fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// The 2-bit codes of a group of 16, from the 64 bytes of a block.
fn pairs(codes: &[u8], group: usize) -> impl Iterator<Item = u8> {
    let (half, within) = (group / 8, group % 8);
    let bytes = &codes[half * 32 + within % 2 * 16..];
    bytes.iter().map(move |byte| byte >> (2 * (within / 2)) & 3)
}

/// The 4-bit codes of a group of 32, from the 128 bytes of a block.
fn nibbles(codes: &[u8], group: usize) -> impl Iterator<Item = u8> {
    let bytes = &codes[group / 2 * 32..];
    bytes.iter().map(move |byte| byte >> (4 * (group % 2)) & 15)
}

/// Scale and minimum of a group. Groups 0 to 3 have them in the low six bits of bytes 0–3 and 4–7. Groups 4 to 7 have the
/// low four bits in bytes 8–11 and the upper two bits in the top bits of bytes 0–7.
fn scale_and_min(packed: &[u8], group: usize) -> (u8, u8) {
    let (scale, min) = (packed[group % 4], packed[4 + group % 4]);
    if group < 4 {
        return (scale & 63, min & 63);
    }
    let low = packed[4 + group];
    (low & 15 | scale >> 2 & 0x30, low >> 4 | min >> 2 & 0x30)
}

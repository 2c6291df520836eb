//! q4_block, q4_tiled and q4tp: 4-bit codes q with value (q−8)·scale.
//!
//! 16 bytes hold a group of 32 codes: element 2k is the low nibble of byte k, element 2k+1 the high one.

use super::Decoder;
use super::layout::{Bytes, GROUP, check_matrix, groups_per_row, half, half_at, part};

const TILE: usize = 18;

/// A decoder of q4_block: `[u8 ⌈n/32⌉·16][f16 ⌈n/32⌉]`, groups of 32 over the flattened matrix of n elements. Groups may cross
/// rows; the nibbles after the last element are padding. Errors: any other length.
pub fn q4_block(payload: &[u8], rows: usize, cols: usize) -> Decoder<'_> {
    check_matrix(rows, cols)?;
    let groups = Bytes::none().plus(&[rows, cols]).get()?.div_ceil(GROUP);
    Bytes::none().plus(&[groups, TILE]).exactly(payload)?;
    let (codes, scales) = payload.split_at(groups * 16);
    Ok(Box::new(move |row: usize, out: &mut [f32]| {
        let mut values = [0.0; GROUP];
        let mut element = row * cols;
        let mut rest = &mut out[..cols];
        while !rest.is_empty() {
            let (group, first) = (element / GROUP, element % GROUP);
            decode_group(part(codes, group, 16), half_at(scales, group), &mut values);
            let (here, later) = rest.split_at_mut(rest.len().min(GROUP - first));
            here.copy_from_slice(&values[first..][..here.len()]);
            element += here.len();
            rest = later;
        }
    }))
}

/// A decoder of q4_tiled: per group `[f16 scale][16 bytes of codes]`. Errors: columns that are not whole groups, any other
/// length.
pub fn q4_tiled(payload: &[u8], rows: usize, cols: usize) -> Decoder<'_> {
    let groups = groups_per_row(rows, cols)?;
    Bytes::none().plus(&[rows, groups, TILE]).exactly(payload)?;
    Ok(Box::new(move |row: usize, out: &mut [f32]| {
        let tiles = part(payload, row, groups * TILE).chunks_exact(TILE);
        for (values, tile) in out.as_chunks_mut().0.iter_mut().zip(tiles) {
            decode_group(&tile[2..], half(tile), values);
        }
    }))
}

/// A decoder of q4tp: `[codes rows·groups·16][rows × (f16 lo, f16 step)][rows × ⌈groups·5/8⌉ bytes of 5-bit exponents, LSB
/// first]`, with scale = 2^(lo + exponent·step).
///
/// The scale is the closed form in f64, rounded once to f32; the value is the f32 product. Errors: columns that are not whole
/// groups, any other length.
pub fn q4tp(payload: &[u8], rows: usize, cols: usize) -> Decoder<'_> {
    let groups = groups_per_row(rows, cols)?;
    let exponent_bytes = Bytes::none().plus(&[groups, 5]).get()?.div_ceil(8);
    Bytes::none()
        .plus(&[rows, groups, 16])
        .plus(&[rows, 4])
        .plus(&[rows, exponent_bytes])
        .exactly(payload)?;
    let (codes, rest) = payload.split_at(rows * groups * 16);
    let (ladders, exponents) = rest.split_at(rows * 4);
    Ok(Box::new(move |row: usize, out: &mut [f32]| {
        let lo = f64::from(half_at(ladders, 2 * row));
        let step = f64::from(half_at(ladders, 2 * row + 1));
        let exponents = part(exponents, row, exponent_bytes);
        let codes = part(codes, row, groups * 16).chunks_exact(16);
        for (group, (values, bytes)) in out.as_chunks_mut().0.iter_mut().zip(codes).enumerate() {
            let scale = (lo + f64::from(exponent(exponents, group)) * step).exp2() as f32;
            decode_group(bytes, scale, values);
        }
    }))
}

/// (q−8)·scale of the 32 codes in 16 bytes.
fn decode_group(codes: &[u8], scale: f32, out: &mut [f32; GROUP]) {
    for (pair, &byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
        let value = |code: u8| (f32::from(code) - 8.0) * scale;
        *pair = [value(byte & 15), value(byte >> 4)];
    }
}

/// The `group`-th 5-bit exponent of a row.
fn exponent(exponents: &[u8], group: usize) -> u8 {
    let bit = group * 5;
    let low = u16::from(exponents[bit / 8]);
    // The last exponent of a row may end in its last byte.
    let high = u16::from(exponents.get(bit / 8 + 1).copied().unwrap_or(0));
    ((low | high << 8) >> (bit % 8) & 31) as u8
}

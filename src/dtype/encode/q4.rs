//! Encoders of the 4-bit types with an f16 scale per group, q4_block and q4_tiled, and what all 4-bit types share.
//!
//! A code q means (q−8)·scale. The levels −8..=7 reach further down than up, and a negative scale turns them round, so the
//! weight of the largest magnitude may always take the level −8.

use super::{GROUP, Source, round};
use crate::error::{Kind, Result};
use half::f16;

/// The weights that share a scale.
pub type Group = [f32; GROUP];

/// Levels tried for the weight of the largest magnitude. Those beyond −8 clip it, which buys the other weights a finer
/// scale. On trained matrices this grid and one step of least squares leave 5/6 of the root mean square error of absmax/7; a
/// grid four times finer and more steps gain another 1/300.
const EXTREME_LEVELS: [f32; 7] = [-8.0, -9.0, -8.5, -7.5, -7.0, 7.0, 7.5];

/// `[u8 ⌈n/32⌉·16][f16 ⌈n/32⌉]`, groups over the flattened matrix, the last one filled up with zeros.
pub fn q4_block(source: &Source, payload: &mut [u8]) -> Result<()> {
    let groups = |rows: usize| (rows * source.cols).div_ceil(GROUP);
    source.fill(
        payload,
        |rows| [groups(rows) * 16, groups(rows) * 2],
        |first, values, [codes, scales]| {
            let planes = codes.as_chunks_mut().0.iter_mut().zip(scales.as_chunks_mut().0);
            for (index, (values, (codes, scale_bytes))) in values.chunks(GROUP).zip(planes).enumerate() {
                let mut group = [0.0; GROUP];
                group[..values.len()].copy_from_slice(values);
                let scale = checked_scale(source, first, index, &group)?;
                *scale_bytes = scale.to_le_bytes();
                *codes = pack(&group, scale.to_f32());
            }
            Ok(())
        },
    )
}

/// Per group `[f16][16 bytes]`.
pub fn q4_tiled(source: &Source, payload: &mut [u8]) -> Result<()> {
    source.fill(
        payload,
        |rows| [rows * source.cols / GROUP * 18],
        |first, values, [tiles]| {
            let groups = values.as_chunks().0.iter().zip(tiles.as_chunks_mut::<18>().0);
            for (index, (group, tile)) in groups.enumerate() {
                let scale = checked_scale(source, first, index, group)?;
                tile[..2].copy_from_slice(&scale.to_le_bytes());
                tile[2..].copy_from_slice(&pack(group, scale.to_f32()));
            }
            Ok(())
        },
    )
}

/// The scale of the `index`-th group of the block that starts at row `first`. Errors: absmax/7 overflows f16.
fn checked_scale(source: &Source, first: usize, index: usize, group: &Group) -> Result<f16> {
    let (at, extreme) = extreme(group);
    if f16::from_f32(extreme / 7.0).is_infinite() {
        let wanted = "wanted a magnitude whose 7th part fits f16";
        return Err(source.refuse(Kind::UnsupportedTensorType, first, index * GROUP + at, wanted, extreme));
    }
    Ok(best_scale(group, extreme))
}

/// The position and the value of the largest magnitude.
fn extreme(group: &Group) -> (usize, f32) {
    let larger = |best: (usize, f32), (at, &value): (usize, &f32)| {
        if value.abs() > best.1.abs() { (at, value) } else { best }
    };
    group.iter().enumerate().fold((0, 0.0), larger)
}

/// Of the scales tried the one that leaves the smallest squared error; 0 for a group of zeros.
fn best_scale(group: &Group, extreme: f32) -> f16 {
    if extreme == 0.0 {
        return f16::ZERO;
    }
    let mut best = (f16::ZERO, f32::INFINITY);
    let mut consider = |scale: f32| {
        let scale = nonzero_half(scale);
        let error = squared_error(group, scale.to_f32());
        if error < best.1 {
            best = (scale, error);
        }
        scale.to_f32()
    };
    for level in EXTREME_LEVELS {
        let scale = consider(extreme / level);
        consider(least_squares(group, scale));
    }
    best.0
}

/// The nearest f16 that is not zero.
fn nonzero_half(x: f32) -> f16 {
    let nearest = f16::from_f32(x);
    if nearest == f16::ZERO {
        f16::MIN_POSITIVE_SUBNORMAL.copysign(nearest)
    } else {
        nearest
    }
}

/// The nearest level of a weight, −8..=7, given 1/scale.
fn level(value: f32, inverse: f32) -> f32 {
    round((value * inverse).clamp(-8.0, 7.0))
}

/// 1/scale. A scale of 0 gives 0, and thereby level 0 to every weight.
fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// Σ (weight − level·scale)².
pub fn squared_error(group: &Group, scale: f32) -> f32 {
    let inverse = inverse(scale);
    let [sum] = sums(group, |value| {
        let error = value - level(value, inverse) * scale;
        [error * error]
    });
    sum
}

/// The scale that would fit best if every weight kept the level that `scale` gives it.
fn least_squares(group: &Group, scale: f32) -> f32 {
    let inverse = inverse(scale);
    let [product, square] = sums(group, |value| {
        let level = level(value, inverse);
        [value * level, level * level]
    });
    if square == 0.0 { scale } else { product / square }
}

/// The sums of both terms over a group. Eight partial sums each, so that the compiler may add eight weights at once.
fn sums<const TERMS: usize>(group: &Group, terms: impl Fn(f32) -> [f32; TERMS]) -> [f32; TERMS] {
    const LANES: usize = 8;
    let mut sums = [[0.0; LANES]; TERMS];
    for eight in group.as_chunks::<LANES>().0 {
        for lane in 0..LANES {
            let terms = terms(eight[lane]);
            for (sum, term) in sums.iter_mut().zip(terms) {
                sum[lane] += term;
            }
        }
    }
    sums.map(|lanes| lanes.iter().sum())
}

/// The 16 bytes of codes: element 2k in the low nibble of byte k, element 2k+1 in the high one.
pub fn pack(group: &Group, scale: f32) -> [u8; GROUP / 2] {
    let inverse = inverse(scale);
    let codes = group.map(|value| (level(value, inverse) + 8.0) as u8);
    std::array::from_fn(|k| codes[2 * k] | codes[2 * k + 1] << 4)
}

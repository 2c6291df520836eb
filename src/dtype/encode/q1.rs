//! Encoders of the types of 1 and 1.6 bits: q1, q1s, q1t. The last two keep outliers as they are, in an overlay.

use super::levels::{Group, extreme};
use super::outliers::{Score, Threshold};
use super::{GROUP, Source};
use crate::error::{Kind, Result, bail};
use half::f16;

/// Columns that an overlay of q1t can name.
pub const Q1T_COLS: usize = 1 << 16;

/// Per group `[f16][u32 of signs]`: ±mean |w|, which leaves the smallest squared error.
pub fn q1(source: &Source) -> Result<Vec<u8>> {
    let (payload, _) = tiles(source, None, sign_tile)?;
    Ok(payload)
}

/// q1 of what is no outlier, then `[u32 count]` and the outliers as `{u32 flat index, f16 value}`.
///
/// Errors: `UnsupportedTensorType` for more than 2^32 weights.
pub fn q1s(source: &Source, score: &Score, fraction: f64) -> Result<Vec<u8>> {
    if source.rows as u64 * source.cols as u64 > 1 << 32 {
        bail!(
            UnsupportedTensorType,
            "q1s numbers up to 2^32 weights, found {} × {}",
            source.rows,
            source.cols
        );
    }
    let threshold = score.threshold(source, fraction)?;
    let (mut payload, overlay) = tiles(source, Some(&threshold), sign_tile)?;
    let entries = overlay.iter().flatten();
    payload.extend((entries.clone().count() as u32).to_le_bytes());
    for outlier in entries {
        payload.extend(((outlier.row * source.cols + outlier.col) as u32).to_le_bytes());
        payload.extend(outlier.value.to_le_bytes());
    }
    Ok(payload)
}

/// Per group `[f16][7 bytes]` of −1, 0 and 1 for what is no outlier, then `[u32 row_ptr rows+1]` and the outliers by row as
/// `{u16 col, f16 value}`.
///
/// Errors: `UnsupportedTensorType` for more than 2^16 columns or 2^32 outliers.
pub fn q1t(source: &Source, score: &Score, fraction: f64) -> Result<Vec<u8>> {
    if source.cols > Q1T_COLS {
        bail!(
            UnsupportedTensorType,
            "q1t numbers up to {Q1T_COLS} columns, found {}",
            source.cols
        );
    }
    let threshold = score.threshold(source, fraction)?;
    let (mut payload, overlay) = tiles(source, Some(&threshold), trit_tile)?;
    let mut entries = overlay.iter().flatten().peekable();
    let mut packed = Vec::new();
    let mut count = 0u32;
    payload.extend(count.to_le_bytes());
    for row in 0..source.rows {
        while let Some(outlier) = entries.next_if(|outlier| outlier.row == row) {
            packed.extend((outlier.col as u16).to_le_bytes());
            packed.extend(outlier.value.to_le_bytes());
            let Some(next) = count.checked_add(1) else {
                bail!(UnsupportedTensorType, "q1t holds up to 2^32 outliers");
            };
            count = next;
        }
        payload.extend(count.to_le_bytes());
    }
    payload.extend(packed);
    Ok(payload)
}

/// A weight that keeps its value.
struct Outlier {
    row: usize,
    col: usize,
    value: f16,
}

/// Which weights of a group are outliers, one bit each.
type Outside = u32;

/// The tiles of all groups, and the outliers of every block in the order of the matrix.
fn tiles<const BYTES: usize>(
    source: &Source,
    threshold: Option<&Threshold>,
    tile: fn(&Group, Outside) -> (f16, [u8; BYTES]),
) -> Result<(Vec<u8>, Vec<Vec<Outlier>>)> {
    let groups = source.cols / GROUP;
    let bytes = |rows: usize| [rows * groups * (2 + BYTES)];
    let mut payload = vec![0; bytes(source.rows)[0]];
    let overlay = source.fill(&mut payload, bytes, |first, values, [tiles]| {
        let mut overlay = Vec::new();
        let tiles = tiles.chunks_exact_mut(2 + BYTES);
        for (index, (group, bytes)) in values.as_chunks::<GROUP>().0.iter().zip(tiles).enumerate() {
            let (row, col) = (index / groups, index % groups * GROUP);
            let mut outside: Outside = 0;
            if let Some(threshold) = threshold {
                for (k, &weight) in group
                    .iter()
                    .enumerate()
                    .filter(|(k, w)| threshold.exceeded(**w, col + k))
                {
                    outside |= 1 << k;
                    let value = f16::from_f32(weight);
                    if value.is_infinite() {
                        let wanted = "wanted an outlier that f16 can hold";
                        return Err(source.refuse(
                            Kind::UnsupportedTensorType,
                            first,
                            index * GROUP + k,
                            wanted,
                            weight,
                        ));
                    }
                    let row = first + row;
                    overlay.push(Outlier {
                        row,
                        col: col + k,
                        value,
                    });
                }
            }
            let (scale, codes) = tile(group, outside);
            if scale.is_infinite() {
                let wanted = "wanted a group whose mean magnitude f16 can hold";
                let (at, weight) = extreme(group);
                let at = index * GROUP + at;
                return Err(source.refuse(Kind::UnsupportedTensorType, first, at, wanted, weight));
            }
            bytes[..2].copy_from_slice(&scale.to_le_bytes());
            bytes[2..].copy_from_slice(&codes);
        }
        Ok(overlay)
    })?;
    Ok((payload, overlay))
}

/// Signs, weight k in bit k; the mean magnitude of what is not outside.
fn sign_tile(group: &Group, outside: Outside) -> (f16, [u8; 4]) {
    let mut sum = 0.0;
    let mut signs = 0u32;
    for (k, &weight) in group.iter().enumerate() {
        signs |= u32::from(weight >= 0.0) << k;
        sum += if outside >> k & 1 == 0 {
            f64::from(weight.abs())
        } else {
            0.0
        };
    }
    let count = GROUP as u32 - outside.count_ones();
    (f16::from_f64(sum / f64::from(count.max(1))), signs.to_le_bytes())
}

/// Digits of base 3, weight k in the (k mod 5)-th of byte k/5, least significant first: 0 → 0, 1 → +scale, 2 → −scale.
///
/// If the k largest magnitudes are not 0, their mean m is the scale that leaves least, and takes k·m² off the squared error:
/// the k for which that is most is the best of all. Codes are then chosen against the rounded scale.
fn trit_tile(group: &Group, outside: Outside) -> (f16, [u8; 7]) {
    let mut magnitudes = group.map(f32::abs);
    (0..GROUP)
        .filter(|k| outside >> k & 1 == 1)
        .for_each(|k| magnitudes[k] = 0.0);
    let mut sorted = magnitudes;
    sorted.sort_unstable_by(|a, b| b.total_cmp(a));
    let (mut sum, mut best) = (0.0, (0.0, 0.0));
    for (k, &magnitude) in sorted.iter().enumerate() {
        sum += f64::from(magnitude);
        let mean = sum / (k + 1) as f64;
        if sum * mean > best.0 {
            best = (sum * mean, mean);
        }
    }
    let scale = f16::from_f64(best.1);
    let digit = |k: usize| match magnitudes.get(k) {
        Some(&magnitude) if scale > f16::ZERO && magnitude > scale.to_f32() / 2.0 => 1 + u8::from(group[k] < 0.0),
        _ => 0,
    };
    let byte = |at: usize| (0..5).rev().fold(0, |byte, j| byte * 3 + digit(5 * at + j));
    (scale, std::array::from_fn(byte))
}

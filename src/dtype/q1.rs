//! q1, q1s and q1t: signs or base-3 digits with an f16 scale per group; q1s and q1t keep outliers in an overlay.
//!
//! q1 is `[f16][u32 of signs]` per group, ±scale. q1s is q1, then `[u32 count]` and the overlay as `{u32 flat index, f16
//! value}`. q1t is `[f16][7 bytes of base-3 digits]` per group with the values 0 and ±scale, then `[u32 row_ptr: rows+1]` and
//! the overlay by row as `{u16 col, f16 value}`.

use super::codes::{Codes, Row};
use super::payload::{GROUP, Payload, Section, fill_halves, row_table, slice, tile_scales, u32_at};
use super::planes::{Contents, Overlay, Planes, Repack, pack};
use super::quantise::levels::{Group, extreme};
use super::quantise::outliers::{Score, Threshold};
use super::quantise::{Settings, Weights};
use super::spec::{Encode, Shapes, Size, Spec, Tail};
use crate::error::{Kind, Result, bail};
use cmf_kernels_ref::dtype::q1;
use half::f16;

/// Bytes of a group.
const SIGNS: usize = 6;
const TRITS: usize = 9;
/// Bytes of an overlay entry of q1s and of q1t.
const FLAT_ENTRY: usize = 6;
pub(super) const ROW_ENTRY: usize = 4;
/// Columns that a u16 can number: those of q1t in a file, and those of any overlay on a device.
const MAX_COLS: usize = 1 << 16;

pub const Q1: Spec = Spec {
    id: Some(12),
    gguf: None,
    name: "q1",
    quant: "q1",
    code_bits: 1,
    shapes: Shapes::GroupRows,
    max_cols: u64::MAX,
    sections: &[Section::Groups(SIGNS as u64)],
    tail: Tail::NONE,
    decoder: q1::q1,
    encode: Encode::Sized(|weights, _| tiles(weights, None, sign_tile).map(|(payload, _)| payload)),
    planes: |_| Ok(Planes::Bits1),
    repack: Repack {
        codes: |payload, row, out| {
            let tiles = payload.row(0, row)?.as_chunks::<SIGNS>().0;
            for (tile, out) in tiles.iter().zip(out.as_chunks_mut::<4>().0) {
                *out = pack::bits1([tile[2], tile[3], tile[4], tile[5]]).to_le_bytes();
            }
            Ok(())
        },
        scales: tile_scales::<SIGNS>,
        ..Repack::COPY
    },
    verify: |_| Ok(()),
    random: Some(|payload, _, deviation, random| {
        random(payload);
        for tile in payload.as_chunks_mut::<SIGNS>().0 {
            fill_halves(&mut tile[..2], deviation);
        }
    }),
};

pub const Q1S: Spec = Spec {
    id: Some(13),
    gguf: None,
    name: "q1s",
    quant: "q1s",
    tail: Tail {
        size: |_, _| Some(Size::AtLeast(4)),
        check: Some(|payload| {
            let tail = payload.tail()?;
            check_overlay(u32_at(tail, 0), FLAT_ENTRY, &tail[4..])
        }),
        select: select_flat,
        overlay_cols: Some(|payload| {
            let entries = slice_from(payload.tail()?, 4)?.as_chunks::<FLAT_ENTRY>().0;
            Ok(entries
                .iter()
                .map(|entry| u32_at(entry, 0) as usize % payload.cols)
                .collect())
        }),
        ..Tail::NONE
    },
    decoder: q1::q1s,
    encode: Encode::Sized(encode_q1s),
    planes: |cols| match cols <= MAX_COLS {
        true => Ok(Planes::Bits1Overlay),
        false => bail!(
            UnsupportedTensorType,
            "q1s weights run with rows of up to {MAX_COLS} columns, found {cols}"
        ),
    },
    repack: Repack {
        open: |payload| {
            Ok(Contents::Overlay(Overlay::flat(
                payload.tail()?,
                payload.rows,
                payload.cols,
            )?))
        },
        ..Q1.repack
    },
    random: None,
    ..Q1
};

pub const Q1T: Spec = Spec {
    id: Some(14),
    gguf: None,
    name: "q1t",
    quant: "q1t",
    code_bits: 2,
    max_cols: MAX_COLS as u64,
    sections: &[Section::Groups(TRITS as u64)],
    tail: Tail {
        size: |rows, _| rows.checked_add(1)?.checked_mul(4).map(Size::AtLeast),
        check: Some(|payload| {
            let (table, entries) = row_table(payload.tail()?, payload.rows)?;
            check_pointers(table)?;
            check_overlay(u32_at(table, payload.rows), ROW_ENTRY, entries)
        }),
        select: select_by_row,
        overlay_cols: Some(|payload| {
            let (_, entries) = row_table(payload.tail()?, payload.rows)?;
            let col = |entry: &[u8; ROW_ENTRY]| usize::from(u16::from_le_bytes([entry[0], entry[1]]));
            Ok(entries.as_chunks().0.iter().map(col).collect())
        }),
        ..Tail::NONE
    },
    decoder: q1::q1t,
    encode: Encode::Sized(encode_q1t),
    planes: |_| Ok(Planes::Bits2),
    repack: Repack {
        open: |payload| {
            Ok(Contents::Overlay(Overlay::by_row(
                payload.tail()?,
                payload.rows,
                payload.cols,
            )?))
        },
        codes: |payload, row, out| {
            let tiles = payload.row(0, row)?.as_chunks::<TRITS>().0;
            for (group, (tile, out)) in tiles.iter().zip(out.as_chunks_mut::<8>().0).enumerate() {
                let words = pack::bits2(std::array::from_fn(|i| tile[2 + i]));
                let words = words.map_err(|err| err.context(format!("row {row}, group {group}")))?;
                out.copy_from_slice(bytemuck::cast_slice(&words.map(u32::to_le)));
            }
            Ok(())
        },
        scales: tile_scales::<TRITS>,
    },
    random: None,
    ..Q1
};

fn slice_from(bytes: &[u8], at: usize) -> Result<&[u8]> {
    slice(bytes, at, bytes.len().saturating_sub(at))
}

/// Refuses an overlay that is not `count` entries.
fn check_overlay(count: u32, entry_bytes: usize, entries: &[u8]) -> Result<()> {
    let (wanted, found) = (u64::from(count) * entry_bytes as u64, entries.len() as u64);
    if wanted != found {
        bail!(
            Parse,
            "an overlay of {count} entries: expected {wanted} bytes, found {found}"
        );
    }
    Ok(())
}

fn check_pointers(table: &[u8]) -> Result<()> {
    let mut last = 0;
    for row in 0..table.len() / 4 {
        let pointer = u32_at(table, row);
        if pointer < last || (row == 0 && pointer != 0) {
            bail!(
                Parse,
                "row_ptr[{row}] is {pointer}, expected 0 first and no descent (before it: {last})"
            );
        }
        last = pointer;
    }
    Ok(())
}

/// The overlay of q1s for the rows `keep`.
fn select_flat(payload: &Payload, keep: &[usize], selected: &mut Vec<u8>) -> Result<()> {
    let count_at = selected.len();
    selected.extend_from_slice(&[0; 4]);
    let mut count = 0u32;
    // Entries keep the order of the file: of two for one weight the later one counts.
    for entry in slice_from(payload.tail()?, 4)?.as_chunks::<FLAT_ENTRY>().0 {
        let index = u32_at(entry, 0) as usize;
        if let Ok(row) = keep.binary_search(&(index / payload.cols)) {
            // Not above the index in the file, so it fits.
            selected.extend_from_slice(&((row * payload.cols + index % payload.cols) as u32).to_le_bytes());
            selected.extend_from_slice(&entry[4..]);
            count += 1;
        }
    }
    selected[count_at..][..4].copy_from_slice(&count.to_le_bytes());
    Ok(())
}

/// The row pointers and the overlay of q1t for the rows `keep`.
fn select_by_row(payload: &Payload, keep: &[usize], selected: &mut Vec<u8>) -> Result<()> {
    let (table, entries) = row_table(payload.tail()?, payload.rows)?;
    let range = |row: usize| u32_at(table, row) as usize..u32_at(table, row + 1) as usize;
    let mut end = 0u32;
    selected.extend_from_slice(&end.to_le_bytes());
    for &row in keep {
        end += range(row).len() as u32;
        selected.extend_from_slice(&end.to_le_bytes());
    }
    for &row in keep {
        let range = range(row);
        selected.extend_from_slice(slice(entries, range.start * ROW_ENTRY, range.len() * ROW_ENTRY)?);
    }
    Ok(())
}

/// Errors: `UnsupportedTensorType` for more than 2^32 weights.
fn encode_q1s(weights: &Weights, settings: &Settings) -> Result<Vec<u8>> {
    let score = Score::new(settings.rms, weights.cols)?;
    if weights.rows as u64 * weights.cols as u64 > 1 << 32 {
        bail!(
            UnsupportedTensorType,
            "q1s numbers up to 2^32 weights, found {} × {}",
            weights.rows,
            weights.cols
        );
    }
    let threshold = score.threshold(weights, settings.outliers)?;
    let (mut payload, overlay) = tiles(weights, Some(&threshold), sign_tile)?;
    let entries = overlay.iter().flatten();
    payload.extend((entries.clone().count() as u32).to_le_bytes());
    for outlier in entries {
        payload.extend(((outlier.row * weights.cols + outlier.col) as u32).to_le_bytes());
        payload.extend(outlier.value.to_le_bytes());
    }
    Ok(payload)
}

/// Errors: `UnsupportedTensorType` for more than 2^16 columns or 2^32 outliers.
fn encode_q1t(weights: &Weights, settings: &Settings) -> Result<Vec<u8>> {
    let score = Score::new(settings.rms, weights.cols)?;
    if weights.cols > MAX_COLS {
        bail!(
            UnsupportedTensorType,
            "q1t numbers up to {MAX_COLS} columns, found {}",
            weights.cols
        );
    }
    let threshold = score.threshold(weights, settings.outliers)?;
    let (mut payload, overlay) = tiles(weights, Some(&threshold), trit_tile)?;
    let mut entries = overlay.iter().flatten().peekable();
    let mut packed = Vec::new();
    let mut count = 0u32;
    payload.extend(count.to_le_bytes());
    for row in 0..weights.rows {
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

/// A weight that is kept in the overlay.
struct Outlier {
    row: usize,
    col: usize,
    value: f16,
}

/// The outliers of a group, one bit per weight.
type Outliers = u32;

/// The tiles of all groups, and the outliers of every block in the order of the matrix.
fn tiles<const BYTES: usize>(
    weights: &Weights,
    threshold: Option<&Threshold>,
    tile: fn(&Group, Outliers) -> (f16, [u8; BYTES]),
) -> Result<(Vec<u8>, Vec<Vec<Outlier>>)> {
    let groups = weights.cols / GROUP;
    let bytes = |rows: usize| [rows * groups * (2 + BYTES)];
    let mut payload = vec![0; bytes(weights.rows)[0]];
    let overlay = weights.fill(&mut payload, bytes, |first, values, [tiles]| {
        let mut overlay = Vec::new();
        let tiles = tiles.chunks_exact_mut(2 + BYTES);
        for (index, (group, bytes)) in values.as_chunks::<GROUP>().0.iter().zip(tiles).enumerate() {
            let (row, col) = (first + index / groups, index % groups * GROUP);
            let mut outliers: Outliers = 0;
            if let Some(threshold) = threshold {
                for (k, &weight) in group.iter().enumerate() {
                    let col = col + k;
                    if !threshold.exceeded(weight, col) {
                        continue;
                    }
                    outliers |= 1 << k;
                    let value = f16::from_f32(weight);
                    if value.is_infinite() {
                        let (at, wanted) = (index * GROUP + k, "expected an outlier that f16 can hold");
                        return Err(weights.refuse(Kind::UnsupportedTensorType, first, at, wanted, weight));
                    }
                    overlay.push(Outlier { row, col, value });
                }
            }
            let (scale, codes) = tile(group, outliers);
            if scale.is_infinite() {
                let wanted = "expected a group whose mean magnitude f16 can hold";
                let (at, weight) = extreme(group);
                let at = index * GROUP + at;
                return Err(weights.refuse(Kind::UnsupportedTensorType, first, at, wanted, weight));
            }
            bytes[..2].copy_from_slice(&scale.to_le_bytes());
            bytes[2..].copy_from_slice(&codes);
        }
        Ok(overlay)
    })?;
    Ok((payload, overlay))
}

/// The signs, weight k in bit k, and the mean magnitude of the weights that are not outliers: the scale with the smallest
/// squared error.
fn sign_tile(group: &Group, outliers: Outliers) -> (f16, [u8; 4]) {
    let mut sum = 0.0;
    let mut signs = 0u32;
    for (k, &weight) in group.iter().enumerate() {
        signs |= u32::from(weight >= 0.0) << k;
        sum += if outliers >> k & 1 == 0 {
            f64::from(weight.abs())
        } else {
            0.0
        };
    }
    let count = GROUP as u32 - outliers.count_ones();
    (f16::from_f64(sum / f64::from(count.max(1))), signs.to_le_bytes())
}

/// The digits of base 3, weight k being digit k mod 5 of byte k/5, least significant first: 0 → 0, 1 → +scale, 2 → −scale.
///
/// If the k largest magnitudes get a digit other than 0, the best scale is their mean m, which lowers the squared error by
/// k·m². The scale of the k with the largest k·m² is used. Digits are then chosen against the rounded scale.
fn trit_tile(group: &Group, outliers: Outliers) -> (f16, [u8; 7]) {
    let mut magnitudes = group.map(f32::abs);
    (0..GROUP)
        .filter(|k| outliers >> k & 1 == 1)
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
    (scale, digits(digit))
}

/// The bytes of a group whose weight k has the digit `digit(k)`.
fn digits(digit: impl Fn(usize) -> u8) -> [u8; TRITS - 2] {
    let byte = |at: usize| (0..5).rev().fold(0, |byte, j| byte * 3 + digit(5 * at + j));
    std::array::from_fn(byte)
}

/// Appends a group of q1t that begins with column `col`: codes −1, 0 and 1 as digits, others in the overlay.
///
/// Errors: `UnsupportedTensorType` for an overlay value that f16 cannot hold, and for columns that the overlay cannot number.
pub(super) fn put_trits(group: &Codes, _bits: u8, col: usize, row: &mut Row) -> Result<()> {
    for (k, &code) in group
        .codes
        .iter()
        .enumerate()
        .filter(|(_, code)| !(-1..=1).contains(*code))
    {
        let value = f16::from_f32(f32::from(code) * group.scale.to_f32());
        let Some(col) = u16::try_from(col + k)
            .ok()
            .filter(|_| value / group.scale == f16::from_f32(code.into()))
        else {
            bail!(
                UnsupportedTensorType,
                "column {}: q1t cannot hold {code} times {}",
                col + k,
                group.scale
            );
        };
        row.overlay.extend(col.to_le_bytes());
        row.overlay.extend(value.to_le_bytes());
    }
    let digit = |k: usize| match group.codes.get(k) {
        Some(1) => 1,
        Some(-1) => 2,
        _ => 0,
    };
    row.packed.extend(group.scale.to_le_bytes());
    row.packed.extend(digits(digit));
    Ok(())
}

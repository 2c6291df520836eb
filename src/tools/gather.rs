//! Picking rows and columns of a stored matrix. Rows are picked as bytes: what they decode to does not change by a bit.

use crate::dtype::Dtype;
use crate::dtype::encode::{Settings, encode_with};
use crate::error::{Error, Kind, Result, bail};

/// Columns that share a scale in the group types.
const GROUP: usize = 32;
/// Bytes of a group in q1 and q1s, and in q1t.
const Q1_TILE: usize = 6;
const Q1T_TILE: usize = 9;
/// Bytes of an entry of an overlay: q1s `{u32 flat index, f16 value}`, q1t `{u16 col, f16 value}`.
const Q1S_ENTRY: usize = 6;
const Q1T_ENTRY: usize = 4;

/// The payload with the rows `keep`, ascending, of a `rows` × `cols` payload: the same codes, scales and overlay values.
///
/// Errors: `Bounds` for a row that is not there; `Parse` for a payload whose own tables do not add up;
/// `UnsupportedTensorType` for a type whose rows are not apart.
pub(super) fn rows(dtype: Dtype, payload: &[u8], rows: usize, cols: usize, keep: &[usize]) -> Result<Vec<u8>> {
    if let Some(row) = keep.iter().find(|&&row| row >= rows) {
        bail!(Bounds, "row {row} of {rows}");
    }
    if keep.windows(2).any(|pair| pair[0] >= pair[1]) {
        bail!(Bounds, "rows are picked in ascending order");
    }
    if rows_share_groups(dtype, cols) {
        bail!(
            UnsupportedTensorType,
            "rows of {} with {cols} columns share groups and cannot be picked",
            dtype.name()
        );
    }
    let groups = cols / GROUP;
    // Bytes a row has in each plane; then bytes that all rows share.
    let (planes, shared): (&[usize], usize) = match dtype {
        Dtype::F32 => (&[4 * cols], 0),
        Dtype::F16 | Dtype::Bf16 => (&[2 * cols], 0),
        Dtype::Q8Row => (&[cols, 2], 0),
        Dtype::Q82f => (&[cols, 2], 2 * cols),
        Dtype::Q4Block => (&[16 * groups, 2 * groups], 0),
        Dtype::Q4Tiled => (&[18 * groups], 0),
        Dtype::Q1 => (&[Q1_TILE * groups], 0),
        Dtype::Q4tp => (&[16 * groups, 4, (5 * groups).div_ceil(8)], 0),
        Dtype::Vbit | Dtype::VbitRo | Dtype::Q1s | Dtype::Q1t => {
            // Its tables say where rows are: nothing is taken from them before all of them were checked.
            dtype.decoder(payload, rows, cols)?;
            return match dtype {
                Dtype::Q1s => q1s_rows(payload, rows, cols, keep),
                Dtype::Q1t => q1t_rows(payload, rows, cols, keep),
                _ => vbit_rows(payload, rows, cols, keep, dtype == Dtype::VbitRo),
            };
        }
    };
    let mut rest = payload;
    let mut picked = Vec::new();
    for &bytes in planes {
        rest = plane(rest, rows, bytes, keep, &mut picked)?;
    }
    if rest.len() != shared {
        bail!(Bounds, "{} bytes follow the rows, wanted {shared}", rest.len());
    }
    picked.extend_from_slice(rest);
    Ok(picked)
}

/// Whether a group of one scale can reach from one row into the next.
pub(super) fn rows_share_groups(dtype: Dtype, cols: usize) -> bool {
    dtype == Dtype::Q4Block && !cols.is_multiple_of(GROUP)
}

/// Appends the kept rows, of `bytes` each, of the plane that `from` starts with. Returns what follows the plane.
fn plane<'a>(from: &'a [u8], rows: usize, bytes: usize, keep: &[usize], picked: &mut Vec<u8>) -> Result<&'a [u8]> {
    let (plane, rest) = rows
        .checked_mul(bytes)
        .and_then(|all| from.split_at_checked(all))
        .ok_or_else(|| short(from.len(), rows))?;
    for &row in keep {
        picked.extend_from_slice(&plane[row * bytes..][..bytes]);
    }
    Ok(rest)
}

fn short(bytes: usize, rows: usize) -> Error {
    Error::new(Kind::Bounds, format!("{bytes} bytes are too short for {rows} rows"))
}

/// Bytes of a packed row of vbit.
fn packed(width: u8, groups: usize) -> usize {
    4 * usize::from(width) * groups
}

/// vbit and, with a `table`, vbit_ro. The payload was checked.
fn vbit_rows(payload: &[u8], rows: usize, cols: usize, keep: &[usize], table: bool) -> Result<Vec<u8>> {
    let groups = cols / GROUP;
    let widths = payload.get(..rows).ok_or_else(|| short(payload.len(), rows))?;
    let mut picked = Vec::new();
    let rest = plane(payload, rows, 1, keep, &mut picked)?;
    let mut rest = plane(rest, rows, 2 * groups, keep, &mut picked)?;
    let mut starts = Vec::with_capacity(rows);
    if table {
        let (offsets, after) = rest
            .split_at_checked(4 * (rows + 1))
            .ok_or_else(|| short(rest.len(), rows))?;
        rest = after;
        starts.extend(words(offsets).take(rows).map(|word| word as usize));
        // Never more than the offsets that were there: rows that are left out are left out here as well.
        let mut end = 0u32;
        picked.extend_from_slice(&end.to_le_bytes());
        for &row in keep {
            end += packed(widths[row], groups) as u32;
            picked.extend_from_slice(&end.to_le_bytes());
        }
    } else {
        let mut end = 0;
        for &width in widths {
            starts.push(end);
            end += packed(width, groups);
        }
    }
    for &row in keep {
        let packed = rest
            .get(starts[row]..)
            .and_then(|rest| rest.get(..packed(widths[row], groups)))
            .ok_or_else(|| short(rest.len(), rows))?;
        picked.extend_from_slice(packed);
    }
    Ok(picked)
}

/// q1s. The payload was checked.
fn q1s_rows(payload: &[u8], rows: usize, cols: usize, keep: &[usize]) -> Result<Vec<u8>> {
    let mut picked = Vec::new();
    let rest = plane(payload, rows, Q1_TILE * (cols / GROUP), keep, &mut picked)?;
    let count_at = picked.len();
    picked.extend_from_slice(&[0; 4]);
    let mut count = 0u32;
    // In the order of the file: of two entries for one weight the later one counts.
    for entry in rest.get(4..).unwrap_or_default().chunks_exact(Q1S_ENTRY) {
        let (index, value) = entry.split_at(4);
        let Some(index) = words(index).next() else { continue };
        if let Ok(row) = keep.binary_search(&(index as usize / cols)) {
            // Not more than the index that it had.
            picked.extend_from_slice(&((row * cols + index as usize % cols) as u32).to_le_bytes());
            picked.extend_from_slice(value);
            count += 1;
        }
    }
    picked[count_at..][..4].copy_from_slice(&count.to_le_bytes());
    Ok(picked)
}

/// q1t. The payload was checked.
fn q1t_rows(payload: &[u8], rows: usize, cols: usize, keep: &[usize]) -> Result<Vec<u8>> {
    let mut picked = Vec::new();
    let rest = plane(payload, rows, Q1T_TILE * (cols / GROUP), keep, &mut picked)?;
    let (pointers, entries) = rest
        .split_at_checked(4 * (rows + 1))
        .ok_or_else(|| short(rest.len(), rows))?;
    let pointers: Vec<usize> = words(pointers).map(|word| word as usize).collect();
    let mut end = 0u32;
    picked.extend_from_slice(&end.to_le_bytes());
    for &row in keep {
        end += (pointers[row + 1] - pointers[row]) as u32;
        picked.extend_from_slice(&end.to_le_bytes());
    }
    for &row in keep {
        let row = entries
            .get(pointers[row] * Q1T_ENTRY..pointers[row + 1] * Q1T_ENTRY)
            .ok_or_else(|| short(entries.len(), rows))?;
        picked.extend_from_slice(row);
    }
    Ok(picked)
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u32> + '_ {
    bytes.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word))
}

/// The payload in type `to` with the columns `keep`: decoded, picked, encoded. Rows of vbit keep their widths, and as large a
/// part of the weights stays in an overlay as it holds of the kept columns.
///
/// Errors: `Bounds` for a column that is not there; those of decoding and encoding.
pub(super) fn cols(
    (dtype, payload): (Dtype, &[u8]),
    (rows, cols): (usize, usize),
    keep: &[usize],
    to: Dtype,
) -> Result<Vec<u8>> {
    let is_vbit = |dtype| matches!(dtype, Dtype::Vbit | Dtype::VbitRo);
    let settings = Settings {
        widths: payload.get(..rows).filter(|_| is_vbit(dtype) && is_vbit(to)),
        outliers: overlaid((dtype, payload), (rows, cols), keep).unwrap_or(Settings::OUTLIERS),
        ..Settings::default()
    };
    let all: Vec<usize> = (0..rows).collect();
    again((dtype, payload), (rows, cols), (&all, keep), to, &settings)
}

/// The payload in its own type with the rows `keep`, decoded, picked and encoded: where rows share groups.
///
/// Errors: as [`cols`].
pub(super) fn rows_again(
    (dtype, payload): (Dtype, &[u8]),
    (rows, cols): (usize, usize),
    keep: &[usize],
) -> Result<Vec<u8>> {
    let all: Vec<usize> = (0..cols).collect();
    again(
        (dtype, payload),
        (rows, cols),
        (keep, &all),
        dtype,
        &Settings::default(),
    )
}

fn again(
    (dtype, payload): (Dtype, &[u8]),
    (rows, cols): (usize, usize),
    (keep_rows, keep_cols): (&[usize], &[usize]),
    to: Dtype,
    settings: &Settings,
) -> Result<Vec<u8>> {
    for (what, keep, there) in [("row", keep_rows, rows), ("column", keep_cols, cols)] {
        if let Some(at) = keep.iter().find(|&&at| at >= there) {
            bail!(Bounds, "{what} {at} of {there}");
        }
    }
    let decoder = dtype.decoder(payload, rows, cols)?;
    let read = |first: usize, out: &mut [f32]| {
        let mut whole = vec![0f32; cols];
        for (&row, picked) in keep_rows[first..].iter().zip(out.chunks_mut(keep_cols.len())) {
            decoder.row(row, &mut whole);
            picked
                .iter_mut()
                .zip(keep_cols)
                .for_each(|(picked, &col)| *picked = whole[col]);
        }
        Ok(())
    };
    encode_with(to, keep_rows.len(), keep_cols.len(), settings, &read)
}

/// The part of the weights of the columns `keep` that has an entry in the overlay; `None` for a type without one. The payload
/// was checked.
fn overlaid((dtype, payload): (Dtype, &[u8]), (rows, cols): (usize, usize), keep: &[usize]) -> Option<f64> {
    let groups = rows * (cols / GROUP);
    let col_of: fn(&[u8], usize) -> usize = match dtype {
        Dtype::Q1s => |entry, cols| words(entry).next().unwrap_or(0) as usize % cols,
        Dtype::Q1t => |entry, _| usize::from(entry.first_chunk().map_or(0, |&col| u16::from_le_bytes(col))),
        _ => return None,
    };
    let (start, bytes) = match dtype {
        Dtype::Q1s => (groups * Q1_TILE + 4, Q1S_ENTRY),
        _ => (groups * Q1T_TILE + 4 * (rows + 1), Q1T_ENTRY),
    };
    let entries = payload.get(start..)?.chunks_exact(bytes);
    let kept = entries.filter(|entry| keep.binary_search(&col_of(entry, cols)).is_ok());
    // Entries that come twice make no more than all of them.
    Some((kept.count() as f64 / (rows * keep.len()).max(1) as f64).min(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::encode::encode;

    const ROWS: usize = 7;
    const COLS: usize = 96;

    /// Weights of which a few are far larger, and no row is like another.
    fn weight(row: usize, col: usize) -> f32 {
        let small = ((row * 131 + col * 37) % 97) as f32 / 64.0 - 0.75;
        match (row * COLS + col) % 41 {
            0 => 40.0 + row as f32 + col as f32 / 8.0,
            _ => small * (1 << row) as f32,
        }
    }

    fn payload(dtype: Dtype) -> Vec<u8> {
        encode(dtype, ROWS, COLS, &|first, out| {
            for (i, value) in out.iter_mut().enumerate() {
                *value = weight(first + i / COLS, i % COLS);
            }
            Ok(())
        })
        .unwrap()
    }

    fn decoded(dtype: Dtype, payload: &[u8], rows: usize, cols: usize) -> Vec<Vec<f32>> {
        let decoder = dtype.decoder(payload, rows, cols).unwrap();
        let row = |row| {
            let mut weights = vec![0f32; cols];
            decoder.row(row, &mut weights);
            weights
        };
        (0..rows).map(row).collect()
    }

    #[test]
    fn rows_of_every_type_decode_to_what_they_were() {
        for dtype in Dtype::all() {
            let payload = payload(dtype);
            let from = decoded(dtype, &payload, ROWS, COLS);
            for keep in [&[0, 2, 3, 6][..], &[6], &[0], &[1, 2, 3, 4, 5], &[0, 1, 2, 3, 4, 5, 6]] {
                let picked = rows(dtype, &payload, ROWS, COLS, keep).unwrap();
                let to = decoded(dtype, &picked, keep.len(), COLS);
                let wanted: Vec<_> = keep.iter().map(|&row| from[row].clone()).collect();
                assert!(to == wanted, "{} {keep:?}", dtype.name());
                if keep.len() == ROWS {
                    assert!(picked == payload, "{}: everything is the same", dtype.name());
                }
            }
            for keep in [&[7][..], &[2, 1], &[3, 3]] {
                let err = rows(dtype, &payload, ROWS, COLS, keep).unwrap_err();
                assert_eq!(err.kind, Kind::Bounds, "{} {keep:?}: {err}", dtype.name());
            }
            for cut in [0, 1, payload.len() / 2, payload.len() - 1] {
                assert!(
                    rows(dtype, &payload[..cut], ROWS, COLS, &[0, 6]).is_err(),
                    "{} of {cut} bytes",
                    dtype.name()
                );
            }
        }
    }

    #[test]
    fn odd_tables_are_read_as_decoders_read_them() {
        // q1s: out of order, one weight twice, an entry in each of three rows.
        let entries = [(65u32, 1u8), (1, 2), (65, 3), (40, 4), (95, 5)];
        let mut payload: Vec<u8> = (0..3u8).flat_map(|row| [0, 0x3C, row, 0x5A, 0xFF, 7]).collect();
        payload.extend_from_slice(&(entries.len() as u32).to_le_bytes());
        for (index, value) in entries {
            payload.extend_from_slice(&index.to_le_bytes());
            payload.extend_from_slice(&[value, 0x40]);
        }
        let from = decoded(Dtype::Q1s, &payload, 3, 32);
        let picked = rows(Dtype::Q1s, &payload, 3, 32, &[0, 2]).unwrap();
        assert!(decoded(Dtype::Q1s, &picked, 2, 32) == [from[0].clone(), from[2].clone()]);
        assert_eq!(picked.len(), 2 * Q1_TILE + 4 + 4 * Q1S_ENTRY);
        let mut outside = payload.clone();
        let last = outside.len() - Q1S_ENTRY;
        outside[last..][..4].copy_from_slice(&96u32.to_le_bytes());
        assert_eq!(rows(Dtype::Q1s, &outside, 3, 32, &[0]).unwrap_err().kind, Kind::Parse);

        // vbit_ro: bytes between rows, which mean nothing and are not taken along.
        let packed = [vec![0x11; 12], vec![0xEE; 5], vec![0x22; 16], vec![0x33; 32]].concat();
        let mut payload = vec![3, 4, 8];
        payload.extend_from_slice(&[0, 0x3C].repeat(3));
        for offset in [0u32, 17, 33, 65] {
            payload.extend_from_slice(&offset.to_le_bytes());
        }
        payload.extend_from_slice(&packed);
        let from = decoded(Dtype::VbitRo, &payload, 3, 32);
        let picked = rows(Dtype::VbitRo, &payload, 3, 32, &[0, 2]).unwrap();
        assert!(decoded(Dtype::VbitRo, &picked, 2, 32) == [from[0].clone(), from[2].clone()]);
        assert_eq!(picked.len(), 2 + 4 + 12 + 12 + 32);
        let offset = 3 + 6 + 4;
        payload[offset..][..4].copy_from_slice(&40u32.to_le_bytes());
        assert_eq!(
            rows(Dtype::VbitRo, &payload, 3, 32, &[0]).unwrap_err().kind,
            Kind::Parse
        );
    }

    #[test]
    fn rows_that_share_groups_are_not_picked_as_bytes() {
        let payload = [vec![0x9A; 32], [0, 0x3C].repeat(2)].concat();
        let err = rows(Dtype::Q4Block, &payload, 5, 7, &[0]).unwrap_err();
        assert_eq!(err.kind, Kind::UnsupportedTensorType);
        // Decoded and encoded again they can be picked.
        let picked = rows_again((Dtype::Q4Block, &payload), (5, 7), &[1, 4]).unwrap();
        let (from, to) = (
            decoded(Dtype::Q4Block, &payload, 5, 7),
            decoded(Dtype::Q4Block, &picked, 2, 7),
        );
        for (old, new) in [&from[1], &from[4]].into_iter().zip(&to) {
            assert!(
                old.iter().zip(new).all(|(old, new)| (old - new).abs() <= 0.5),
                "{old:?} {new:?}"
            );
        }
    }

    #[test]
    fn columns_keep_widths_and_overlays() {
        let keep: Vec<usize> = (0..COLS).filter(|col| col % 3 != 1).collect();
        for dtype in Dtype::all() {
            let payload = payload(dtype);
            let from = decoded(dtype, &payload, ROWS, COLS);
            let picked = cols((dtype, &payload), (ROWS, COLS), &keep, dtype).unwrap();
            let to = decoded(dtype, &picked, ROWS, keep.len());
            let wanted: Vec<Vec<f32>> = from
                .iter()
                .map(|row| keep.iter().map(|&col| row[col]).collect())
                .collect();
            match dtype {
                // Scales of the same magnitudes: what was exact stays so.
                Dtype::F32 | Dtype::F16 | Dtype::Bf16 => assert!(to == wanted, "{}", dtype.name()),
                Dtype::Vbit | Dtype::VbitRo => assert_eq!(picked[..ROWS], payload[..ROWS], "{}", dtype.name()),
                _ => {}
            }
            let overlay = |payload: &[u8], keep: &[usize], cols| overlaid((dtype, payload), (ROWS, cols), keep);
            let whole: Vec<usize> = (0..keep.len()).collect();
            let (before, after) = (overlay(&payload, &keep, COLS), overlay(&picked, &whole, keep.len()));
            assert_eq!(before.is_some(), matches!(dtype, Dtype::Q1s | Dtype::Q1t));
            if let (Some(before), Some(after)) = (before, after) {
                assert!(
                    before > 0.0 && after > 0.0 && after <= before,
                    "{}: {before} {after}",
                    dtype.name()
                );
            }
        }
        let payload = payload(Dtype::F16);
        let err = cols((Dtype::F16, &payload), (ROWS, COLS), &[COLS], Dtype::F16).unwrap_err();
        assert_eq!(err.kind, Kind::Bounds);
    }
}

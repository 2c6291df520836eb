//! Selecting columns of a stored matrix, and rows that share groups, by decoding and encoding.

use crate::dtype::Dtype;
use crate::dtype::encode::{Settings, encode_with};
use crate::error::{Result, bail};

/// The payload with only the columns `keep`, decoded and encoded in type `to`. Rows of vbit keep their widths, and the fraction
/// of weights in an overlay stays the same as before in the kept columns.
///
/// Errors: `Bounds` for a column out of range; those of decoding and encoding.
pub(super) fn cols(
    (dtype, payload): (Dtype, &[u8]),
    (rows, cols): (usize, usize),
    keep: &[usize],
    to: Dtype,
) -> Result<Vec<u8>> {
    let settings = dtype.settings_of(payload, (rows, cols), keep, to)?;
    let all: Vec<usize> = (0..rows).collect();
    again((dtype, payload), (rows, cols), (&all, keep), to, &settings)
}

/// The payload with only the rows `keep`, decoded and encoded in the same type: for types in which groups span rows.
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
    for (what, keep, count) in [("row", keep_rows, rows), ("column", keep_cols, cols)] {
        if let Some(at) = keep.iter().find(|&&at| at >= count) {
            bail!(Bounds, "{what} {at}, the matrix has {count}");
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::encode::encode;
    use crate::error::Kind;

    const ROWS: usize = 7;
    const COLS: usize = 96;

    /// Weights with a few outliers; all rows differ.
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
    fn selected_rows_of_every_type_have_their_old_values() {
        for dtype in Dtype::all().filter(|dtype| dtype.has_encoder()) {
            let payload = payload(dtype);
            let from = decoded(dtype, &payload, ROWS, COLS);
            for keep in [&[0, 2, 3, 6][..], &[6], &[0], &[1, 2, 3, 4, 5], &[0, 1, 2, 3, 4, 5, 6]] {
                let picked = dtype.select_rows(&payload, ROWS, COLS, keep).unwrap();
                let to = decoded(dtype, &picked, keep.len(), COLS);
                let wanted: Vec<_> = keep.iter().map(|&row| from[row].clone()).collect();
                assert!(to == wanted, "{} {keep:?}", dtype.name());
                if keep.len() == ROWS {
                    assert!(
                        picked == payload,
                        "{}: selecting all rows changes nothing",
                        dtype.name()
                    );
                }
            }
            for keep in [&[7][..], &[2, 1], &[3, 3]] {
                let err = dtype.select_rows(&payload, ROWS, COLS, keep).unwrap_err();
                assert_eq!(err.kind, Kind::Bounds, "{} {keep:?}: {err}", dtype.name());
            }
            for cut in [0, 1, payload.len() / 2, payload.len() - 1] {
                assert!(
                    dtype.select_rows(&payload[..cut], ROWS, COLS, &[0, 6]).is_err(),
                    "{} of {cut} bytes",
                    dtype.name()
                );
            }
        }
    }

    #[test]
    fn unusual_tables_are_read_as_by_decoders() {
        // q1s: entries out of order, two for one weight, and entries in each of three rows.
        let entries = [(65u32, 1u8), (1, 2), (65, 3), (40, 4), (95, 5)];
        let mut payload: Vec<u8> = (0..3u8).flat_map(|row| [0, 0x3C, row, 0x5A, 0xFF, 7]).collect();
        payload.extend_from_slice(&(entries.len() as u32).to_le_bytes());
        for (index, value) in entries {
            payload.extend_from_slice(&index.to_le_bytes());
            payload.extend_from_slice(&[value, 0x40]);
        }
        let from = decoded(Dtype::Q1s, &payload, 3, 32);
        let picked = Dtype::Q1s.select_rows(&payload, 3, 32, &[0, 2]).unwrap();
        assert!(decoded(Dtype::Q1s, &picked, 2, 32) == [from[0].clone(), from[2].clone()]);
        assert_eq!(picked.len(), 2 * 6 + 4 + 4 * 6);
        let mut outside = payload.clone();
        let last = outside.len() - 6;
        outside[last..][..4].copy_from_slice(&96u32.to_le_bytes());
        assert_eq!(
            Dtype::Q1s.select_rows(&outside, 3, 32, &[0]).unwrap_err().kind,
            Kind::Parse
        );

        // vbit_ro: bytes between rows, which are unused and not copied.
        let packed = [vec![0x11; 12], vec![0xEE; 5], vec![0x22; 16], vec![0x33; 32]].concat();
        let mut payload = vec![3, 4, 8];
        payload.extend_from_slice(&[0, 0x3C].repeat(3));
        for offset in [0u32, 17, 33, 65] {
            payload.extend_from_slice(&offset.to_le_bytes());
        }
        payload.extend_from_slice(&packed);
        let from = decoded(Dtype::VbitRo, &payload, 3, 32);
        let picked = Dtype::VbitRo.select_rows(&payload, 3, 32, &[0, 2]).unwrap();
        assert!(decoded(Dtype::VbitRo, &picked, 2, 32) == [from[0].clone(), from[2].clone()]);
        assert_eq!(picked.len(), 2 + 4 + 12 + 12 + 32);
        let offset = 3 + 6 + 4;
        payload[offset..][..4].copy_from_slice(&40u32.to_le_bytes());
        assert_eq!(
            Dtype::VbitRo.select_rows(&payload, 3, 32, &[0]).unwrap_err().kind,
            Kind::Parse
        );
    }

    #[test]
    fn rows_that_share_groups_are_not_picked_as_bytes() {
        let payload = [vec![0x9A; 32], [0, 0x3C].repeat(2)].concat();
        let err = Dtype::Q4Block.select_rows(&payload, 5, 7, &[0]).unwrap_err();
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
        for dtype in Dtype::all().filter(|dtype| dtype.has_encoder()) {
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
            let share = |payload: &[u8], keep: &[usize], cols| {
                let settings = dtype.settings_of(payload, (ROWS, cols), keep, dtype).unwrap();
                settings.outliers
            };
            let whole: Vec<usize> = (0..keep.len()).collect();
            let (before, after) = (share(&payload, &keep, COLS), share(&picked, &whole, keep.len()));
            if matches!(dtype, Dtype::Q1s | Dtype::Q1t) {
                assert!(
                    before > 0.0 && after > 0.0 && after <= before,
                    "{}: {before} {after}",
                    dtype.name()
                );
            } else {
                assert_eq!([before, after], [Settings::OUTLIERS; 2], "{}", dtype.name());
            }
        }
        let payload = payload(Dtype::F16);
        let err = cols((Dtype::F16, &payload), (ROWS, COLS), &[COLS], Dtype::F16).unwrap_err();
        assert_eq!(err.kind, Kind::Bounds);
    }
}

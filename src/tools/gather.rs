//! Picking rows and columns of a stored matrix. Rows are picked as bytes where the type keeps rows apart.

use crate::dtype::Dtype;
use crate::dtype::encode::encode;
use crate::error::{Result, bail};

/// Columns that share a scale in the group types.
const GROUP: usize = 32;

/// The payload with the rows `keep`, in that order, of a `rows` × `cols` payload: the same codes and scales.
///
/// Errors: `Bounds` for a row that is not there; `UnsupportedTensorType` for a type whose rows are not apart.
pub(super) fn rows(dtype: Dtype, payload: &[u8], rows: usize, cols: usize, keep: &[usize]) -> Result<Vec<u8>> {
    let groups = cols / GROUP;
    // Bytes a row has in each plane, and whether whole groups are needed for that; then bytes that all rows share.
    let (planes, shared): (&[usize], usize) = match dtype {
        Dtype::F32 => (&[4 * cols], 0),
        Dtype::F16 | Dtype::Bf16 => (&[2 * cols], 0),
        Dtype::Q8Row => (&[cols, 2], 0),
        Dtype::Q82f => (&[cols, 2], 2 * cols),
        Dtype::Q4Block if cols.is_multiple_of(GROUP) => (&[16 * groups, 2 * groups], 0),
        Dtype::Q4Tiled => (&[18 * groups], 0),
        Dtype::Q1 => (&[6 * groups], 0),
        Dtype::Q4tp => (&[16 * groups, 4, (5 * groups).div_ceil(8)], 0),
        _ => bail!(
            UnsupportedTensorType,
            "rows of {} with {cols} columns are not apart and cannot be picked",
            dtype.name()
        ),
    };
    let mut rest = payload;
    let mut picked = Vec::new();
    for &bytes in planes {
        let Some((plane, after)) = rest.split_at_checked(rows * bytes) else {
            bail!(
                Bounds,
                "a payload of {} bytes is too short for {rows} rows",
                payload.len()
            );
        };
        rest = after;
        for &row in keep {
            let Some(row) = plane.chunks_exact(bytes).nth(row) else {
                bail!(Bounds, "row {row} of {rows}");
            };
            picked.extend_from_slice(row);
        }
    }
    if rest.len() != shared {
        bail!(Bounds, "{} bytes follow the rows, wanted {shared}", rest.len());
    }
    picked.extend_from_slice(rest);
    Ok(picked)
}

/// The payload in type `to` with the columns `keep`: decoded, picked, encoded.
///
/// Errors: `Bounds` for a column that is not there; those of decoding and encoding.
pub(super) fn cols(
    (dtype, payload): (Dtype, &[u8]),
    (rows, cols): (usize, usize),
    keep: &[usize],
    to: Dtype,
) -> Result<Vec<u8>> {
    if let Some(col) = keep.iter().find(|&&col| col >= cols) {
        bail!(Bounds, "column {col} of {cols}");
    }
    let decoder = dtype.decoder(payload, rows, cols)?;
    let read = |first: usize, out: &mut [f32]| {
        let mut whole = vec![0f32; cols];
        for (row, picked) in (first..rows).zip(out.chunks_mut(keep.len())) {
            decoder.row(row, &mut whole);
            picked
                .iter_mut()
                .zip(keep)
                .for_each(|(picked, &col)| *picked = whole[col]);
        }
        Ok(())
    };
    encode(to, rows, keep.len(), &read)
}

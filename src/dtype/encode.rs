//! From f32 weights to payloads. Knows no file, no model and no device.
//!
//! Weights are read in blocks of rows, so that memory holds the payload and one small block per thread. Every stored scale is
//! rounded to f16 before codes are chosen, and codes are chosen against the rounded scale.

#[cfg(test)]
mod tests;

pub use super::quantise::widths::spread;
pub use super::quantise::{Read, Settings};

use super::quantise::{Weights, widths};
use super::spec::{Encode, Shapes, Size};
use super::table::Dtype;
use crate::error::{Error, Kind, Result, bail};

/// Tensors with fewer elements than this are f16, as every vector is.
const SMALL: u64 = 32;

/// The type in which a tensor of `shape` is stored when `requested` was asked for.
///
/// Vectors, scalars and tensors of fewer than 32 elements are always f16. A matrix whose columns the type cannot hold, because
/// they are not whole groups of 32 or too many, falls back to q8_2f. A tensor of another rank falls back to f16 when the type
/// needs a matrix.
pub fn storage_dtype(requested: Dtype, shape: &[u64]) -> Dtype {
    // A product that overflows u64 is not small.
    let small = shape
        .iter()
        .try_fold(1u64, |n, &d| n.checked_mul(d))
        .is_some_and(|n| n < SMALL);
    if small || shape.len() < 2 {
        return Dtype::F16;
    }
    let spec = requested.spec();
    let ragged = |cols: u64| spec.shapes == Shapes::GroupRows && !cols.is_multiple_of(32);
    match *shape {
        [_, cols] if ragged(cols) || cols > spec.max_cols => Dtype::Q82f,
        [_, _] => requested,
        _ if matches!(spec.shapes, Shapes::Matrix | Shapes::GroupRows) => Dtype::F16,
        _ => requested,
    }
}

/// The payload of a `rows` × `cols` matrix in `dtype`, with default [`Settings`]. Errors: those of [`encode_with`].
pub fn encode(dtype: Dtype, rows: usize, cols: usize, read: &Read) -> Result<Vec<u8>> {
    encode_with(dtype, rows, cols, &Settings::default(), read)
}

/// The payload of a `rows` × `cols` matrix in `dtype`.
///
/// Errors: those of `read`; `UnsupportedTensorType` for a type without an encoder, a value or a size that the type cannot hold; `NonFinite` for a value
/// that is not a finite number; `Parse` for a shape the type does not allow, and for settings whose lengths do not fit it;
/// `Usage` for a mean or a fraction out of range.
pub fn encode_with(dtype: Dtype, rows: usize, cols: usize, settings: &Settings, read: &Read) -> Result<Vec<u8>> {
    let (Size::Exact(bytes) | Size::AtLeast(bytes)) = dtype.size(&[rows as u64, cols as u64])?;
    let weights = Weights { rows, cols, read };
    match dtype.spec().encode {
        Encode::Exact(fill) => {
            let bytes = usize::try_from(bytes)
                .map_err(|_| Error::new(Kind::Bounds, format!("{bytes} bytes exceed the address space")))?;
            let mut payload = vec![0; bytes];
            fill(&weights, &mut payload)?;
            Ok(payload)
        }
        Encode::Sized(make) => make(&weights, settings),
        Encode::Never => bail!(UnsupportedTensorType, "{} is read and never written", dtype.name()),
    }
}

/// The amplitude of each row of a `rows` × `cols` matrix, for [`spread`]: rounding errors of a row are in proportion to it.
///
/// Errors: those of `read`, `NonFinite`, `Parse` for a matrix without elements.
pub fn amplitudes(rows: usize, cols: usize, read: &Read) -> Result<Vec<f64>> {
    Dtype::F32.size(&[rows as u64, cols as u64])?;
    widths::amplitudes(&Weights { rows, cols, read })
}

//! From f32 weights to the payload of an element type. Knows no file, no model and no device.
//!
//! Source values are pulled in blocks of rows, so that memory is the payload and one small block per thread. Every stored
//! scale is rounded to f16 before codes are chosen, and codes are chosen against the rounded scale. The same weights give
//! the same bytes, whatever the number of threads.

mod float;
mod q4;
mod q4tp;
mod q8;
#[cfg(test)]
mod tests;

use super::{Dtype, Size};
use crate::error::{Error, Kind, Result, bail};
use half::f16;
use rayon::prelude::*;

/// Weights per scale of the group types.
const GROUP: usize = 32;

/// Weights a thread holds at a time, unless one row has more.
const BLOCK: usize = 1 << 18;

/// Tensors with fewer elements than this are f16, as every vector is.
const SMALL: u64 = 32;

/// The type in which a tensor of `shape` is stored when `requested` was asked for.
///
/// Vectors, scalars and tensors of fewer than 32 elements are always f16. A matrix whose rows are no whole groups of 32
/// falls back to q8_2f when the type needs groups, and a tensor of another rank falls back to f16 when the type needs a
/// matrix.
pub fn storage_dtype(requested: Dtype, shape: &[u64]) -> Dtype {
    // A product too large for u64 is not small.
    let small = shape
        .iter()
        .try_fold(1u64, |n, &d| n.checked_mul(d))
        .is_some_and(|n| n < SMALL);
    if small || shape.len() < 2 {
        return Dtype::F16;
    }
    let needs_matrix = matches!(requested, Dtype::Q8Row | Dtype::Q82f) || requested.needs_group_rows();
    match *shape {
        [_, cols] if requested.needs_group_rows() && !cols.is_multiple_of(GROUP as u64) => Dtype::Q82f,
        [_, _] => requested,
        _ if needs_matrix => Dtype::F16,
        _ => requested,
    }
}

/// The payload of a `rows` × `cols` matrix in `dtype`.
///
/// `read(first, out)` writes the rows from `first` on to `out`, as many as fit; it is called from several threads and may
/// be asked for a row twice. Errors: those of `read`; `UnsupportedTensorType` for a type that cannot be written or a value
/// it cannot hold; `NonFinite` for a value that is no finite number; `Parse` for a shape the type does not allow.
pub fn encode(
    dtype: Dtype,
    rows: usize,
    cols: usize,
    read: &(dyn Fn(usize, &mut [f32]) -> Result<()> + Sync),
) -> Result<Vec<u8>> {
    let size = dtype.size(&[rows as u64, cols as u64])?;
    let source = Source { rows, cols, read };
    let payload = |encode: fn(&Source, &mut [u8]) -> Result<()>| {
        let Size::Exact(bytes) = size else {
            bail!(UnsupportedTensorType, "{} has no fixed size", dtype.name());
        };
        let bytes =
            usize::try_from(bytes).map_err(|_| Error::new(Kind::Bounds, format!("{bytes} bytes do not fit")))?;
        let mut payload = vec![0; bytes];
        encode(&source, &mut payload)?;
        Ok(payload)
    };
    match dtype {
        Dtype::F32 => payload(float::f32),
        Dtype::F16 => payload(float::f16),
        Dtype::Bf16 => payload(float::bf16),
        Dtype::Q8Row => payload(q8::q8_row),
        Dtype::Q82f => payload(q8::q8_2f),
        Dtype::Q4Block => payload(q4::q4_block),
        Dtype::Q4Tiled => payload(q4::q4_tiled),
        Dtype::Q4tp => payload(q4tp::q4tp),
        Dtype::Vbit | Dtype::VbitRo | Dtype::Q1 | Dtype::Q1s | Dtype::Q1t => {
            bail!(UnsupportedTensorType, "{} cannot be written yet", dtype.name())
        }
    }
}

/// The weights to encode.
struct Source<'a> {
    rows: usize,
    cols: usize,
    read: &'a (dyn Fn(usize, &mut [f32]) -> Result<()> + Sync),
}

impl Source<'_> {
    /// Rows per block, a function of the shape alone. Blocks of ragged rows are multiples of 32 rows, so that groups over the
    /// flattened matrix never cross blocks.
    fn block_rows(&self) -> usize {
        let multiple = if self.cols.is_multiple_of(GROUP) { 1 } else { GROUP };
        (BLOCK / self.cols).next_multiple_of(multiple).max(multiple)
    }

    /// The finite values of the block that starts at row `first`.
    fn block(&self, first: usize) -> Result<Vec<f32>> {
        let rows = self.block_rows().min(self.rows - first);
        let mut values = vec![0.0; rows * self.cols];
        (self.read)(first, &mut values)?;
        match values.iter().position(|value| !value.is_finite()) {
            Some(at) => Err(self.refuse(Kind::NonFinite, first, at, "wanted a finite weight", values[at])),
            None => Ok(values),
        }
    }

    /// An error about the `at`-th value of the block that starts at row `first`.
    fn refuse(&self, kind: Kind, first: usize, at: usize, wanted: &str, found: f32) -> Error {
        let (row, col) = (first + at / self.cols, at % self.cols);
        Error::new(kind, format!("row {row}, col {col}: {wanted}, found {found:e}"))
    }

    /// `f(first row, values)` of every block, in order. Of several errors the one of the first block counts.
    fn map<T: Send>(&self, f: impl Fn(usize, &[f32]) -> Result<T> + Sync) -> Result<Vec<T>> {
        let firsts: Vec<usize> = (0..self.rows).step_by(self.block_rows()).collect();
        let results: Vec<Result<T>> = firsts
            .into_par_iter()
            .map(|first| self.block(first).and_then(|values| f(first, &values)))
            .collect();
        results.into_iter().collect()
    }

    /// Lets `encode(first row, values, planes)` write every block's part of the planes that make up the payload.
    ///
    /// `plane_bytes(rows)` is how much of each plane the first `rows` rows take, for whole blocks and the whole matrix.
    fn fill<const PLANES: usize>(
        &self,
        mut payload: &mut [u8],
        plane_bytes: impl Fn(usize) -> [usize; PLANES],
        encode: impl Fn(usize, &[f32], [&mut [u8]; PLANES]) -> Result<()> + Sync,
    ) -> Result<()> {
        let block_bytes = plane_bytes(self.block_rows());
        let mut index = 0;
        let mut planes = plane_bytes(self.rows).map(|bytes| {
            let (plane, rest) = std::mem::take(&mut payload).split_at_mut(bytes);
            payload = rest;
            index += 1;
            plane.chunks_mut(block_bytes[index - 1])
        });
        let blocks: Vec<(usize, [&mut [u8]; PLANES])> = (0..self.rows)
            .step_by(self.block_rows())
            .map(|first| (first, planes.each_mut().map(|plane| plane.next().unwrap_or_default())))
            .collect();
        let results: Vec<Result<()>> = blocks
            .into_par_iter()
            .map(|(first, planes)| self.block(first).and_then(|values| encode(first, &values, planes)))
            .collect();
        results.into_iter().collect()
    }
}

/// The smallest f16 that is at least `x`, for x ≥ 0; infinite where there is none.
///
/// As a scale it never clips the largest weight, not even where f16 is coarse.
fn half_up(x: f64) -> f16 {
    let nearest = f16::from_f64(x);
    if nearest.to_f64() < x {
        f16::from_bits(nearest.to_bits() + 1)
    } else {
        nearest
    }
}

/// The nearest integer, for |x| < 2^22; ties to even. Unlike `f32::round_ties_even` it is two additions on any CPU.
fn round(x: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0; // 1.5 · 2^23: the last bit of the sum is worth 1.
    (x + SHIFT) - SHIFT
}

/// The largest magnitude.
fn absmax(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |max, value| max.max(value.abs()))
}

//! From f32 weights to the payload of an element type. Knows no file, no model and no device.
//!
//! Source values are pulled in blocks of rows, so that memory is the payload and one small block per thread. Every stored
//! scale is rounded to f16 before codes are chosen, and codes are chosen against the rounded scale. The same weights give
//! the same bytes, whatever the number of threads.

mod float;
mod levels;
mod outliers;
mod q1;
mod q4;
mod q4tp;
mod q8;
#[cfg(test)]
mod tests;
mod vbit;
mod widths;

pub use widths::spread;

use super::{Dtype, Size};
use crate::error::{Error, Kind, Result};
use half::f16;
use rayon::prelude::*;

/// Weights per scale of the group types.
const GROUP: usize = 32;

/// Weights a thread holds at a time, unless one row has more.
const BLOCK: usize = 1 << 18;

/// Tensors with fewer elements than this are f16, as every vector is.
const SMALL: u64 = 32;

/// What the encoders of some types can be told.
#[derive(Clone, Copy, Debug)]
pub struct Settings<'a> {
    /// vbit: the mean bits of a weight, 3 to 8, scales not counted.
    pub mean_bits: f64,
    /// vbit: the bits of every row, where they are not to follow from `mean_bits`; see [`spread`].
    pub widths: Option<&'a [u8]>,
    /// q1s, q1t: the largest fraction of the weights that is kept as f16 outside of the groups. In q1s each costs 48 bits, in q1t 32.
    pub outliers: f64,
    /// q1s, q1t: the root mean square of each column's input, by which weights count when outliers are chosen.
    pub rms: Option<&'a [f32]>,
}

impl Settings<'_> {
    /// Beside the 0.5 bits of its scales a weight of vbit takes as much as one of q4_block and a quarter bit more.
    pub const MEAN_BITS: f64 = 4.25;

    /// One weight in a hundred: q1s takes 1.98 bits a weight, q1t 2.57.
    pub const OUTLIERS: f64 = 0.01;
}

impl Default for Settings<'_> {
    fn default() -> Self {
        Settings {
            mean_bits: Self::MEAN_BITS,
            widths: None,
            outliers: Self::OUTLIERS,
            rms: None,
        }
    }
}

/// The type in which a tensor of `shape` is stored when `requested` was asked for.
///
/// Vectors, scalars and tensors of fewer than 32 elements are always f16. A matrix whose rows are no whole groups of 32
/// falls back to q8_2f when the type needs groups, one of more columns than q1t can number does so too, and a tensor of
/// another rank falls back to f16 when the type needs a matrix.
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
        [_, cols] if requested == Dtype::Q1t && cols > q1::Q1T_COLS as u64 => Dtype::Q82f,
        [_, _] => requested,
        _ if needs_matrix => Dtype::F16,
        _ => requested,
    }
}

/// Reads rows: `read(first, out)` writes the rows from `first` on to `out`, as many as fit. It is called from several threads
/// and may be asked for a row more than once.
pub type Read<'a> = dyn Fn(usize, &mut [f32]) -> Result<()> + Sync + 'a;

/// The payload of a `rows` × `cols` matrix in `dtype`, with default [`Settings`]. Errors: those of [`encode_with`].
pub fn encode(dtype: Dtype, rows: usize, cols: usize, read: &Read) -> Result<Vec<u8>> {
    encode_with(dtype, rows, cols, &Settings::default(), read)
}

/// The payload of a `rows` × `cols` matrix in `dtype`.
///
/// Errors: those of `read`; `UnsupportedTensorType` for a value or a size that the type cannot hold; `NonFinite` for a value
/// that is no finite number; `Parse` for a shape the type does not allow, and for widths or inputs that do not fit it;
/// `Usage` for a mean or a fraction out of range.
pub fn encode_with(dtype: Dtype, rows: usize, cols: usize, settings: &Settings, read: &Read) -> Result<Vec<u8>> {
    let size = dtype.size(&[rows as u64, cols as u64])?;
    let source = Source { rows, cols, read };
    let exact = |encode: fn(&Source, &mut [u8]) -> Result<()>| {
        let (Size::Exact(bytes) | Size::AtLeast(bytes)) = size;
        let bytes =
            usize::try_from(bytes).map_err(|_| Error::new(Kind::Bounds, format!("{bytes} bytes do not fit")))?;
        let mut payload = vec![0; bytes];
        encode(&source, &mut payload)?;
        Ok(payload)
    };
    let vbit = |table| match settings.widths {
        Some(widths) => vbit::encode(&source, widths, table),
        None => {
            let widths = spread(&widths::amplitudes(&source)?, settings.mean_bits)?;
            vbit::encode(&source, &widths, table)
        }
    };
    let score = || outliers::Score::new(settings.rms, cols);
    match dtype {
        Dtype::F32 => exact(float::f32),
        Dtype::F16 => exact(float::f16),
        Dtype::Bf16 => exact(float::bf16),
        Dtype::Q8Row => exact(q8::q8_row),
        Dtype::Q82f => exact(q8::q8_2f),
        Dtype::Q4Block => exact(q4::q4_block),
        Dtype::Q4Tiled => exact(q4::q4_tiled),
        Dtype::Q4tp => exact(q4tp::q4tp),
        Dtype::Vbit => vbit(false),
        Dtype::VbitRo => vbit(true),
        Dtype::Q1 => q1::q1(&source),
        Dtype::Q1s => q1::q1s(&source, &score()?, settings.outliers),
        Dtype::Q1t => q1::q1t(&source, &score()?, settings.outliers),
    }
}

/// How loud each row of a `rows` × `cols` matrix is, for [`spread`]: rounding errors of a row are in proportion to it.
///
/// Errors: those of `read`, `NonFinite`, `Parse` for a matrix without elements.
pub fn amplitudes(rows: usize, cols: usize, read: &Read) -> Result<Vec<f64>> {
    Dtype::F32.size(&[rows as u64, cols as u64])?;
    widths::amplitudes(&Source { rows, cols, read })
}

/// The weights to encode.
struct Source<'a> {
    rows: usize,
    cols: usize,
    read: &'a Read<'a>,
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

    /// Lets `encode(first row, values, planes)` write every block's part of the planes that make up the payload, and returns
    /// what it returned, in order. Of several errors the one of the first block counts.
    ///
    /// `plane_bytes(rows)` is how much of each plane the first `rows` rows take: nothing of 0, and all of all.
    fn fill<const PLANES: usize, T: Send>(
        &self,
        mut payload: &mut [u8],
        plane_bytes: impl Fn(usize) -> [usize; PLANES],
        encode: impl Fn(usize, &[f32], [&mut [u8]; PLANES]) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let mut planes = plane_bytes(self.rows).map(|bytes| {
            let (plane, rest) = std::mem::take(&mut payload).split_at_mut(bytes);
            payload = rest;
            plane
        });
        let mut blocks: Vec<(usize, [&mut [u8]; PLANES])> = Vec::new();
        for first in (0..self.rows).step_by(self.block_rows()) {
            let (start, end) = (
                plane_bytes(first),
                plane_bytes((first + self.block_rows()).min(self.rows)),
            );
            let mut index = 0;
            let parts = planes.each_mut().map(|plane| {
                let (part, rest) = std::mem::take(plane).split_at_mut(end[index] - start[index]);
                index += 1;
                *plane = rest;
                part
            });
            blocks.push((first, parts));
        }
        let results: Vec<Result<T>> = blocks
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

//! Weights of a graph: tensors stacked and cut into segments that one binding can hold, and vectors of f32.

use crate::dtype::planes::{Amount, Geometry, Measure, Planes, Source};
use crate::error::{Result, bail};
use crate::source::{Stored, TensorId, Tensors};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

/// Consecutive rows of one tensor in a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// The index of the tensor among the stacked tensors of the matrix.
    pub part: usize,
    /// The rows of the tensor.
    pub rows: Range<usize>,
    /// The space in the planes for these rows, or for other rows that can replace them.
    pub capacity: Amount,
}

/// The rows of a matrix that one binding holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// The first output that its rows compute.
    pub row0: u32,
    /// Its rows, in the order in which they are stored.
    pub runs: Vec<Run>,
    /// The sizes of its planes.
    pub geometry: Geometry,
    /// The first stored row of each of the first three tensors; `u32::MAX` if a tensor has no rows here and does not
    /// end before this segment.
    pub part_rows: [u32; 3],
}

/// How the rows of tensors make one weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stacking {
    /// The rows of one tensor, then those of the next.
    Rows,
    /// Two tensors with equally many rows. Each segment has the same rows of both.
    Pair,
    /// As [`Stacking::Pair`], but of the two halves of one tensor, which is named twice.
    Halves,
}

/// Tensors with one type and width, stacked into one weight.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    /// Its role, as in `layer.07.attn.qkv`.
    pub label: String,
    /// The stacked tensors.
    pub parts: Vec<TensorId>,
    /// Device layout.
    pub planes: Planes,
    /// Columns.
    pub cols: usize,
    /// The segments.
    pub segments: Vec<Segment>,
}

/// A tensor or zeros in a [`Vector`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The tensor; `None` for zeros.
    pub tensor: Option<TensorId>,
    /// Elements.
    pub len: usize,
}

/// 1-D tensors kept as f32, one after another, padded with zeros to a multiple of 32 elements.
#[derive(Clone, Debug, PartialEq)]
pub struct Vector {
    /// Its role, as in `layer.07.attn.norm`.
    pub label: String,
    /// The tensors.
    pub pieces: Vec<Piece>,
    /// Added to every element: 1 for norms that multiply by 1 + w.
    pub add: f32,
}

impl Vector {
    /// Whether it holds no tensor, only zeros.
    pub fn is_zero(&self) -> bool {
        self.pieces.iter().all(|piece| piece.tensor.is_none())
    }

    /// Elements with padding.
    pub fn padded_len(&self) -> usize {
        let len: usize = self.pieces.iter().map(|piece| piece.len).sum();
        len.next_multiple_of(32)
    }

    /// Its elements, padded. Errors: `Parse` for a tensor with another number of elements, and those of the payload.
    pub fn values(&self, tensors: &dyn Tensors) -> Result<Vec<f32>> {
        let mut values = Vec::with_capacity(self.padded_len());
        for piece in &self.pieces {
            let at = values.len();
            values.resize(at + piece.len, 0.0);
            if let Some(id) = piece.tensor {
                let stored = tensors.stored(id)?;
                let (rows, cols) = stored.info.rows_cols();
                let (name, len) = (&stored.info.name, rows * cols);
                if len != piece.len {
                    bail!(Parse, "tensor '{name}' has {len} elements, expected {}", piece.len);
                }
                let decoder = stored.decoder()?;
                for (row, out) in values[at..].chunks_exact_mut(cols).enumerate() {
                    decoder.row(row, out);
                }
                values[at..].iter_mut().for_each(|value| *value += self.add);
            }
        }
        values.resize(self.padded_len(), 0.0);
        Ok(values)
    }
}

impl Segment {
    /// The segment of a matrix of so many tensors whose first output is `row0`.
    pub(super) fn new((planes, cols): (Planes, usize), parts: usize, row0: usize, runs: Vec<Run>) -> Segment {
        let mut part_rows = [u32::MAX; 3];
        let mut rows = 0;
        for run in &runs {
            // Kernels need the first three tensors only: with more of them, the layout has no column scales.
            if let Some(first) = part_rows.get_mut(run.part) {
                *first = rows as u32;
            }
            rows += run.rows.len();
        }
        // A tensor that ends before this segment begins at its first row, so that no row belongs to it.
        let ended = runs.first().map_or(0, |run| run.part.min(3));
        part_rows[..ended].fill(0);
        Segment {
            row0: row0 as u32,
            geometry: Geometry {
                planes,
                rows,
                cols,
                parts,
                amount: runs.iter().map(|run| run.capacity).sum(),
            },
            runs,
            part_rows,
        }
    }

    /// Whether each of its planes fits into `limit` bytes.
    pub(super) fn fits(&self, limit: u64) -> bool {
        self.geometry.code_bytes().max(self.geometry.scale_bytes()) as u64 <= limit
    }

    /// The fewest segments of so many outputs that fit, cut at multiples of `granule`. `None` if one granule does not fit.
    pub(super) fn cut(
        outputs: usize,
        granule: usize,
        limit: u64,
        segment: impl Fn(Range<usize>) -> Segment,
    ) -> Option<Vec<Segment>> {
        let mut segments = Vec::new();
        let mut first = 0;
        while first < outputs {
            let until = |granules: usize| (first + granules * granule).min(outputs);
            // Binary search finds how many granules fit.
            let (mut low, mut high) = (0, (outputs - first).div_ceil(granule));
            while low < high {
                let middle = (low + high).div_ceil(2);
                match segment(first..until(middle)).fits(limit) {
                    true => low = middle,
                    false => high = middle - 1,
                }
            }
            if low == 0 {
                return None;
            }
            segments.push(segment(first..until(low)));
            first = until(low);
        }
        Some(segments)
    }

    /// The number of rows that are stored before a run, and their space in the planes.
    pub fn before(&self, run: usize) -> (usize, Amount) {
        let before = self.runs.iter().take(run);
        before.fold((0, Amount::default()), |(rows, capacity), run| {
            (rows + run.rows.len(), capacity + run.capacity)
        })
    }
}

/// The device layout of a tensor. Errors: `UnsupportedTensorType` with the tensor's name.
pub fn planes(tensors: &dyn Tensors, tensor: TensorId) -> Result<Planes> {
    let info = &tensors.infos()[tensor];
    Planes::of(info.dtype, info.rows_cols().1).map_err(|err| err.context(format!("tensor '{}'", info.name)))
}

/// Whether another tensor can be stacked after this number of rows. With column scales the number must be a multiple
/// of 4, because a kernel uses the column scales of one tensor for four rows.
pub fn may_follow(planes: Planes, rows: usize) -> bool {
    !planes.has_column_scales() || rows.is_multiple_of(4)
}

impl Matrix {
    /// Whether both have the same rows in the same order and segments.
    pub fn is_same(&self, other: &Matrix) -> bool {
        let segments = self.segments.iter().map(|segment| (segment.row0, &segment.runs));
        let others = other.segments.iter().map(|segment| (segment.row0, &segment.runs));
        self.parts == other.parts && self.planes == other.planes && segments.eq(others)
    }

    /// Stacks tensors of one device layout and width, in segments with planes of at most `max_binding` bytes.
    ///
    /// Errors: `UnsupportedTensorType` for a type without kernels and for a tensor that cannot follow the one before
    /// it, `OutOfMemory` if 32 rows do not fit, and those of the payloads, if the rows of the type vary in size.
    pub fn stack(
        label: String,
        parts: &[TensorId],
        stacking: Stacking,
        tensors: &dyn Tensors,
        max_binding: u64,
    ) -> Result<Matrix> {
        let shapes: Vec<_> = parts.iter().map(|&id| tensors.infos()[id].rows_cols()).collect();
        let cols = shapes[0].1;
        let planes = planes(tensors, parts[0])?;
        let outputs: usize = match stacking {
            Stacking::Rows => shapes.iter().map(|shape| shape.0).sum(),
            Stacking::Pair => shapes[0].0,
            Stacking::Halves => shapes[0].0 / 2,
        };
        let mut before = 0;
        for (rows, _) in &shapes {
            if stacking == Stacking::Rows && !may_follow(planes, before) {
                bail!(
                    UnsupportedTensorType,
                    "{label}: a tensor of {} weights after {before} rows of other tensors, expected a multiple of 4",
                    planes.name()
                );
            }
            before += rows;
        }
        // The contents of tensors are needed only if the rows of the type vary in size.
        let stored = match planes.varies() {
            true => stored(parts, tensors)?,
            false => Vec::new(),
        };
        let sources = sources(planes, &stored)?;
        let segment = |here: Range<usize>| {
            let mut runs = runs(&shapes, stacking, outputs, here.clone());
            for run in &mut runs {
                let source = sources.get(run.part);
                run.capacity = source.map_or(Amount::default(), |source| source.amount(run.rows.clone()));
            }
            Segment::new((planes, cols), parts.len(), here.start, runs)
        };
        let Some(segments) = Segment::cut(outputs, 32, max_binding, segment) else {
            bail!(
                OutOfMemory,
                "{label}: 32 rows do not fit into a binding, which has at most {max_binding} bytes"
            );
        };
        Ok(Matrix {
            label,
            parts: parts.to_vec(),
            planes,
            cols,
            segments,
        })
    }
}

/// The rows that compute the outputs `here`, in the order in which they are stored. Their capacity is not set.
fn runs(shapes: &[(usize, usize)], stacking: Stacking, outputs: usize, here: Range<usize>) -> Vec<Run> {
    let mut runs = Vec::new();
    let mut begin = 0;
    for (part, shape) in shapes.iter().enumerate() {
        let rows = match stacking {
            Stacking::Rows => {
                let (first, last) = (here.start.max(begin), here.end.min(begin + shape.0));
                first.saturating_sub(begin)..last.saturating_sub(begin)
            }
            Stacking::Pair => here.clone(),
            Stacking::Halves => part * outputs + here.start..part * outputs + here.end,
        };
        if !rows.is_empty() {
            let capacity = Amount::default();
            runs.push(Run { part, rows, capacity });
        }
        begin += shape.0;
    }
    runs
}

/// Tensors with their payloads. Errors: those of [`Tensors::stored`].
pub fn stored<'a>(parts: &[TensorId], tensors: &'a dyn Tensors) -> Result<Vec<Stored<'a>>> {
    parts.iter().map(|&id| tensors.stored(id)).collect()
}

/// Opens tensors for repacking. Errors: as for [`source`].
pub fn sources<'a>(planes: Planes, stored: &'a [Stored]) -> Result<Vec<Source<'a>>> {
    stored.iter().map(|stored| source(planes, stored)).collect()
}

/// Opens a tensor for repacking. Errors, with the tensor's name: `UnsupportedTensorType` if its layout is not
/// `planes`, and those of the payload.
pub fn source<'a>(planes: Planes, stored: &'a Stored) -> Result<Source<'a>> {
    let open = || {
        let source = stored.source()?;
        if source.planes() != planes {
            let (is, wanted) = (source.planes().name(), planes.name());
            bail!(
                UnsupportedTensorType,
                "the device layout of {} weights is {is}, expected {wanted}",
                stored.info.dtype.name()
            );
        }
        Ok(source)
    };
    open().map_err(|err| err.context(format!("tensor '{}'", stored.info.name)))
}

/// The sizes of the rows of experts, for types whose rows vary in size. They are measured once for all plans of a
/// network.
#[derive(Default)]
pub struct Measured(RefCell<HashMap<TensorId, Rc<Measure>>>);

impl Measured {
    /// The sizes of the rows of a tensor. Errors: as for [`source`].
    pub fn of(&self, planes: Planes, tensor: TensorId, tensors: &dyn Tensors) -> Result<Rc<Measure>> {
        if let Some(known) = self.0.borrow().get(&tensor) {
            return Ok(known.clone());
        }
        let measure = Rc::new(source(planes, &tensors.stored(tensor)?)?.into_measure());
        tensors.release(tensor);
        self.0.borrow_mut().insert(tensor, measure.clone());
        Ok(measure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::error::Kind;
    use crate::source::MemoryTensors;

    #[test]
    fn column_scales_of_two_tensors_do_not_meet_in_four_rows() {
        let bytes = |rows: usize| vec![0; rows * 32 + rows * 2 + 64];
        let tensor = |rows: usize| (format!("of {rows}"), Dtype::Q82f, vec![rows as u64, 32], bytes(rows));
        let tensors = MemoryTensors::new([8, 6, 4].map(tensor)).unwrap();
        let stack = |parts: &[TensorId]| Matrix::stack("m".into(), parts, Stacking::Rows, &tensors, 1 << 20);
        assert!(stack(&[0, 1]).is_ok() && stack(&[2, 0, 1]).is_ok());
        for parts in [&[1, 0][..], &[0, 1, 2]] {
            let err = stack(parts).unwrap_err();
            assert!(
                err.kind == Kind::UnsupportedTensorType && err.message.contains("multiple of 4"),
                "{err}"
            );
        }
    }
}

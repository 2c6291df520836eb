//! Weights as a plan names them: tensors stacked and cut into what one binding holds, and vectors as the numbers they are.
//! No device here, and no step.

use super::{Matrix, Run, Segment, Stacking, Vector};
use crate::container::{TensorId, Tensors};
use crate::dtype::planes::{Amount, Geometry, Measure, Planes, Source};
use crate::error::{Result, bail};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

/// The device layout of a tensor. Errors: `UnsupportedTensorType` with the tensor's name.
pub(super) fn planes(tensors: &dyn Tensors, tensor: TensorId) -> Result<Planes> {
    let info = &tensors.infos()[tensor];
    Planes::of(info.dtype, info.rows_cols().1).map_err(|err| err.context(format!("tensor '{}'", info.name)))
}

/// Whether rows of another tensor can be stacked behind so many: where scales are by column, kernels take those of one tensor
/// for four rows.
pub(super) fn may_follow(planes: Planes, rows: usize) -> bool {
    !planes.has_column_scales() || rows.is_multiple_of(4)
}

impl Matrix {
    /// Whether both hold the same rows in the same places.
    pub(super) fn is_same(&self, other: &Matrix) -> bool {
        let runs = |matrix: &Matrix| {
            matrix
                .segments
                .iter()
                .map(|s| (s.row0, s.runs.clone()))
                .collect::<Vec<_>>()
        };
        self.parts == other.parts && self.planes == other.planes && runs(self) == runs(other)
    }

    /// Stacks tensors of one device layout and width, in segments of at most `max_binding` bytes a plane. Both
    /// tensors of a pair are cut at the same rows.
    ///
    /// Errors: `UnsupportedTensorType` for a type without kernels and for tensors that cannot follow others, `OutOfMemory` when not even 32 rows fit, and what the
    /// payloads have wrong with them where rows vary.
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
                    "{label}: {} weights behind {before} rows of others, wanted a multiple of 4",
                    planes.name()
                );
            }
            before += rows;
        }
        // Only families whose rows vary make the plan look at what tensors hold.
        let sources = match planes.varies() {
            true => sources(planes, parts, tensors)?,
            false => Vec::new(),
        };
        let segment = |here: Range<usize>| {
            let mut runs = runs(&shapes, stacking, outputs, here.clone());
            for run in &mut runs {
                let source = sources.get(run.part);
                run.room = source.map_or(Amount::default(), |source| source.amount(run.rows.clone()));
            }
            let geometry = Geometry {
                planes,
                rows: runs.iter().map(|run| run.rows.len()).sum(),
                cols,
                parts: parts.len(),
                amount: runs.iter().map(|run| run.room).sum(),
            };
            let mut part_rows = [u32::MAX; 3];
            let mut at = 0;
            for run in &runs {
                // The fourth and later ones are told apart by nothing: their layout has no scales by column.
                if let Some(first) = part_rows.get_mut(run.part) {
                    *first = at as u32;
                }
                at += run.rows.len();
            }
            // Parts that ended before this segment begin at its first row, so that rows count past them.
            part_rows[..runs[0].part.min(3)].fill(0);
            Segment {
                row0: here.start as u32,
                runs,
                geometry,
                part_rows,
            }
        };
        let mut segments = Vec::new();
        let mut first = 0;
        while first < outputs {
            let until = |blocks: usize| (first + blocks * 32).min(outputs);
            let fits = |blocks: usize| {
                let geometry = segment(first..until(blocks)).geometry;
                geometry.code_bytes().max(geometry.scale_bytes()) as u64 <= max_binding
            };
            // A segment holds whole blocks of 32 outputs; the most that fit are found by halving.
            let (mut low, mut high) = (0, (outputs - first).div_ceil(32));
            while low < high {
                let middle = (low + high).div_ceil(2);
                if fits(middle) { low = middle } else { high = middle - 1 }
            }
            if low == 0 {
                bail!(
                    OutOfMemory,
                    "32 rows of {label} do not fit into a binding of {max_binding} bytes"
                );
            }
            segments.push(segment(first..until(low)));
            first = until(low);
        }
        Ok(Matrix {
            label,
            parts: parts.to_vec(),
            planes,
            cols,
            segments,
        })
    }
}

/// The rows that compute the outputs `here`, in the order they are stored, without their room.
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
            let room = Amount::default();
            runs.push(Run { part, rows, room });
        }
        begin += shape.0;
    }
    runs
}

/// Stacked tensors, ready to be repacked. Errors: what their payloads have wrong with them, with the tensor's name.
pub fn sources<'a>(planes: Planes, parts: &[TensorId], tensors: &'a dyn Tensors) -> Result<Vec<Source<'a>>> {
    parts.iter().map(|&id| source(planes, id, tensors)).collect()
}

/// A tensor, ready to be repacked. Errors: what its payload has wrong with it and `UnsupportedTensorType` for a layout that is
/// not its own, with its name.
pub fn source(planes: Planes, tensor: TensorId, tensors: &dyn Tensors) -> Result<Source<'_>> {
    let info = &tensors.infos()[tensor];
    let (rows, cols) = info.rows_cols();
    let open = || {
        let source = Source::open(info.dtype, tensors.bytes(tensor)?, rows, cols)?;
        if source.planes() != planes {
            let (is, wanted) = (source.planes().name(), planes.name());
            bail!(
                UnsupportedTensorType,
                "{} weights lie as {is}, wanted {wanted}",
                info.dtype.name()
            );
        }
        Ok(source)
    };
    open().map_err(|err| err.context(format!("tensor '{}'", info.name)))
}

/// How much the rows of experts hold in families whose rows vary: found once for all plans of one network's tensors.
#[derive(Default)]
pub struct Measured(RefCell<HashMap<TensorId, Rc<Measure>>>);

impl Measured {
    /// What the rows of a tensor hold.
    pub(super) fn of(&self, planes: Planes, tensor: TensorId, tensors: &dyn Tensors) -> Result<Rc<Measure>> {
        if let Some(known) = self.0.borrow().get(&tensor) {
            return Ok(known.clone());
        }
        let measure = Rc::new(source(planes, tensor, tensors)?.into_measure());
        tensors.release(tensor);
        self.0.borrow_mut().insert(tensor, measure.clone());
        Ok(measure)
    }
}

impl Vector {
    /// Its elements, padded. Errors: `Parse` for a tensor of another length, and what its payload has wrong with it.
    pub fn values(&self, tensors: &dyn Tensors) -> Result<Vec<f32>> {
        let mut values = Vec::with_capacity(self.padded_len());
        for piece in &self.pieces {
            let at = values.len();
            values.resize(at + piece.len, 0.0);
            if let Some(id) = piece.tensor {
                let info = &tensors.infos()[id];
                let (rows, cols) = info.rows_cols();
                if rows * cols != piece.len {
                    bail!(
                        Parse,
                        "tensor '{}' has {} elements, wanted {}",
                        info.name,
                        rows * cols,
                        piece.len
                    );
                }
                let decoder = info.dtype.decoder(tensors.bytes(id)?, rows, cols)?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::container::MemoryTensors;
    use crate::dtype::Dtype;
    use crate::error::Kind;

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

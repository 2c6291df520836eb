//! Weights as a plan names them: tensors stacked and cut into what one binding holds, and vectors as the numbers they are.
//! No device here, and no step.

use super::{Matrix, Run, Segment, Stacking, Vector};
use crate::container::{TensorId, Tensors};
use crate::dtype::planes::{Geometry, Planes};
use crate::error::{Result, bail};

/// The device layout of a tensor. Errors: `UnsupportedTensorType` with the tensor's name.
pub(super) fn planes(tensors: &dyn Tensors, tensor: TensorId) -> Result<Planes> {
    let info = &tensors.infos()[tensor];
    Planes::of(info.dtype, info.rows_cols().1).map_err(|err| err.context(format!("tensor '{}'", info.name)))
}

impl Matrix {
    /// Stacks tensors of one device layout and width, in segments of at most `max_binding` bytes a plane. Both
    /// tensors of a pair are cut at the same rows.
    ///
    /// Errors: `UnsupportedTensorType` for a type without kernels, `OutOfMemory` when not even 32 rows fit.
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
        let stored = |outputs: usize| {
            if stacking == Stacking::Rows {
                outputs
            } else {
                outputs * 2
            }
        };
        let geometry = |outputs: usize| Geometry {
            planes,
            rows: stored(outputs),
            cols,
            parts: parts.len(),
        };
        let fits = |outputs: usize| {
            let geometry = geometry(outputs);
            geometry.code_bytes().max(geometry.scale_bytes()) as u64 <= max_binding
        };
        // A segment holds whole blocks of 32 outputs; the largest that fits is found by halving.
        let blocks = outputs.div_ceil(32);
        let (mut low, mut high) = (0, blocks);
        while low < high {
            let middle = (low + high).div_ceil(2);
            if fits((middle * 32).min(outputs)) {
                low = middle
            } else {
                high = middle - 1
            }
        }
        if low == 0 {
            bail!(
                OutOfMemory,
                "32 rows of {label} do not fit into a binding of {max_binding} bytes"
            );
        }
        let mut segments = Vec::new();
        for first in (0..outputs).step_by(low * 32) {
            let here = first..(first + low * 32).min(outputs);
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
                    runs.push(Run { part, rows });
                }
                begin += shape.0;
            }
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
            segments.push(Segment {
                row0: first as u32,
                runs,
                geometry: geometry(here.len()),
                part_rows,
            });
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

//! Bits and relative errors of the tensors written, by role.

use super::names::pattern;
use crate::dtype::Dtype;
use crate::error::Result;
use crate::import::{Reader, Tensor};
use rayon::prelude::*;

/// Values compared at a time.
const COMPARED: usize = 1 << 16;

/// Tensors of one role in one type.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// Their names, with a star for every number.
    pub name: String,
    /// Their type.
    pub dtype: Dtype,
    /// Their number.
    pub tensors: usize,
    /// Their weights, all together.
    pub weights: u64,
    /// Bytes of their payloads.
    pub bytes: u64,
    /// Whether they are matrices.
    pub matrices: bool,
    loss: Loss,
}

/// The difference between weights and their decoded payload.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Loss {
    /// Σ (weight − decoded)².
    error: f64,
    /// Σ weight².
    square: f64,
}

/// A part of the matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Share {
    /// Their number.
    pub tensors: usize,
    /// Their bytes in the source.
    pub source_bytes: u64,
    /// Their bytes in the file.
    pub bytes: u64,
    loss: Loss,
}

impl Share {
    /// ‖w − ŵ‖ / ‖w‖ against the source's values, without the rotation that is undone; 0 if all are the same.
    pub fn relative_error(&self) -> f64 {
        self.loss.relative()
    }

    pub(super) fn add(&mut self, source_bytes: usize, bytes: usize, loss: Loss) {
        self.tensors += 1;
        self.source_bytes += source_bytes as u64;
        self.bytes += bytes as u64;
        self.loss.add(loss);
    }
}

impl Group {
    /// Bits per weight, scales and tables included.
    pub fn bits_per_weight(&self) -> f64 {
        self.bytes as f64 * 8.0 / self.weights as f64
    }

    /// ‖w − ŵ‖ / ‖w‖ against the source's values; 0 if all are zero or were copied.
    pub fn relative_error(&self) -> f64 {
        self.loss.relative()
    }
}

/// Adds a tensor that was written in `bytes` to its group.
pub(super) fn add(groups: &mut Vec<Group>, tensor: &Tensor, dtype: Dtype, bytes: usize, loss: Loss) {
    let name = pattern(&tensor.name);
    let is_own = |group: &Group| group.dtype == dtype && group.name == name;
    let index = groups.iter().position(is_own).unwrap_or_else(|| {
        groups.push(Group {
            name,
            dtype,
            tensors: 0,
            weights: 0,
            bytes: 0,
            matrices: tensor.data.shape.len() > 1,
            loss: Loss::default(),
        });
        groups.len() - 1
    });
    let (rows, cols) = tensor.data.rows_cols();
    let group = &mut groups[index];
    group.tensors += 1;
    group.weights += rows as u64 * cols as u64;
    group.bytes += bytes as u64;
    group.loss.add(loss);
}

impl Loss {
    fn relative(self) -> f64 {
        match self.square > 0.0 {
            true => (self.error / self.square).sqrt(),
            false => 0.0,
        }
    }

    /// Whether all values are the same.
    pub fn is_none(self) -> bool {
        self.error == 0.0
    }

    fn add(&mut self, other: Loss) {
        self.error += other.error;
        self.square += other.square;
    }

    /// The loss of a `rows` × `cols` payload. The sums do not depend on the number of threads.
    ///
    /// Errors: those of the reader, and of a payload that cannot be decoded.
    pub fn of(dtype: Dtype, payload: &[u8], (rows, cols): (usize, usize), source: &Reader) -> Result<Loss> {
        let decoder = dtype.decoder(payload, rows, cols)?;
        let step = (COMPARED / cols.max(1)).max(1);
        let firsts: Vec<usize> = (0..rows).step_by(step).collect();
        let blocks = firsts.into_par_iter().map(|first| {
            let count = step.min(rows - first);
            let mut wanted = vec![0f32; count * cols];
            source(first, &mut wanted)?;
            let mut found = vec![0f32; cols];
            let mut loss = Loss::default();
            for (row, wanted) in wanted.chunks_exact(cols.max(1)).enumerate() {
                decoder.row(first + row, &mut found);
                for (&wanted, &found) in wanted.iter().zip(&found) {
                    loss.error += (f64::from(wanted) - f64::from(found)).powi(2);
                    loss.square += f64::from(wanted).powi(2);
                }
            }
            Ok(loss)
        });
        let blocks: Vec<Loss> = blocks.collect::<Result<_>>()?;
        let mut sum = Loss::default();
        blocks.into_iter().for_each(|block| sum.add(block));
        Ok(sum)
    }
}

//! What a type cost: bits and relative error, by role.

use super::Tensor;
use super::matrix::Reader;
use super::plan::pattern;
use crate::dtype::Dtype;
use crate::error::Result;
use rayon::prelude::*;

/// Values compared at a time.
const COMPARED: usize = 1 << 16;

/// Tensors of one role in one type.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// Their names, with a star for every number.
    pub name: String,
    /// The type they were written in.
    pub dtype: Dtype,
    /// How many they are.
    pub tensors: usize,
    /// How many weights they have together.
    pub weights: u64,
    /// Bytes of their payloads.
    pub bytes: u64,
    /// Whether they are matrices.
    pub matrices: bool,
    /// Σ (weight − what is read back)².
    lost: f64,
    /// Σ weight².
    whole: f64,
}

impl Group {
    /// Bits a weight takes, scales and tables included.
    pub fn bits_per_weight(&self) -> f64 {
        self.bytes as f64 * 8.0 / self.weights as f64
    }

    /// ‖w − ŵ‖ / ‖w‖ against the source's values; 0 where all are zero.
    pub fn relative_error(&self) -> f64 {
        if self.whole > 0.0 {
            (self.lost / self.whole).sqrt()
        } else {
            0.0
        }
    }
}

/// Adds a tensor that was written as `payload` to its group. `source` is `None` where the payload was taken over.
///
/// Errors: those of the reader, and of a payload that cannot be read back.
pub(super) fn add(
    groups: &mut Vec<Group>,
    tensor: &Tensor,
    dtype: Dtype,
    payload: &[u8],
    source: Option<&Reader>,
) -> Result<()> {
    let (rows, cols) = tensor.data.rows_cols();
    let (lost, whole) = match source {
        Some(source) => compare(dtype, payload, rows, cols, source)?,
        None => (0.0, 0.0),
    };
    let name = pattern(&tensor.name);
    let found = groups
        .iter()
        .position(|group| group.dtype == dtype && group.name == name);
    let index = found.unwrap_or_else(|| {
        groups.push(Group {
            name,
            dtype,
            tensors: 0,
            weights: 0,
            bytes: 0,
            matrices: tensor.data.shape.len() > 1,
            lost: 0.0,
            whole: 0.0,
        });
        groups.len() - 1
    });
    let group = &mut groups[index];
    group.tensors += 1;
    group.weights += rows as u64 * cols as u64;
    group.bytes += payload.len() as u64;
    group.lost += lost;
    group.whole += whole;
    Ok(())
}

/// Σ (weight − decoded)² and Σ weight², the same sums whatever the number of threads.
fn compare(dtype: Dtype, payload: &[u8], rows: usize, cols: usize, source: &Reader) -> Result<(f64, f64)> {
    let decoder = dtype.decoder(payload, rows, cols)?;
    let step = (COMPARED / cols.max(1)).max(1);
    let firsts: Vec<usize> = (0..rows).step_by(step).collect();
    let sums = firsts.into_par_iter().map(|first| {
        let count = step.min(rows - first);
        let mut wanted = vec![0f32; count * cols];
        source(first, &mut wanted)?;
        let mut found = vec![0f32; cols];
        let (mut lost, mut whole) = (0.0, 0.0);
        for (row, wanted) in wanted.chunks_exact(cols.max(1)).enumerate() {
            decoder.row(first + row, &mut found);
            for (&wanted, &found) in wanted.iter().zip(&found) {
                lost += (f64::from(wanted) - f64::from(found)).powi(2);
                whole += f64::from(wanted).powi(2);
            }
        }
        Ok((lost, whole))
    });
    let sums: Vec<Result<(f64, f64)>> = sums.collect();
    sums.into_iter().try_fold((0.0, 0.0), |(lost, whole), sum| {
        let (more_lost, more) = sum?;
        Ok((lost + more_lost, whole + more))
    })
}

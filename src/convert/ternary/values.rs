//! Which weights are ternary. The others: read as f32, written in a type that holds them exactly.

use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::import::Tensor;
use half::bf16;
use std::ops::Range;

pub(super) fn is_ternary(tensor: &Tensor) -> bool {
    matches!(tensor.data.dtype(), Ok(Dtype::PQ2_0 | Dtype::PTQ1_0))
}

/// Values of these rows, one below the other. Errors: those of reading, with the tensor's name.
pub(super) fn read(tensor: &Tensor, ranges: &[Range<usize>]) -> Result<Vec<f32>> {
    let (_, cols) = tensor.data.rows_cols();
    let read = || {
        let reader = tensor.data.reader()?;
        let rows: usize = ranges.iter().map(|range| range.len()).sum();
        let mut values = vec![0.0; rows * cols];
        let mut rest = &mut values[..];
        for range in ranges {
            let (own, others) = rest.split_at_mut(range.len() * cols);
            reader(range.start, own)?;
            rest = others;
        }
        Ok(values)
    };
    read().map_err(|err: Error| err.context(format_args!("tensor '{}'", tensor.name)))
}

/// All values. Errors: as [`read`].
pub(super) fn read_all(tensor: &Tensor) -> Result<Vec<f32>> {
    let (rows, _) = tensor.data.rows_cols();
    read(tensor, std::slice::from_ref(&(0..rows)))
}

/// Whether bf16 holds every value exactly.
pub(super) fn are_bf16(values: &[f32]) -> bool {
    values.iter().all(|value| value.to_bits() & 0xFFFF == 0)
}

/// The values as bf16, which holds them exactly.
pub(super) fn as_bf16(values: &[f32]) -> Vec<u8> {
    let bytes = |value: &f32| bf16::from_f32(*value).to_le_bytes();
    values.iter().flat_map(bytes).collect()
}

pub(super) fn as_f32(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

//! Descriptions of tensors, independent of where a file keeps their bytes.

use crate::dtype::Dtype;

/// The index of a tensor in its file's list of tensors.
pub type TensorId = usize;

/// A checked tensor description.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name, as in the source model.
    pub name: String,
    /// The element type.
    pub dtype: Dtype,
    /// One to six dimensions, none of them zero, row-major; a matrix is \[rows, columns\].
    pub shape: Vec<u64>,
    /// Bytes of the payload.
    pub nbytes: u64,
}

impl TensorInfo {
    /// The tensor as a matrix: a vector is one row; of more dimensions the last is the row and the others count rows.
    pub fn rows_cols(&self) -> (usize, usize) {
        // The code that creates an info has checked that the element count fits the address space.
        let cols = self.shape.last().copied().unwrap_or(0) as usize;
        let rows = self.shape.iter().rev().skip(1).product::<u64>() as usize;
        (rows, cols)
    }
}

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// The name, as in the source model.
    pub name: String,
    /// The element type.
    pub dtype: Dtype,
    /// One to six dimensions, row-major.
    pub shape: Vec<u64>,
}

impl From<&TensorInfo> for TensorSpec {
    fn from(info: &TensorInfo) -> TensorSpec {
        TensorSpec {
            name: info.name.clone(),
            dtype: info.dtype,
            shape: info.shape.clone(),
        }
    }
}

//! The interface to a model's tensors.

use crate::error::Result;
use crate::format::cmf::Masks;
use crate::format::{TensorId, TensorInfo};

/// A set of named tensors: a file, or tensors made in memory.
pub trait Tensors: Send + Sync {
    /// Every tensor; a [`TensorId`] indexes this.
    fn infos(&self) -> &[TensorInfo];

    /// The tensor of this name.
    fn find(&self, name: &str) -> Option<TensorId>;

    /// The payload. Pages of a file are read when they are touched.
    ///
    /// Errors: `Internal` for an invalid id, `Io` if the file was truncated.
    fn bytes(&self, id: TensorId) -> Result<&[u8]>;

    /// Task masks over these tensors, if there are any.
    fn masks(&self) -> Option<&Masks> {
        None
    }

    /// Declares a payload unused for now, so that its pages can be given back. Its bytes stay readable.
    fn release(&self, id: TensorId);
}

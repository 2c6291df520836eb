//! Looks tensors up by name, checks their shapes and marks them as used.

use super::network::Linear;
use crate::error::{Result, bail};
use crate::source::{TensorId, Tensors};

/// The tensors of a file while they are bound to a network.
pub struct Finder<'a> {
    tensors: &'a dyn Tensors,
    used: Vec<bool>,
    /// What states the shapes, for messages.
    stated_by: &'static str,
}

impl<'a> Finder<'a> {
    /// All tensors, none of them used. `stated_by`: what states the shapes, for messages.
    pub fn new(tensors: &'a dyn Tensors, stated_by: &'static str) -> Self {
        Finder {
            tensors,
            used: vec![false; tensors.infos().len()],
            stated_by,
        }
    }

    /// The tensors that were not used so far.
    pub fn unused(&self) -> Vec<TensorId> {
        (0..self.used.len()).filter(|&id| !self.used[id]).collect()
    }

    /// Whether there is a tensor of this name. It does not count as used.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.find(name).is_some()
    }

    /// Whether the names of any tensors begin with `prefix`.
    pub fn has_any(&self, prefix: &str) -> bool {
        self.tensors.infos().iter().any(|info| info.name.starts_with(prefix))
    }

    /// The rows of the tensor of this name. It does not count as used.
    pub fn rows(&self, name: &str) -> Option<usize> {
        let id = self.tensors.find(name)?;
        Some(self.tensors.infos()[id].rows_cols().0)
    }

    /// Whether there is a tensor of this name whose columns are value heads in tiled order.
    pub fn has_tiled_columns(&self, name: &str) -> bool {
        let id = self.tensors.find(name);
        id.is_some_and(|id| self.tensors.has_tiled_columns(id))
    }

    /// The tensor of this name, if there is one. Errors: `Parse` for another shape.
    pub fn optional(&mut self, name: &str, wanted: &[u64]) -> Result<Option<TensorId>> {
        let Some(id) = self.tensors.find(name) else {
            return Ok(None);
        };
        let found = &self.tensors.infos()[id].shape;
        if found != wanted {
            bail!(
                Parse,
                "tensor '{name}' has shape {found:?}, {} wants {wanted:?}",
                self.stated_by
            );
        }
        self.used[id] = true;
        Ok(Some(id))
    }

    /// The tensor of this name. Errors: `MissingTensor`, `Parse` for another shape.
    pub fn required(&mut self, name: &str, wanted: &[u64]) -> Result<TensorId> {
        match self.optional(name, wanted)? {
            Some(id) => Ok(id),
            None => bail!(MissingTensor, "the network needs tensor '{name}' of shape {wanted:?}"),
        }
    }

    /// A vector of `len` elements. Errors: as [`Finder::required`].
    pub fn vector(&mut self, name: &str, len: usize) -> Result<TensorId> {
        self.required(name, &[len as u64])
    }

    /// The linear map `name`, with its bias if there is one. Errors: as [`Finder::required`].
    pub fn linear(&mut self, name: &str, rows: usize, cols: usize) -> Result<Linear> {
        Ok(Linear {
            weight: self.required(&format!("{name}.weight"), &[rows as u64, cols as u64])?,
            bias: self.optional(&format!("{name}.bias"), &[rows as u64])?,
            rows,
            cols,
        })
    }
}

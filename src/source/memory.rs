//! Tensors in memory, for models without a file.

use super::tensors::{Stored, Tensors};
use crate::dtype::Dtype;
use crate::error::{Result, bail};
use crate::format::{TensorId, TensorInfo};
use std::collections::HashMap;

/// Tensors held in memory.
#[derive(Default)]
pub struct MemoryTensors {
    infos: Vec<TensorInfo>,
    payloads: Vec<Vec<u8>>,
    ids: HashMap<String, TensorId>,
}

impl MemoryTensors {
    /// A set of (name, type, shape, payload), checked like the tensors of a file.
    ///
    /// Errors: `Parse` for a duplicate name, a shape that the type does not allow, and a payload of another length.
    pub fn new(tensors: impl IntoIterator<Item = (String, Dtype, Vec<u64>, Vec<u8>)>) -> Result<MemoryTensors> {
        let mut set = MemoryTensors::default();
        for (name, dtype, shape, payload) in tensors {
            set.add(name, dtype, shape, payload)?;
        }
        Ok(set)
    }

    /// Adds a tensor. Errors: as for [`MemoryTensors::new`].
    pub fn add(&mut self, name: String, dtype: Dtype, shape: Vec<u64>, payload: Vec<u8>) -> Result<TensorId> {
        let checked = dtype.check_length(&shape, &payload);
        checked.map_err(|err| err.context(format_args!("tensor '{name}'")))?;
        let id = self.infos.len();
        if self.ids.insert(name.clone(), id).is_some() {
            bail!(Parse, "tensor '{name}' occurs twice");
        }
        let nbytes = payload.len() as u64;
        self.infos.push(TensorInfo {
            name,
            dtype,
            shape,
            nbytes,
        });
        self.payloads.push(payload);
        Ok(id)
    }
}

impl Tensors for MemoryTensors {
    fn infos(&self) -> &[TensorInfo] {
        &self.infos
    }

    fn find(&self, name: &str) -> Option<TensorId> {
        self.ids.get(name).copied()
    }

    fn stored(&self, id: TensorId) -> Result<Stored<'_>> {
        match self.infos.get(id).zip(self.payloads.get(id)) {
            Some((info, payload)) => Ok(Stored::new(info, payload)),
            None => bail!(Internal, "tensor {id} of {}", self.payloads.len()),
        }
    }

    fn release(&self, _id: TensorId) {}
}

//! Tensors in memory, for models without a file.

use super::tensors::{Stored, Tensors};
use crate::dtype::Dtype;
use crate::error::{Result, bail};
use crate::format::{TensorId, TensorInfo};
use std::collections::HashMap;

/// Tensors held in memory.
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
        let mut set = MemoryTensors {
            infos: Vec::new(),
            payloads: Vec::new(),
            ids: HashMap::new(),
        };
        for (name, dtype, shape, payload) in tensors {
            dtype
                .check_length(&shape, &payload)
                .map_err(|err| err.context(format_args!("tensor '{name}'")))?;
            if set.ids.insert(name.clone(), set.infos.len()).is_some() {
                bail!(Parse, "tensor '{name}' occurs twice");
            }
            let nbytes = payload.len() as u64;
            set.infos.push(TensorInfo {
                name,
                dtype,
                shape,
                nbytes,
            });
            set.payloads.push(payload);
        }
        Ok(set)
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

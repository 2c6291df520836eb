//! Tensors that live in memory: synthetic models for tests and benches, without a file.

use super::hash::hash64;
use super::{TensorId, TensorInfo, Tensors, payload};
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result, bail};
use std::collections::HashMap;

/// Tensors held in memory. Offsets count the payloads one after another.
pub struct MemoryTensors {
    infos: Vec<TensorInfo>,
    payloads: Vec<Vec<u8>>,
    ids: HashMap<String, TensorId>,
}

impl MemoryTensors {
    /// A set of (name, type, shape, payload), checked as a file's tensors are.
    ///
    /// Errors: `Parse` for a name that is there twice, a shape the type does not allow, a payload of another length.
    pub fn new(tensors: impl IntoIterator<Item = (String, Dtype, Vec<u64>, Vec<u8>)>) -> Result<MemoryTensors> {
        let mut set = MemoryTensors {
            infos: Vec::new(),
            payloads: Vec::new(),
            ids: HashMap::new(),
        };
        let mut offset = 0;
        for (name, dtype, shape, payload) in tensors {
            payload::check_length(dtype, &shape, &payload)
                .map_err(|err| err.context(format_args!("tensor '{name}'")))?;
            if set.ids.insert(name.clone(), set.infos.len()).is_some() {
                bail!(Parse, "tensor '{name}' is there twice");
            }
            let nbytes = payload.len() as u64;
            set.infos.push(TensorInfo {
                name,
                dtype,
                shape,
                offset,
                nbytes,
                hash: hash64(&payload),
                shard: 0,
            });
            set.payloads.push(payload);
            offset += nbytes;
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

    fn bytes(&self, id: TensorId) -> Result<&[u8]> {
        let payload = self.payloads.get(id).map(Vec::as_slice);
        payload.ok_or_else(|| Error::new(Kind::Usage, format!("tensor {id} of {}", self.payloads.len())))
    }

    fn release(&self, _id: TensorId) {}
}

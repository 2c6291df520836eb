//! Replaces the contents of an executor's memory for another graph of the same network. Weights and buffers that both
//! graphs have stay in place, and only those with a changed tensor are written again.

use super::exec::GpuExecutor;
use super::memory::{GraphMemory, Item};
use super::upload::{Ring, upload};
use crate::error::Result;
use crate::graph::{Fill, Graph, sources, stored};
use crate::source::{TensorId, Tensors};
use std::collections::HashSet;

/// The changes of tensors that a graph uses.
struct Changes<'a> {
    graph: &'a Graph,
    /// Sorted.
    tensors: &'a [TensorId],
}

impl Changes<'_> {
    /// Whether the contents of an item change.
    fn affect(&self, item: Item) -> bool {
        let changed = |tensor: &TensorId| self.tensors.binary_search(tensor).is_ok();
        // Experts of paged banks have moved since the upload, so all of a bank is uploaded again.
        let mut banks = self.graph.paged.iter();
        match item {
            Item::Buffer(i) => {
                let fill = &self.graph.buffers[i].fill;
                banks.any(|bank| bank.tables.contains(&i))
                    || matches!(fill, Fill::Experts { bias: Some(bias), .. } if changed(bias))
            }
            Item::Vector(i) => {
                let mut tensors = self.graph.vectors[i].pieces.iter().filter_map(|piece| piece.tensor);
                tensors.any(|tensor| changed(&tensor))
            }
            Item::Matrix(i) => {
                banks.any(|bank| bank.gate_up.contains(&i) || bank.down == i)
                    || self.graph.matrices[i].parts.iter().any(changed)
            }
        }
    }

    /// Checks the payloads that will be uploaded, before any weight is overwritten.
    fn check_payloads(&self, tensors: &dyn Tensors) -> Result<()> {
        for (i, matrix) in self.graph.matrices.iter().enumerate() {
            if self.affect(Item::Matrix(i)) {
                sources(matrix.planes, &stored(&matrix.parts, tensors)?)?;
            }
        }
        for (i, vector) in self.graph.vectors.iter().enumerate() {
            if self.affect(Item::Vector(i)) {
                vector.values(tensors)?;
            }
        }
        Ok(())
    }
}

impl GpuExecutor {
    /// Uploads the created items, then overwrites changed weights. Most failures come before the first weight is
    /// overwritten.
    pub(super) fn replace_contents(
        &mut self,
        graph: &Graph,
        memory: &GraphMemory,
        created: &HashSet<Item>,
        tensors: &dyn Tensors,
        changed: &[TensorId],
    ) -> Result<()> {
        let changes = Changes {
            graph,
            tensors: changed,
        };
        let device = self.device.clone();
        let mut ring = Ring::new(&device)?;
        let mut send =
            |wanted: &dyn Fn(Item) -> bool| upload(&mut ring, graph, memory, tensors, wanted, &mut |_| Ok(()));
        send(&|item| created.contains(&item))?;
        changes.check_payloads(tensors)?;
        self.inconsistent = true;
        send(&|item| !created.contains(&item) && changes.affect(item))?;
        self.counters.upload_bytes += ring.uploaded;
        Ok(())
    }
}

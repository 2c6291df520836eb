//! Replaces the graph of an executor by another graph of the same network. Weights and buffers that both graphs have
//! stay in place, and only those with a changed tensor are written again.

use super::exec::GpuExecutor;
use super::memory::{Created, GraphMemory, Item};
use super::upload::{Ring, upload};
use crate::error::Result;
use crate::graph::{BufferId, Fill, Graph, MatrixId, Selection, sources};
use crate::source::{TensorId, Tensors};
use std::collections::HashSet;
use std::sync::Arc;

/// The items of a graph whose contents change.
struct Changes<'a> {
    graph: &'a Graph,
    /// Sorted.
    tensors: &'a [TensorId],
    /// Matrices and tables of paged banks. Experts have moved since the upload, so all of a bank is uploaded again.
    bank_matrices: HashSet<MatrixId>,
    bank_tables: HashSet<BufferId>,
}

impl<'a> Changes<'a> {
    fn new(graph: &'a Graph, tensors: &'a [TensorId]) -> Changes<'a> {
        let matrices = graph.paged.iter().map(|paged| {
            let [gate, up] = paged.gate_up;
            [gate, up, paged.down]
        });
        let tables = graph.paged.iter().flat_map(|paged| &paged.tables);
        Changes {
            graph,
            tensors,
            bank_matrices: matrices.flatten().collect(),
            bank_tables: tables.copied().collect(),
        }
    }

    fn has(&self, item: Item) -> bool {
        let changed = |tensor: &TensorId| self.tensors.binary_search(tensor).is_ok();
        match item {
            Item::Buffer(i) => {
                let fill = &self.graph.buffers[i].fill;
                self.bank_tables.contains(&i) || matches!(fill, Fill::Experts { bias: Some(bias), .. } if changed(bias))
            }
            Item::Vector(i) => {
                let mut tensors = self.graph.vectors[i].pieces.iter().filter_map(|piece| piece.tensor);
                tensors.any(|tensor| changed(&tensor))
            }
            Item::Matrix(i) => self.bank_matrices.contains(&i) || self.graph.matrices[i].parts.iter().any(changed),
        }
    }

    /// Checks the payloads that will be uploaded, before any weight is overwritten.
    fn check_payloads(&self, tensors: &dyn Tensors) -> Result<()> {
        for (i, matrix) in self.graph.matrices.iter().enumerate() {
            if self.has(Item::Matrix(i)) {
                sources(matrix.planes, &matrix.parts, tensors)?;
            }
        }
        for (i, vector) in self.graph.vectors.iter().enumerate() {
            if self.has(Item::Vector(i)) {
                vector.values(tensors)?;
            }
        }
        Ok(())
    }
}

impl GpuExecutor {
    /// As [`crate::graph::Executor::replace`].
    pub(super) fn replace_graph(
        &mut self,
        graph: Arc<Graph>,
        selection: &Arc<Selection>,
        tensors: Arc<dyn Tensors>,
        changed: &[TensorId],
    ) -> Result<()> {
        let device = self.device.clone();
        let scope = device.scope();
        let (memory, created) = GraphMemory::new(&device, &graph, Some((&self.graph, &self.memory)));
        scope.finish()?;
        device.pipelines.compile(&device.variants(&graph))?;
        self.replace_contents(&graph, &memory, &created, &*tensors, changed)?;

        // An equal graph on the same memory keeps its bind groups.
        let old = std::mem::replace(&mut self.graph, graph);
        let graph = &self.graph;
        let same = created.count == 0
            && graph.matrices == old.matrices
            && graph.vectors == old.vectors
            && graph.buffers == old.buffers
            && graph.programs == old.programs;
        if !same {
            self.memory = memory;
            self.pager = None;
            let scope = device.scope();
            self.bind()?;
            scope.finish()?;
        }
        self.page(tensors)?;
        self.apply(selection)?;
        if self.pager.is_some() {
            for routed in &self.graph.clone().routed {
                self.send(routed.counts, &vec![0; routed.experts])?;
            }
        }
        // Two of them are the ring's.
        self.counters.buffers_created += created.count + 2;
        self.count_pipelines();
        self.inconsistent = false;
        Ok(())
    }

    /// Uploads the created items, then overwrites changed weights. Most failures come before the first weight is
    /// overwritten.
    fn replace_contents(
        &mut self,
        graph: &Graph,
        memory: &GraphMemory,
        created: &Created,
        tensors: &dyn Tensors,
        changed: &[TensorId],
    ) -> Result<()> {
        let changes = Changes::new(graph, changed);
        let device = self.device.clone();
        let mut ring = Ring::new(&device)?;
        let mut send =
            |wanted: &dyn Fn(Item) -> bool| upload(&mut ring, graph, memory, tensors, wanted, &mut |_| Ok(()));
        send(&|item| created.has(item))?;
        changes.check_payloads(tensors)?;
        self.inconsistent = true;
        send(&|item| !created.has(item) && changes.has(item))?;
        self.counters.upload_bytes += ring.uploaded;
        Ok(())
    }
}

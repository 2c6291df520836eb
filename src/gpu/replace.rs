//! Replaces the graph of an executor by another graph of the same network. Weights and buffers that both graphs have
//! stay in place, and only those with a changed tensor are written again.

use super::device::Device;
use super::exec::GpuExecutor;
use super::memory::{GraphMemory, create_buffer, create_matrix, create_vector};
use super::upload::{Item, Ring, upload};
use crate::error::Result;
use crate::graph::{BufferId, Fill, Graph, MatrixId, Selection, sources, stored};
use crate::source::{TensorId, Tensors};
use std::collections::HashSet;
use std::sync::Arc;

/// The device memory of a new graph. Some of it is created, the rest is taken over from the old graph.
struct Memory {
    memory: GraphMemory,
    /// Whether each buffer, vector and matrix was created.
    created: [Vec<bool>; 3],
}

impl Memory {
    /// Keeps the memory of items that both graphs have, and creates the rest.
    fn new(device: &Device, graph: &Graph, old: &Graph, kept: &GraphMemory) -> Memory {
        let (buffers, new_buffers) = reuse(&graph.buffers, &old.buffers, &kept.buffers, |b| {
            create_buffer(device, b)
        });
        let (vectors, new_vectors) = reuse(&graph.vectors, &old.vectors, &kept.vectors, |v| {
            create_vector(device, v)
        });
        let (matrices, new_matrices) = reuse(&graph.matrices, &old.matrices, &kept.matrices, |m| {
            create_matrix(device, m)
        });
        Memory {
            memory: GraphMemory {
                buffers,
                vectors,
                matrices,
            },
            created: [new_buffers, new_vectors, new_matrices],
        }
    }

    fn is_created(&self, item: Item) -> bool {
        let [buffers, vectors, matrices] = &self.created;
        match item {
            Item::Buffer(i) => buffers[i],
            Item::Vector(i) => vectors[i],
            Item::Matrix(i) => matrices[i],
        }
    }

    /// The number of wgpu buffers that were created.
    fn count_created(&self) -> usize {
        let [buffers, vectors, matrices] = &self.created;
        let count = |created: &[bool]| created.iter().filter(|created| **created).count();
        let segments = self.memory.matrices.iter().zip(matrices);
        let segments = segments
            .filter(|(_, created)| **created)
            .map(|(segments, _)| segments.len());
        count(buffers) + count(vectors) + segments.sum::<usize>()
    }
}

/// For each new item the memory of an equal old item, or new memory; and whether it is new.
fn reuse<A: PartialEq, T: Clone>(new: &[A], old: &[A], kept: &[T], create: impl Fn(&A) -> T) -> (Vec<T>, Vec<bool>) {
    let one = |(i, wanted): (usize, &A)| {
        // Most items have the same index in both graphs.
        let found = match old.get(i) == Some(wanted) {
            true => Some(i),
            false => old.iter().position(|old| old == wanted),
        };
        match found.and_then(|i| kept.get(i)) {
            Some(kept) => (kept.clone(), false),
            None => (create(wanted), true),
        }
    };
    new.iter().enumerate().map(one).unzip()
}

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
        let matrices = graph
            .paged
            .iter()
            .map(|paged| [paged.gate_up[0], paged.gate_up[1], paged.down]);
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
                sources(matrix.planes, &stored(&matrix.parts, tensors)?)?;
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
        let new = Memory::new(&device, &graph, &self.graph, &self.memory);
        scope.finish()?;
        device.compile(&device.variants(&graph))?;
        self.replace_contents(&graph, &new, &*tensors, changed)?;

        // An equal graph on the same memory keeps its bind groups.
        let created = new.count_created();
        let old = std::mem::replace(&mut self.graph, graph);
        let graph = &self.graph;
        let same = created == 0
            && graph.matrices == old.matrices
            && graph.vectors == old.vectors
            && graph.buffers == old.buffers
            && graph.programs == old.programs;
        if !same {
            self.memory = new.memory;
            let scope = device.scope();
            self.bind()?;
            scope.finish()?;
        }
        self.page(tensors)?;
        self.apply(selection)?;
        if self.pager.is_some() {
            let graph = self.graph.clone();
            for routed in &graph.routed {
                self.send(routed.counts, &vec![0; routed.experts])?;
            }
        }
        self.counters.buffers_created += created as u64 + 2;
        self.count_pipelines();
        self.inconsistent = false;
        Ok(())
    }

    /// Uploads the created items, then overwrites changed weights. Most failures come before the first weight is
    /// overwritten.
    fn replace_contents(
        &mut self,
        graph: &Graph,
        new: &Memory,
        tensors: &dyn Tensors,
        changed: &[TensorId],
    ) -> Result<()> {
        let changes = Changes::new(graph, changed);
        let device = self.device.clone();
        let mut ring = Ring::new(&device)?;
        let mut send =
            |wanted: &dyn Fn(Item) -> bool| upload(&mut ring, graph, &new.memory, tensors, wanted, &mut |_| Ok(()));
        send(&|item| new.is_created(item))?;
        changes.check_payloads(tensors)?;
        self.inconsistent = true;
        send(&|item| !new.is_created(item) && changes.has(item))?;
        self.counters.upload_bytes += ring.uploaded;
        Ok(())
    }
}

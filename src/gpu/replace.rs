//! Another plan of the same network on buffers that are there: what both plans have in common stays, and only what holds a
//! changed tensor is written. Knows plans, not why they change.

use super::exec::GpuExecutor;
use super::memory::{self, Ring, SegmentBuffer};
use crate::container::{TensorId, Tensors};
use crate::error::Result;
use crate::kernel::Variant;
use crate::program::{BufferId, Executor, Fill, Matrix, MatrixId, Plan, Vector, sources};
use std::collections::HashSet;
use std::sync::Arc;

/// One weight or buffer of the new plan.
struct Place<T> {
    at: T,
    /// Made for the new plan, and empty.
    fresh: bool,
}

/// For each new thing the old one that is the same, else a new one.
fn places<A: PartialEq, T: Clone>(new: &[A], old: &[A], kept: &[T], make: impl Fn(&A) -> T) -> Vec<Place<T>> {
    let place = |(i, wanted): (usize, &A)| {
        // Most are where they were.
        let found = match old.get(i) == Some(wanted) {
            true => Some(i),
            false => old.iter().position(|old| old == wanted),
        };
        match found.and_then(|i| kept.get(i)) {
            Some(at) => Place {
                at: at.clone(),
                fresh: false,
            },
            None => Place {
                at: make(wanted),
                fresh: true,
            },
        }
    };
    new.iter().enumerate().map(place).collect()
}

impl GpuExecutor {
    /// As [`crate::program::Executor::replace`] says.
    pub(super) fn replace_weights(
        &mut self,
        plan: Arc<Plan>,
        tensors: Arc<dyn Tensors>,
        changed: &[TensorId],
    ) -> Result<()> {
        let is_changed = |id: &TensorId| changed.binary_search(id).is_ok();
        // What paged banks hold has moved since they were filled: they begin anew.
        let banks: HashSet<MatrixId> = plan
            .paged
            .iter()
            .flat_map(|paged| paged.gate_up.into_iter().chain([paged.down]))
            .collect();
        let tables = plan.paged.iter().flat_map(|paged| &paged.tables);
        let tables: HashSet<BufferId> = tables.map(|table| table.buffer).collect();
        let of_matrix = |i: MatrixId, matrix: &Matrix| banks.contains(&i) || matrix.parts.iter().any(is_changed);
        let of_vector = |vector: &Vector| vector.pieces.iter().any(|piece| piece.tensor.iter().any(is_changed));
        let of_fill = |i: BufferId, fill: &Fill| {
            tables.contains(&i) || matches!(fill, Fill::Experts { bias: Some(bias), .. } if is_changed(bias))
        };

        // Nothing that runs is touched before all that is new is there.
        let (device, old) = (self.device.clone(), self.plan.clone());
        let storage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::COPY_SRC;
        let scope = device.scope();
        let matrices = places(&plan.matrices, &old.matrices, &self.matrices, |matrix| {
            memory::allocate(&device, matrix)
        });
        let vectors = places(&plan.vectors, &old.vectors, &self.vectors, |vector| {
            memory::buffer(&device, &vector.label, vector.padded_len() as u64 * 4, storage)
        });
        let buffers = places(&plan.buffers, &old.buffers, &self.buffers, |buffer| {
            memory::buffer(&device, &buffer.label, buffer.bytes, storage)
        });
        scope.finish()?;
        let mut variants: Vec<Variant> = Vec::new();
        for step in plan.planned().iter().flat_map(|program| &program.steps) {
            let variant = device.variant(step, plan.kv);
            if !variants.contains(&variant) {
                variants.push(variant);
            }
        }
        device.compile(&variants)?;

        let mut ring = Ring::new(&device)?;
        for fresh in [true, false] {
            if !fresh {
                // Payloads that cannot be read are found before anything is overwritten.
                for (_, matrix) in plan
                    .matrices
                    .iter()
                    .enumerate()
                    .filter(|(i, matrix)| of_matrix(*i, matrix))
                {
                    sources(matrix.planes, &matrix.parts, &*tensors)?;
                }
                for vector in plan.vectors.iter().filter(|vector| of_vector(vector)) {
                    vector.values(&*tensors)?;
                }
                self.torn = true;
            }
            for (vector, place) in plan.vectors.iter().zip(&vectors) {
                if place.fresh == fresh && (fresh || of_vector(vector)) {
                    memory::upload_vector(&mut ring, vector, &place.at, &*tensors)?;
                }
            }
            for (i, (buffer, place)) in plan.buffers.iter().zip(&buffers).enumerate() {
                if place.fresh == fresh && (fresh || of_fill(i, &buffer.fill)) {
                    memory::upload_fill(&mut ring, &buffer.fill, &place.at, &*tensors)?;
                }
            }
            for (i, (matrix, place)) in plan.matrices.iter().zip(&matrices).enumerate() {
                if place.fresh == fresh && (fresh || of_matrix(i, matrix)) {
                    memory::upload_matrix(&mut ring, matrix, &place.at, &*tensors)?;
                }
            }
            ring.flush()?;
        }
        let made = vectors.iter().filter(|place| place.fresh).count()
            + buffers.iter().filter(|place| place.fresh).count()
            + matrices
                .iter()
                .filter(|place| place.fresh)
                .map(|place| place.at.len())
                .sum::<usize>();
        self.counters.upload_bytes += ring.uploaded;
        self.counters.buffers_created += made as u64 + 2;
        drop(ring);

        // The same weights in the same layout, read by the same steps: what is bound stays bound.
        let same =
            made == 0 && plan.matrices == old.matrices && plan.vectors == old.vectors && plan.buffers == old.buffers;
        self.plan = plan.clone();
        if !same {
            let ats = |places: Vec<Place<wgpu::Buffer>>| places.into_iter().map(|place| place.at).collect();
            (self.vectors, self.buffers) = (ats(vectors), ats(buffers));
            self.matrices = matrices.into_iter().map(|place| place.at).collect();
            self.rebind()?;
        }
        self.pager = None;
        self.choose()?;
        if !plan.paged.is_empty() {
            for routed in &plan.routed {
                self.write(routed.counts, &vec![0; routed.experts])?;
            }
            self.page_from(tensors)?;
        }
        let (pipelines, ms) = device.compile_counters();
        self.counters.pipelines_compiled = pipelines;
        self.counters.pipeline_us = (ms * 1000.0) as u64;
        self.torn = false;
        Ok(())
    }

    /// Makes the bind groups of the plan; what only the plan before used is given back.
    fn rebind(&mut self) -> Result<()> {
        let plan = self.plan.clone();
        self.counters.gpu_bytes = plan.weight_bytes() + plan.buffer_bytes();
        self.programs.clear();
        let (matrices, vectors): (Vec<Vec<SegmentBuffer>>, Vec<wgpu::Buffer>) =
            (self.matrices.clone(), self.vectors.clone());
        let scope = self.device.clone();
        let scope = scope.scope();
        for program in plan.planned() {
            let realised = self.realise(program, &matrices, &vectors)?;
            self.programs.push(realised);
        }
        scope.finish()
    }
}

//! The interface of executors, which perform graphs.

use super::program::{Graph, Selection};
use crate::error::Result;
use crate::op::{BatchShape, BufferId};
use crate::source::{TensorId, Tensors};
use std::ops::Range;
use std::sync::Arc;

/// Words that are read back after a run.
pub const READBACK_WORDS: usize = 16;

/// A run that can be waited for.
pub struct Ticket(pub(crate) u64);

/// Performs a graph. All implementations run the same steps over the same named buffers.
pub trait Executor: Send {
    /// Runs some steps of a program, in order, after everything submitted before. Steps that the selection leaves out
    /// are skipped. Does not wait.
    fn run(&mut self, program: usize, steps: Range<usize>, shape: BatchShape) -> Result<()>;

    /// As [`Executor::run`], and takes a snapshot of the graph's readback words after the run. Does not wait.
    fn submit(&mut self, program: usize, steps: Range<usize>, shape: BatchShape) -> Result<Ticket>;

    /// Waits for a run and returns its readback words. The caller waits for tickets in the order in which it got
    /// them, and has at most two that it has not waited for.
    fn wait(&mut self, ticket: Ticket) -> Result<[u32; READBACK_WORDS]>;

    /// Changes the selection: later runs run its steps. Writes the contents of its buffers. Creates no objects.
    fn select(&mut self, selection: Arc<Selection>) -> Result<()>;

    /// Replaces the graph by another graph of the same network. Its tensors differ from the previous ones in
    /// `changed`, which is sorted. No run may be in flight. Matrices and buffers that both graphs have stay in place,
    /// and only matrices with a changed tensor are written again. State is not kept.
    ///
    /// Errors: `OutOfMemory`, those of the device, and those of the tensors' payloads. After an error the executor
    /// still performs the previous graph; if weights were already overwritten, every run fails until they are
    /// replaced again.
    fn replace(
        &mut self,
        graph: Arc<Graph>,
        selection: Arc<Selection>,
        tensors: Arc<dyn Tensors>,
        changed: &[TensorId],
    ) -> Result<()>;

    /// Writes words at the start of a buffer, before everything submitted later.
    fn write(&mut self, buffer: BufferId, words: &[u32]) -> Result<()>;

    /// Reads words of a buffer, after everything submitted before.
    fn read(&mut self, buffer: BufferId, first: usize, count: usize) -> Result<Vec<u32>>;

    /// Totals of the work so far.
    fn counters(&self) -> Counters;
}

/// Declares counters with a difference over all totals.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Totals of the work of an executor. The difference of two snapshots is the work between them.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
            /// Bytes of device memory in use: weights, buffers, parameters. Not a total.
            pub gpu_bytes: u64,
        }

        impl Counters {
            /// The work since an earlier snapshot.
            pub fn since(&self, before: &Counters) -> Counters {
                Counters { $($name: self.$name - before.$name,)* gpu_bytes: self.gpu_bytes }
            }
        }
    };
}

counters! {
    /// Command buffers submitted by runs.
    submits,
    /// Compute passes.
    passes,
    /// Dispatches.
    dispatches,
    /// Bytes copied back by runs.
    readback_bytes,
    /// Bytes of weights that runs read, calculated from the graph.
    weight_bytes,
    /// Bytes of cached keys and values that runs read, calculated from the graph.
    kv_bytes,
    /// Bind groups created.
    bind_groups_created,
    /// Buffers created.
    buffers_created,
    /// Writes from the host into a buffer.
    write_buffer_calls,
    /// Pipelines created.
    pipelines_compiled,
    /// Microseconds spent on creating pipelines, summed over threads.
    pipeline_us,
    /// Bytes of weights uploaded.
    upload_bytes,
    /// Experts of paged banks that a run needed in a layer and that were present.
    expert_hits,
    /// Experts of paged banks that a run needed in a layer and that had to be fetched.
    expert_misses,
    /// Bytes fetched for paged banks.
    paged_bytes,
}

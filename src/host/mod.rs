//! The executor of a graph on the CPU, with the reference kernels. Devices are tested against it.
//!
//! An operator's host implementation computes in f64 from the values in its step's buffers and rounds where the step
//! stores. It does not depend on the order in which a device's kernel sums.

mod memory;
#[cfg(test)]
mod tests;

use crate::error::{Error, Kind, Result, bail};
use crate::graph::{BatchShape, Counters, Executor, Graph, READBACK_WORDS, Selected, Selection, Ticket};
use crate::op::BufferId;
use crate::op::host::{Memory, Operands, slice, slice_mut};
use crate::source::{TensorId, Tensors};
use memory::HostMemory;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// The executor of a graph in host memory. A run is finished when the call returns.
pub struct HostExecutor {
    graph: Arc<Graph>,
    selected: Selected,
    memory: HostMemory,
    /// The readback words of each run that was submitted and not waited for, by ticket.
    finished: VecDeque<(u64, [u32; READBACK_WORDS])>,
    tickets: u64,
    counters: Counters,
}

impl HostExecutor {
    /// Creates the buffers. Weights stay in their tensors, and steps decode them row by row.
    ///
    /// Errors: faults in the tensors of vectors and tables; `Internal` for a graph with paged banks, which only devices
    /// have.
    pub fn new(graph: Arc<Graph>, selection: Arc<Selection>, tensors: Arc<dyn Tensors>) -> Result<HostExecutor> {
        if !graph.paged.is_empty() {
            bail!(Internal, "the host executor does not page experts");
        }
        let mut executor = HostExecutor {
            memory: HostMemory::new(graph.clone(), tensors)?,
            selected: Selected::default(),
            graph,
            finished: VecDeque::new(),
            tickets: 0,
            counters: Counters::default(),
        };
        executor.select(selection)?;
        Ok(executor)
    }
}

fn no_buffer(buffer: BufferId) -> Error {
    Error::new(Kind::Internal, format!("the graph has no buffer {buffer}"))
}

impl Executor for HostExecutor {
    fn run(&mut self, program: usize, steps: Range<usize>, shape: BatchShape) -> Result<()> {
        for resolved in self.selected.program(program)?.within(&steps)? {
            let step = &self.graph.programs[program].steps[resolved.step];
            let mut operands = Operands {
                spec: step.op.kernel().spec(),
                bindings: &step.bindings,
                memory: &mut self.memory,
                kv: self.graph.kv,
                width: step.width as usize,
                own: step.width.min(shape.tokens) as usize,
                masked: resolved.masked,
            };
            let done = step.op.run(&mut operands);
            done.map_err(|err| err.context(&step.label))?;
            self.counters.dispatches += 1;
        }
        Ok(())
    }

    fn submit(&mut self, program: usize, steps: Range<usize>, shape: BatchShape) -> Result<Ticket> {
        self.run(program, steps.clone(), shape)?;
        let words = self.read(self.graph.readback, 0, READBACK_WORDS)?;
        let mut readback = [0; READBACK_WORDS];
        readback.copy_from_slice(&words);
        let ticket = self.tickets;
        self.finished.push_back((ticket, readback));
        self.tickets += 1;
        let program = self.selected.program(program)?;
        program.count_bytes(&steps, shape, &mut self.counters);
        Ok(Ticket(ticket))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<[u32; READBACK_WORDS]> {
        match self.finished.pop_front() {
            Some((id, words)) if id == ticket.0 => Ok(words),
            _ => bail!(Internal, "runs are waited for in the order they were submitted"),
        }
    }

    fn select(&mut self, selection: Arc<Selection>) -> Result<()> {
        self.selected = Selected::new(&self.graph, &selection);
        let mut contents = selection.contents.iter();
        contents.try_for_each(|(buffer, words)| self.write(*buffer, words))
    }

    fn replace(
        &mut self,
        graph: Arc<Graph>,
        selection: Arc<Selection>,
        tensors: Arc<dyn Tensors>,
        _: &[TensorId],
    ) -> Result<()> {
        let counters = self.counters;
        *self = HostExecutor::new(graph, selection, tensors)?;
        self.counters = counters;
        Ok(())
    }

    fn write(&mut self, buffer: BufferId, words: &[u32]) -> Result<()> {
        let all = self.memory.buffer_mut(buffer).ok_or_else(|| no_buffer(buffer))?;
        slice_mut(all, 0, words.len(), "write")?.copy_from_slice(words);
        self.counters.write_buffer_calls += 1;
        Ok(())
    }

    fn read(&mut self, buffer: BufferId, first: usize, count: usize) -> Result<Vec<u32>> {
        let all = self.memory.buffer(buffer).ok_or_else(|| no_buffer(buffer))?;
        Ok(slice(all, first, count, "read")?.to_vec())
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}

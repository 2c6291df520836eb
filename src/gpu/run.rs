//! Runs the programs of a graph on a device. A run is one compute pass and one submission. With paged banks it can be
//! several of both.

use super::exec::{GpuExecutor, READBACK_BUFFERS, READBACK_BYTES};
use super::memory::{GraphMemory, READBACK, create, read, read_words};
use super::pager::Pager;
use crate::error::{Result, bail};
use crate::graph::{
    BatchShape, BufferId, Counters, Executor, Graph, Pause, READBACK_WORDS, Selected, Selection, Ticket,
};
use crate::source::{TensorId, Tensors};
use std::ops::Range;
use std::sync::Arc;

impl Executor for GpuExecutor {
    fn run(&mut self, program: usize, steps: Range<usize>, shape: BatchShape) -> Result<()> {
        let encoder = self.advance(program, steps, shape)?;
        self.device.queue.submit([encoder.finish()]);
        self.device.check()
    }

    fn submit(&mut self, program: usize, steps: Range<usize>, shape: BatchShape) -> Result<Ticket> {
        let mut encoder = self.advance(program, steps.clone(), shape)?;
        let ticket = self.tickets;
        let from = self.memory.buffer(self.graph.readback)?;
        let to = &self.readbacks[(ticket % READBACK_BUFFERS) as usize];
        encoder.copy_buffer_to_buffer(from, 0, to, 0, READBACK_BYTES);
        let submission = self.device.queue.submit([encoder.finish()]);
        self.in_flight.push_back((ticket, submission));
        self.tickets += 1;
        self.counters.readback_bytes += READBACK_BYTES;
        let selected = self.selected.program(program)?;
        selected.count_bytes(&steps, shape, &mut self.counters);
        self.device.check()?;
        Ok(Ticket(ticket))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<[u32; READBACK_WORDS]> {
        match self.in_flight.pop_front() {
            Some((id, submission)) if id == ticket.0 => {
                let from = &self.readbacks[(id % READBACK_BUFFERS) as usize];
                read(&self.device, from, submission, bytemuck::pod_read_unaligned)
            }
            _ => bail!(Internal, "runs are waited for in the order they were submitted"),
        }
    }

    fn select(&mut self, selection: Arc<Selection>) -> Result<()> {
        self.selected = Selected::new(&self.graph, &selection);
        if let Some(pager) = &mut self.pager {
            pager.select(selection.clone(), &mut self.counters)?;
        }
        let mut contents = selection.contents.iter();
        contents.try_for_each(|(buffer, words)| self.write(*buffer, words))
    }

    fn replace(
        &mut self,
        graph: Arc<Graph>,
        selection: Arc<Selection>,
        tensors: Arc<dyn Tensors>,
        changed: &[TensorId],
    ) -> Result<()> {
        let device = self.device.clone();
        let scope = device.scope();
        let (memory, created) = GraphMemory::new(&device, &graph, Some((&self.graph, &self.memory)));
        scope.finish()?;
        device.pipelines.compile(&device.variants(&graph))?;
        self.replace_contents(&graph, &memory, &created.items, &*tensors, changed)?;

        // An equal graph on the same memory keeps its bind groups.
        let old = std::mem::replace(&mut self.graph, graph);
        let graph = self.graph.clone();
        let same = created.buffers == 0
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
        self.select(selection)?;
        if self.pager.is_some() {
            for routed in &graph.routed {
                self.write(routed.counts, &vec![0; routed.experts])?;
            }
        }
        // Two of them are the ring's.
        self.counters.buffers_created += created.buffers + 2;
        self.count_pipelines();
        self.inconsistent = false;
        Ok(())
    }

    fn write(&mut self, buffer: BufferId, words: &[u32]) -> Result<()> {
        let to = self.memory.buffer(buffer)?;
        self.device.queue.write_buffer(to, 0, bytemuck::cast_slice(words));
        self.counters.write_buffer_calls += 1;
        self.device.check()
    }

    fn read(&mut self, buffer: BufferId, first: usize, count: usize) -> Result<Vec<u32>> {
        let bytes = count as u64 * 4;
        let scope = self.device.scope();
        let to = create(&self.device, "read", bytes, READBACK);
        let mut encoder = self.device.device.create_command_encoder(&Default::default());
        encoder.copy_buffer_to_buffer(self.memory.buffer(buffer)?, first as u64 * 4, &to, 0, bytes);
        let submission = self.device.queue.submit([encoder.finish()]);
        scope.finish()?;
        self.counters.buffers_created += 1;
        read_words(&self.device, &to, submission)
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}

impl GpuExecutor {
    /// Encodes steps. With paged banks, the steps before the last pause are submitted here, and the experts that they
    /// chose are made present.
    fn advance(&mut self, program: usize, steps: Range<usize>, shape: BatchShape) -> Result<wgpu::CommandEncoder> {
        let Some(mut pager) = self.pager.take() else {
            return self.encode(program, steps, shape);
        };
        let result = self.advance_paged(&mut pager, program, steps, shape);
        self.pager = Some(pager);
        result
    }

    fn advance_paged(
        &mut self,
        pager: &mut Pager,
        program: usize,
        steps: Range<usize>,
        shape: BatchShape,
    ) -> Result<wgpu::CommandEncoder> {
        let mut at = steps.start;
        let selected = self.selected.program(program)?;
        let runs = |pause: &&Pause| {
            let resolved = selected.within(&pause.steps);
            steps.contains(&pause.steps.start) && resolved.is_ok_and(|resolved| !resolved.is_empty())
        };
        let pauses: Vec<Pause> = pager.pauses(program).iter().filter(runs).cloned().collect();
        for pause in pauses {
            let encoder = self.encode(program, at..pause.steps.start, shape)?;
            at = pause.steps.start;
            let wanted = pager.wanted(&pause, encoder)?;
            self.counters.readback_bytes += pager.count_bytes(&pause);
            let rounds = wanted.iter().map(Vec::len).max().unwrap_or(0);
            if pause.once && rounds > 1 {
                bail!(Internal, "a token takes more experts at once than a bank has slots");
            }
            for round in 0..rounds {
                for (waiting, groups) in pause.banks.iter().zip(&wanted) {
                    if let Some(members) = groups.get(round) {
                        pager.make_present(waiting.bank, members, &mut self.counters)?;
                    }
                }
                // The steps for the last group are encoded after the loop.
                if round + 1 < rounds {
                    let encoder = self.encode(program, pause.steps.clone(), shape)?;
                    self.device.queue.submit([encoder.finish()]);
                }
            }
        }
        self.encode(program, at..steps.end, shape)
    }

    /// One compute pass with the dispatches of those steps that run.
    fn encode(&mut self, program: usize, steps: Range<usize>, shape: BatchShape) -> Result<wgpu::CommandEncoder> {
        if self.inconsistent {
            bail!(
                DeviceError,
                "replacing weights failed half way; nothing can run before they are replaced again"
            );
        }
        let resolved = self.selected.program(program)?.within(&steps)?;
        let mut encoder = self.device.device.create_command_encoder(&Default::default());
        let mut pass = encoder.begin_compute_pass(&Default::default());
        for resolved in resolved {
            let step = &self.programs[program][resolved.step];
            let [x, y, z] = resolved.grid.workgroups(shape, step.width, step.threads, step.teams);
            pass.set_pipeline(step.pipeline(resolved));
            pass.set_bind_group(0, &step.bind_group, &[]);
            pass.dispatch_workgroups(x, y, z);
        }
        drop(pass);
        self.counters.passes += 1;
        self.counters.submits += 1;
        self.counters.dispatches += resolved.len() as u64;
        Ok(encoder)
    }
}

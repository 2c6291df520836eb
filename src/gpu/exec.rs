//! Performs a plan on a device: every buffer, bind group and grid is made once; a token is one pass and one submit.

use super::device::Device;
use super::memory::{self, Ring, SegmentBuffer};
use super::pager::Pager;
use super::probe::read_words;
use crate::container::{TensorId, Tensors};
use crate::error::{Result, bail};
use crate::kernel::Variant;
use crate::program::{
    ATTENTION_BLOCK, Bind, BufferId, Counters, Ctl, Executor, Extent, Grid, KvRead, PARAMS_SLOT, Pause, Plan, Program,
    Ticket, Which,
};
use crate::shader::GRID_WIDTH;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of the control words that are read back after a run.
const CTL_BYTES: u64 = size_of::<Ctl>() as u64;
/// Runs that may be in flight before the first is waited for, plus one.
const SLOTS: u64 = 3;

pub(super) struct RealStep {
    pipeline: Arc<wgpu::ComputePipeline>,
    bind_group: wgpu::BindGroup,
    threads: u32,
    teams: u32,
    columns: u32,
}

/// A plan on a device.
pub struct GpuExecutor {
    pub(super) device: Arc<Device>,
    pub(super) plan: Arc<Plan>,
    pub(super) buffers: Vec<wgpu::Buffer>,
    pub(super) matrices: Vec<Vec<SegmentBuffer>>,
    pub(super) vectors: Vec<wgpu::Buffer>,
    pub(super) programs: Vec<Vec<RealStep>>,
    /// The steps that run, by program, with their extents.
    chosen: Vec<Vec<(usize, Grid)>>,
    /// Weights are half replaced, and no run makes sense.
    pub(super) torn: bool,
    slots: Vec<wgpu::Buffer>,
    in_flight: VecDeque<(u64, wgpu::SubmissionIndex)>,
    tickets: u64,
    pub(super) counters: Counters,
    weight_bytes: [u64; Which::ALL.len()],
    kv_reads: [Vec<KvRead>; Which::ALL.len()],
    pub(super) pager: Option<Pager>,
}

impl GpuExecutor {
    /// Uploads the weights, compiles the kernels and makes every buffer and bind group.
    ///
    /// `progress` is told bytes uploaded and bytes in all. Errors: `OutOfMemory`, `DeviceError`, `DeviceLost`, and what the
    /// tensors' payloads have wrong with them.
    pub fn new(
        device: Arc<Device>,
        plan: Arc<Plan>,
        tensors: &dyn Tensors,
        progress: &mut dyn FnMut(u64, u64) -> Result<()>,
    ) -> Result<GpuExecutor> {
        device.check_loops(&plan)?;
        let steps = plan.planned().iter().flat_map(|program| &program.steps);
        let mut variants: Vec<Variant> = Vec::new();
        for variant in steps.map(|step| device.variant(step, plan.kv)) {
            if !variants.contains(&variant) {
                variants.push(variant);
            }
        }
        let scope = device.scope();
        let storage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::COPY_SRC;
        let buffers: Vec<_> = plan
            .buffers
            .iter()
            .map(|b| memory::buffer(&device, &b.label, b.bytes, storage))
            .collect();
        let matrices: Vec<_> = plan
            .matrices
            .iter()
            .map(|matrix| memory::allocate(&device, matrix))
            .collect();
        let vectors: Vec<_> = plan
            .vectors
            .iter()
            .map(|v| memory::buffer(&device, &v.label, v.padded_len() as u64 * 4, storage))
            .collect();
        scope.finish()?;

        let mut uploaded = 0;
        let compile = {
            let device = device.clone();
            move || device.compile(&variants)
        };
        // Drivers compile while the file is read.
        std::thread::scope(|threads| -> Result<()> {
            let compiling = threads.spawn(compile);
            let mut ring = Ring::new(&device)?;
            let total = plan.weight_bytes();
            for (vector, to) in plan.vectors.iter().zip(&vectors) {
                memory::upload_vector(&mut ring, vector, to, tensors)?;
            }
            for (buffer, to) in plan.buffers.iter().zip(&buffers) {
                memory::upload_fill(&mut ring, &buffer.fill, to, tensors)?;
            }
            for (matrix, to) in plan.matrices.iter().zip(&matrices) {
                memory::upload_matrix(&mut ring, matrix, to, tensors)?;
                progress(ring.uploaded.min(total), total)?;
            }
            ring.flush()?;
            uploaded = ring.uploaded;
            match compiling.join() {
                Ok(result) => result,
                Err(_) => bail!(DeviceError, "the driver's shader compiler crashed"),
            }
        })?;

        let scope = device.scope();
        let mut executor = GpuExecutor {
            weight_bytes: Default::default(),
            kv_reads: Default::default(),
            device: device.clone(),
            plan: plan.clone(),
            buffers,
            matrices: Vec::new(),
            vectors: Vec::new(),
            programs: Vec::new(),
            chosen: Vec::new(),
            torn: false,
            slots: Vec::new(),
            in_flight: VecDeque::new(),
            tickets: 0,
            counters: Counters::default(),
            pager: None,
        };
        let read = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        executor.slots = (0..SLOTS)
            .map(|_| memory::buffer(&device, "read.ctl", CTL_BYTES, read))
            .collect();
        for program in plan.planned() {
            let realised = executor.realise(program, &matrices, &vectors)?;
            executor.programs.push(realised);
        }
        executor.choose()?;
        scope.finish()?;
        let (pipelines, ms) = device.compile_counters();
        let count = executor.buffers.len() + vectors.len() + matrices.iter().map(Vec::len).sum::<usize>();
        let counters = &mut executor.counters;
        counters.buffers_created += count as u64 + SLOTS;
        counters.upload_bytes = uploaded;
        counters.pipelines_compiled = pipelines;
        counters.pipeline_us = (ms * 1000.0) as u64;
        counters.gpu_bytes = plan.weight_bytes() + plan.buffer_bytes();
        (executor.matrices, executor.vectors) = (matrices, vectors);
        Ok(executor)
    }

    /// Fetches experts from here, for a plan with paged banks.
    ///
    /// Errors: what the tables' tensors have wrong with them.
    pub fn page_from(&mut self, tensors: Arc<dyn Tensors>) -> Result<()> {
        let (device, plan) = (&self.device, self.plan.clone());
        let mut pager = Pager::new(device, plan.clone(), self.matrices.clone(), tensors)?;
        pager.follow(device, &self.buffers, plan, &mut self.counters)?;
        self.pager = Some(pager);
        Ok(())
    }

    /// The commands of some steps. With paged banks, the steps up to the last pause among them are submitted, and the
    /// experts that they chose are there.
    fn advance(&mut self, which: Which, steps: Range<usize>, extent: Extent) -> Result<wgpu::CommandEncoder> {
        if self.plan.paged.is_empty() {
            return self.encode(which, steps, extent);
        }
        let Some(mut pager) = self.pager.take() else {
            bail!(Usage, "experts are paged, and nobody said from where");
        };
        let result = self.fetch(&mut pager, which, steps, extent);
        self.pager = Some(pager);
        result
    }

    fn fetch(
        &mut self,
        pager: &mut Pager,
        which: Which,
        steps: Range<usize>,
        extent: Extent,
    ) -> Result<wgpu::CommandEncoder> {
        let mut at = steps.start;
        let here = |pause: &&Pause| steps.contains(&pause.steps.start);
        let pauses: Vec<Pause> = pager.pauses(which).iter().filter(here).cloned().collect();
        for pause in pauses {
            let encoder = self.encode(which, at..pause.steps.start, extent)?;
            at = pause.steps.start;
            let wanted = pager.wanted(&self.device, &self.buffers, &pause, encoder)?;
            self.counters.readback_bytes += pager.count_bytes(&pause);
            let rounds = wanted.iter().map(Vec::len).max().unwrap_or(0);
            if pause.once && rounds > 1 {
                bail!(Usage, "a token wants more experts at once than there are slots for");
            }
            for round in 0..rounds {
                for (waiting, groups) in pause.banks.iter().zip(&wanted) {
                    if let Some(members) = groups.get(round) {
                        pager.hold(&self.device, &self.buffers, waiting.bank, members, &mut self.counters)?;
                    }
                }
                // The last group's steps are those that follow anyway.
                if round + 1 < rounds {
                    let encoder = self.encode(which, pause.steps.clone(), extent)?;
                    self.device.queue.submit([encoder.finish()]);
                }
            }
        }
        self.encode(which, at..steps.end, extent)
    }

    pub(super) fn realise(
        &mut self,
        program: &Program,
        matrices: &[Vec<SegmentBuffer>],
        vectors: &[wgpu::Buffer],
    ) -> Result<Vec<RealStep>> {
        if program.steps.is_empty() {
            return Ok(Vec::new());
        }
        let bytes = program.steps.len() as u64 * PARAMS_SLOT;
        let usage = wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST;
        let params = memory::buffer(&self.device, "params", bytes, usage);
        let mut contents = vec![0u8; bytes as usize];
        let mut steps = Vec::new();
        for (step, slot) in program
            .steps
            .iter()
            .zip(contents.chunks_exact_mut(PARAMS_SLOT as usize))
        {
            let words = step.op.bytes();
            slot[..words.len()].copy_from_slice(words);
            let at = steps.len() as u64 * PARAMS_SLOT;
            let mut resources = vec![range(&params, at, (words.len() as u64).next_multiple_of(16))];
            for bind in &step.bindings {
                match *bind {
                    Bind::Weight(matrix, segment) => {
                        let planes = &matrices[matrix][segment];
                        resources.push(range(&planes.buffer, 0, planes.code_bytes));
                        resources.push(range(&planes.buffer, planes.scales_at, planes.scale_bytes));
                    }
                    Bind::Vector(vector) => resources.push(vectors[vector].as_entire_binding()),
                    Bind::Buffer(buffer) => resources.push(self.buffers[buffer].as_entire_binding()),
                }
            }
            let entries: Vec<_> = resources
                .into_iter()
                .enumerate()
                .map(|(i, resource)| wgpu::BindGroupEntry {
                    binding: i as u32,
                    resource,
                })
                .collect();
            let variant = self.device.variant(step, self.plan.kv);
            let bind_group = self.device.device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some(&step.label),
                layout: &self.device.layout(variant.kernel).0,
                entries: &entries,
            });
            steps.push(RealStep {
                pipeline: self.device.pipeline(&variant)?,
                bind_group,
                threads: variant.threads(),
                teams: variant.team.map_or(1, |team| team.teams()),
                columns: step.columns,
            });
        }
        self.device.queue.write_buffer(&params, 0, &contents);
        self.counters.bind_groups_created += steps.len() as u64;
        self.counters.buffers_created += 1;
        Ok(steps)
    }

    /// Takes over which of the realised steps the plan runs, and what its lists hold.
    pub(super) fn choose(&mut self) -> Result<()> {
        let chosen = |program: &Program| {
            let steps = program.steps.iter().enumerate();
            let number = |i: usize| program.numbers.get(i).copied().unwrap_or(i);
            steps.map(|(i, step)| (number(i), step.grid)).collect()
        };
        self.chosen = self.plan.programs.iter().map(chosen).collect();
        self.weight_bytes = Which::ALL.map(|which| self.plan.weight_bytes_read(which));
        self.kv_reads = Which::ALL.map(|which| self.plan.kv_reads(which));
        if let Some(pager) = &mut self.pager {
            pager.follow(&self.device, &self.buffers, self.plan.clone(), &mut self.counters)?;
        }
        let plan = self.plan.clone();
        plan.lists
            .iter()
            .try_for_each(|(buffer, words)| self.write(*buffer, words))
    }

    fn encode(&mut self, which: Which, steps: Range<usize>, extent: Extent) -> Result<wgpu::CommandEncoder> {
        if self.torn {
            bail!(
                DeviceError,
                "the weights were being replaced when that failed, and are not whole"
            );
        }
        let mut encoder = self.device.device.create_command_encoder(&Default::default());
        {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            let realised = &self.programs[which as usize];
            for (number, grid) in &self.chosen[which as usize][steps.clone()] {
                let step = &realised[*number];
                let [x, y, z] = workgroups(step, *grid, extent);
                pass.set_pipeline(&step.pipeline);
                pass.set_bind_group(0, &step.bind_group, &[]);
                pass.dispatch_workgroups(x, y, z);
            }
        }
        self.counters.passes += 1;
        self.counters.submits += 1;
        self.counters.dispatches += steps.len() as u64;
        Ok(encoder)
    }
}

fn range(buffer: &wgpu::Buffer, offset: u64, bytes: u64) -> wgpu::BindingResource<'_> {
    let size = std::num::NonZeroU64::new(bytes);
    wgpu::BindingResource::Buffer(wgpu::BufferBinding { buffer, offset, size })
}

fn workgroups(step: &RealStep, grid: Grid, extent: Extent) -> [u32; 3] {
    let columns = |per_group: u32| match per_group {
        0 => 1,
        _ => extent.columns.div_ceil(per_group),
    };
    let own = step.columns.min(extent.columns);
    let folded = |teams: u32, layers: u32| {
        let groups = teams.div_ceil(step.teams);
        [groups.min(GRID_WIDTH), groups.div_ceil(GRID_WIDTH), layers]
    };
    match grid {
        Grid::Teams(teams) => folded(teams, 1),
        Grid::TeamsEach(teams) => folded(teams, own),
        Grid::Threads(threads, per_group) => [threads.div_ceil(step.threads), columns(per_group), 1],
        Grid::Groups(groups, per_group) => [groups, columns(per_group), 1],
        Grid::Columns => [extent.columns, 1, 1],
        Grid::Blocks(kv_heads) => [extent.end.div_ceil(ATTENTION_BLOCK), kv_heads, extent.columns],
        Grid::Slots(teams, slots) => [teams.div_ceil(step.teams), slots, own],
        Grid::Tiles { threads, entries, most } => {
            let tiles = extent.columns.saturating_mul(entries).min(most);
            [threads.div_ceil(step.threads), tiles, 1]
        }
        Grid::One => [1, 1, 1],
    }
}

impl Executor for GpuExecutor {
    fn run(&mut self, which: Which, steps: Range<usize>, extent: Extent) -> Result<()> {
        let encoder = self.advance(which, steps, extent)?;
        self.device.queue.submit([encoder.finish()]);
        self.device.check()
    }

    fn submit(&mut self, which: Which, extent: Extent) -> Result<Ticket> {
        self.submit_part(which, 0..self.chosen[which as usize].len(), extent)
    }

    fn submit_part(&mut self, which: Which, steps: Range<usize>, extent: Extent) -> Result<Ticket> {
        let last = steps.end == self.chosen[which as usize].len();
        let mut encoder = self.advance(which, steps, extent)?;
        let slot = (self.tickets % SLOTS) as usize;
        encoder.copy_buffer_to_buffer(&self.buffers[self.plan.fixed.ctl], 0, &self.slots[slot], 0, CTL_BYTES);
        let submission = self.device.queue.submit([encoder.finish()]);
        self.in_flight.push_back((self.tickets, submission));
        self.tickets += 1;
        self.counters.readback_bytes += CTL_BYTES;
        if last {
            self.counters.weight_bytes += self.weight_bytes[which as usize];
            let reads = self.kv_reads[which as usize].iter();
            self.counters.kv_bytes += reads.map(|read| read.of_run(extent)).sum::<u64>();
        }
        self.device.check()?;
        Ok(Ticket(self.tickets - 1))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Ctl> {
        match self.in_flight.pop_front() {
            Some((id, submission)) if id == ticket.0 => {
                let words = read_words(&self.device, &self.slots[(id % SLOTS) as usize], submission)?;
                Ok(bytemuck::pod_read_unaligned(bytemuck::cast_slice(&words)))
            }
            _ => bail!(Usage, "runs are waited for in the order they were submitted"),
        }
    }

    fn select(&mut self, plan: Arc<Plan>) -> Result<()> {
        self.plan = plan;
        self.choose()
    }

    fn replace(&mut self, plan: Arc<Plan>, tensors: Arc<dyn Tensors>, changed: &[TensorId]) -> Result<()> {
        self.replace_weights(plan, tensors, changed)
    }

    fn write(&mut self, buffer: BufferId, words: &[u32]) -> Result<()> {
        self.device
            .queue
            .write_buffer(&self.buffers[buffer], 0, bytemuck::cast_slice(words));
        self.counters.write_buffer_calls += 1;
        self.device.check()
    }

    fn read(&mut self, buffer: BufferId, first: usize, count: usize) -> Result<Vec<u32>> {
        let scope = self.device.scope();
        let bytes = count as u64 * 4;
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        let to = memory::buffer(&self.device, "read", bytes, usage);
        let mut encoder = self.device.device.create_command_encoder(&Default::default());
        encoder.copy_buffer_to_buffer(&self.buffers[buffer], first as u64 * 4, &to, 0, bytes);
        let submission = self.device.queue.submit([encoder.finish()]);
        scope.finish()?;
        self.counters.buffers_created += 1;
        read_words(&self.device, &to, submission)
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}

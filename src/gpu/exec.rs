//! The executor of a graph on a device. Its buffers, bind groups and pipelines are made once.

use super::device::Device;
use super::memory::{GraphMemory, READBACK, create};
use super::pager::Pager;
use super::upload::{Ring, upload};
use crate::error::{Error, Result, bail, error};
use crate::graph::{
    Bind, Counters, Executor, Graph, PARAMS_SLOT, Program, READBACK_WORDS, Resolved, Selected, Selection, Step,
};
use crate::source::Tensors;
use std::collections::VecDeque;
use std::sync::Arc;

/// Bytes that are read back after a run.
pub(super) const READBACK_BYTES: u64 = READBACK_WORDS as u64 * 4;
/// One more than the number of runs that may be submitted before the first one is waited for.
pub(super) const READBACK_BUFFERS: u64 = 3;

/// A step with the objects that its dispatch needs.
pub(super) struct BoundStep {
    pub bind_group: wgpu::BindGroup,
    plain: Arc<wgpu::ComputePipeline>,
    masked: Option<Arc<wgpu::ComputePipeline>>,
    pub width: u32,
    /// Threads and teams of a workgroup.
    pub threads: u32,
    pub teams: u32,
}

impl BoundStep {
    /// The pipeline of the variant that runs.
    pub fn pipeline(&self, resolved: &Resolved) -> &wgpu::ComputePipeline {
        match &self.masked {
            Some(masked) if resolved.masked => masked,
            _ => &self.plain,
        }
    }
}

/// A graph on a device.
pub struct GpuExecutor {
    pub(super) device: Arc<Device>,
    pub(super) graph: Arc<Graph>,
    pub(super) selected: Selected,
    pub(super) memory: GraphMemory,
    /// The steps of each program.
    pub(super) programs: Vec<Vec<BoundStep>>,
    /// Replacing weights failed after some were overwritten, so no run is possible.
    pub(super) inconsistent: bool,
    /// The buffers that receive the readback words; runs use them in turn.
    pub(super) readbacks: Vec<wgpu::Buffer>,
    pub(super) in_flight: VecDeque<(u64, wgpu::SubmissionIndex)>,
    pub(super) tickets: u64,
    pub(super) counters: Counters,
    /// For a graph with paged banks.
    pub(super) pager: Option<Pager>,
}

impl GpuExecutor {
    /// Uploads the weights, compiles the kernels, and makes every buffer and bind group. Tensors are kept for a graph
    /// with paged banks only, whose experts are read from them.
    ///
    /// `progress` gets the bytes uploaded so far and in total. Errors: `OutOfMemory`, `DeviceError`, `DeviceLost`, and
    /// faults in the tensors' payloads.
    pub fn new(
        device: Arc<Device>,
        graph: Arc<Graph>,
        selection: Arc<Selection>,
        tensors: Arc<dyn Tensors>,
        progress: &mut dyn FnMut(u64, u64) -> Result<()>,
    ) -> Result<GpuExecutor> {
        device.check_loops(&graph)?;
        let scope = device.scope();
        let (memory, created) = GraphMemory::new(&device, &graph, None);
        scope.finish()?;
        let mut counters = Counters {
            buffers_created: created.buffers + READBACK_BUFFERS,
            ..Counters::default()
        };
        counters.upload_bytes = upload_and_compile(&device, &graph, &memory, &*tensors, progress)?;
        let scope = device.scope();
        let readbacks = (0..READBACK_BUFFERS).map(|_| create(&device, "readback", READBACK_BYTES, READBACK));
        let mut executor = GpuExecutor {
            readbacks: readbacks.collect(),
            device,
            graph,
            selected: Selected::default(),
            memory,
            programs: Vec::new(),
            inconsistent: false,
            in_flight: VecDeque::new(),
            tickets: 0,
            counters,
            pager: None,
        };
        executor.bind()?;
        executor.page(tensors)?;
        executor.select(selection)?;
        scope.finish()?;
        executor.count_pipelines();
        Ok(executor)
    }

    /// Makes the bind groups of all programs, in place of previous ones.
    pub(super) fn bind(&mut self) -> Result<()> {
        if self.memory.buffer(self.graph.readback)?.size() < READBACK_BYTES {
            bail!(Internal, "the readback buffer has fewer than {READBACK_BYTES} bytes");
        }
        // Free the memory that only the previous graph used before more is allocated.
        self.programs.clear();
        for program in &self.graph.programs {
            let steps = bind_program(&self.device, &self.graph, &self.memory, program)?;
            self.counters.bind_groups_created += steps.len() as u64;
            self.counters.buffers_created += u64::from(!steps.is_empty());
            self.programs.push(steps);
        }
        self.counters.gpu_bytes = self.graph.weight_bytes() + self.graph.buffer_bytes();
        Ok(())
    }

    /// Makes the pager that the graph needs.
    pub(super) fn page(&mut self, tensors: Arc<dyn Tensors>) -> Result<()> {
        let (device, memory, graph) = (self.device.clone(), self.memory.clone(), self.graph.clone());
        let is_paged = !graph.paged.is_empty();
        self.pager = is_paged
            .then(|| Pager::new(device, memory, graph, tensors))
            .transpose()?;
        Ok(())
    }

    /// Copies the device's counters of pipelines.
    pub(super) fn count_pipelines(&mut self) {
        let (count, microseconds) = self.device.pipelines.counters();
        self.counters.pipelines_compiled = count;
        self.counters.pipeline_us = microseconds;
    }
}

/// Uploads everything while other threads compile the graph's pipelines. Returns the bytes uploaded.
fn upload_and_compile(
    device: &Device,
    graph: &Graph,
    memory: &GraphMemory,
    tensors: &dyn Tensors,
    progress: &mut dyn FnMut(u64, u64) -> Result<()>,
) -> Result<u64> {
    let variants = device.variants(graph);
    std::thread::scope(|threads| {
        let compiling = threads.spawn(|| device.pipelines.compile(&variants));
        let total = graph.weight_bytes();
        let mut ring = Ring::new(device)?;
        upload(&mut ring, graph, memory, tensors, &|_| true, &mut |uploaded| {
            progress(uploaded.min(total), total)
        })?;
        match compiling.join() {
            Ok(result) => result.map(|()| ring.uploaded),
            Err(_) => bail!(DeviceError, "the driver's shader compiler crashed"),
        }
    })
}

/// Makes a program's bind groups, and one buffer with the parameters of all its steps.
fn bind_program(device: &Device, graph: &Graph, memory: &GraphMemory, program: &Program) -> Result<Vec<BoundStep>> {
    if program.steps.is_empty() {
        return Ok(Vec::new());
    }
    let bytes = program.steps.len() as u64 * PARAMS_SLOT;
    let usage = wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST;
    let params = create(device, "params", bytes, usage);
    let mut contents = vec![0u8; bytes as usize];
    let mut bound = Vec::new();
    let slots = contents.chunks_exact_mut(PARAMS_SLOT as usize);
    for (step, slot) in program.steps.iter().zip(slots) {
        let words = step.op.bytes();
        slot[..words.len()].copy_from_slice(words);
        let at = bound.len() as u64 * PARAMS_SLOT;
        let params = range(&params, at, (words.len() as u64).next_multiple_of(16));
        bound.push(bind_step(device, graph, memory, step, params)?);
    }
    device.queue.write_buffer(&params, 0, &contents);
    Ok(bound)
}

fn bind_step(
    device: &Device,
    graph: &Graph,
    memory: &GraphMemory,
    step: &Step,
    params: wgpu::BindingResource,
) -> Result<BoundStep> {
    let mut resources = vec![params];
    for bind in &step.bindings {
        match *bind {
            Bind::Weight(matrix, segment) => {
                let planes = memory.matrices.get(matrix).and_then(|segments| segments.get(segment));
                let planes = planes.ok_or_else(|| missing(step, bind))?;
                resources.push(range(&planes.buffer, 0, planes.code_bytes));
                resources.push(range(&planes.buffer, planes.scales_at, planes.scale_bytes));
            }
            Bind::Vector(vector) => {
                let vector = memory.vectors.get(vector).ok_or_else(|| missing(step, bind))?;
                resources.push(vector.as_entire_binding());
            }
            Bind::Buffer(buffer) => resources.push(memory.buffer(buffer)?.as_entire_binding()),
        }
    }
    let entry = |(binding, resource)| wgpu::BindGroupEntry { binding, resource };
    let entries: Vec<_> = (0..).zip(resources).map(entry).collect();
    let variant = device.variant(step, graph.kv, false);
    let bind_group = device.device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: Some(&step.label),
        layout: &device.pipelines.layout(variant.kernel).bindings,
        entries: &entries,
    });
    let masked = step.masked.map(|_| device.variant(step, graph.kv, true));
    Ok(BoundStep {
        bind_group,
        plain: device.pipelines.get(&variant)?,
        masked: masked.map(|masked| device.pipelines.get(&masked)).transpose()?,
        width: step.width,
        threads: variant.threads(),
        teams: variant.teams(),
    })
}

fn range(buffer: &wgpu::Buffer, offset: u64, bytes: u64) -> wgpu::BindingResource<'_> {
    let size = std::num::NonZeroU64::new(bytes);
    wgpu::BindingResource::Buffer(wgpu::BufferBinding { buffer, offset, size })
}

fn missing(step: &Step, bind: &Bind) -> Error {
    error!(Internal, "{}: the graph has no {bind:?}", step.label)
}

//! Small kernels that find out properties of a device when it is opened.

use super::device::Device;
use super::memory::{READBACK, create, read_words};
use super::pipelines::storage;
use crate::error::Result;
use crate::op::Access;
use half::f16;

const HALVES: &str = include_str!("../../shaders/probe/halves.wgsl");
const LANES: &str = include_str!("../../shaders/probe/lanes.wgsl");
const LOOPS: &str = include_str!("../../shaders/probe/loops.wgsl");

/// Whether `unpack2x16float` converts each of the 65,536 f16 values exactly, subnormals included. Any NaN is accepted
/// for a NaN: weights that are NaN are refused elsewhere.
pub fn halves_are_exact(device: &Device) -> Result<bool> {
    let words = run(device, "probe.halves", HALVES, 65536, 512)?;
    Ok(words.iter().enumerate().all(|(bits, &word)| {
        let (wanted, found) = (f16::from_bits(bits as u16).to_f32(), f32::from_bits(word));
        wanted.is_nan() || wanted.to_bits() == found.to_bits()
    }))
}

/// Whether thread `t` of a workgroup is lane `t % size` of a subgroup, and shuffles reach the neighbour.
pub fn lanes_are_in_order(device: &Device, size: u32) -> Result<bool> {
    let words = run(device, "probe.lanes", LANES, 1024, 8)?;
    Ok(words.iter().enumerate().all(|(i, &word)| {
        let thread = i as u32 % 128;
        word == (thread % size) | (size << 8) | ((thread ^ 1) << 16)
    }))
}

/// Iterations after which the driver ends the loops of a thread; `None` if a loop of 131,072 iterations finished.
pub fn loop_limit(device: &Device) -> Result<Option<u32>> {
    let words = 64;
    let found = run(device, "probe.loops", LOOPS, words, 1)?.first().copied();
    Ok(found.filter(|&steps| u64::from(steps) < words * 2048))
}

/// The words that one dispatch of a kernel writes to its only binding.
fn run(device: &Device, name: &str, text: &str, words: u64, workgroups: u32) -> Result<Vec<u32>> {
    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
    let scope = device.scope();
    let out = create(device, name, words * 4, usage);
    let read = create(device, name, words * 4, READBACK);
    scope.finish()?;
    let probe = Probe::new(device, name, text, &[(&out, Access::Write)])?;
    let mut encoder = probe.encode(1, workgroups);
    encoder.copy_buffer_to_buffer(&out, 0, &read, 0, words * 4);
    let submission = device.queue.submit([encoder.finish()]);
    read_words(device, &read, submission)
}

/// A small kernel without parameters, bound to buffers.
pub struct Probe<'a> {
    device: &'a Device,
    pipeline: wgpu::ComputePipeline,
    bind_group: wgpu::BindGroup,
}

impl<'a> Probe<'a> {
    /// Compiles and binds a kernel; `buffers` in the order of its bindings. Errors: `DeviceError`.
    pub fn new(device: &'a Device, name: &str, text: &str, buffers: &[(&wgpu::Buffer, Access)]) -> Result<Probe<'a>> {
        let bindings = buffers.iter().map(|&(_, access)| storage(access));
        let layout = device.pipelines.make_layout(name, bindings);
        let pipeline = device.pipelines.make(name, text, &layout)?;
        let resources = buffers.iter().map(|(buffer, _)| buffer.as_entire_binding());
        let entry = |(binding, resource)| wgpu::BindGroupEntry { binding, resource };
        let entries: Vec<_> = (0..).zip(resources).map(entry).collect();
        let bind_group = device.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some(name),
            layout: &layout.bindings,
            entries: &entries,
        });
        Ok(Probe {
            device,
            pipeline,
            bind_group,
        })
    }

    /// Encodes one pass with this number of dispatches.
    pub fn encode(&self, dispatches: u32, workgroups: u32) -> wgpu::CommandEncoder {
        let mut encoder = self.device.device.create_command_encoder(&Default::default());
        let mut pass = encoder.begin_compute_pass(&Default::default());
        for _ in 0..dispatches {
            pass.set_pipeline(&self.pipeline);
            pass.set_bind_group(0, &self.bind_group, &[]);
            pass.dispatch_workgroups(workgroups, 1, 1);
        }
        drop(pass);
        encoder
    }
}

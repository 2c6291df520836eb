//! Questions that only the device itself can answer, asked once when it is opened.

use super::device::Device;
use super::memory::buffer;
use crate::error::Result;
use half::f16;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

const HALVES: &str = include_str!("../../shaders/probe/halves.wgsl");

/// Whether `unpack2x16float` gives every one of the 65,536 halves exactly, subnormals included.
pub fn halves_are_exact(device: &Device) -> Result<bool> {
    let words = run(device, "probe.halves", HALVES, 65536, 512)?;
    Ok(words.iter().enumerate().all(|(bits, &word)| {
        let (wanted, found) = (f16::from_bits(bits as u16).to_f32(), f32::from_bits(word));
        // A weight that is not a number is refused elsewhere.
        wanted.is_nan() || wanted.to_bits() == found.to_bits()
    }))
}

const LANES: &str = include_str!("../../shaders/probe/lanes.wgsl");

/// Whether thread `t` of a workgroup is lane `t % size` of a subgroup, and shuffles reach the neighbour.
pub fn lanes_are_in_order(device: &Device, size: u32) -> Result<bool> {
    let words = run(device, "probe.lanes", LANES, 1024, 8)?;
    Ok(words.iter().enumerate().all(|(i, &word)| {
        let thread = i as u32 % 128;
        word == (thread % size) | (size << 8) | ((thread ^ 1) << 16)
    }))
}

const STEPS: &str = include_str!("../../shaders/probe/steps.wgsl");

/// Steps after which a thread's loops end, whether they are done or not; `None`: no such end was found in 131,072.
pub fn steps_of_loops(device: &Device) -> Result<Option<u32>> {
    let words = 64;
    let found = run(device, "probe.steps", STEPS, words, 1)?.first().copied();
    Ok(found.filter(|&steps| u64::from(steps) < words * 2048))
}

fn run(device: &Device, name: &str, text: &str, words: u64, groups: u32) -> Result<Vec<u32>> {
    let scope = device.scope();
    let out = buffer(
        device,
        name,
        words * 4,
        wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC,
    );
    let read = buffer(
        device,
        name,
        words * 4,
        wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
    );
    scope.finish()?;
    let probe = Probe::new(device, name, text, &[(&out, false)])?;
    let mut encoder = probe.encode(1, groups);
    encoder.copy_buffer_to_buffer(&out, 0, &read, 0, words * 4);
    let submission = device.queue.submit([encoder.finish()]);
    read_words(device, &read, submission)
}

/// A small kernel without parameters, bound to buffers.
pub(super) struct Probe<'a> {
    device: &'a Device,
    pipeline: wgpu::ComputePipeline,
    bind_group: wgpu::BindGroup,
}

impl<'a> Probe<'a> {
    /// `buffers` in binding order, each with whether it is only read.
    pub(super) fn new(
        device: &'a Device,
        name: &str,
        text: &str,
        buffers: &[(&wgpu::Buffer, bool)],
    ) -> Result<Probe<'a>> {
        let layout_entry = |(i, &(_, read_only)): (usize, &(&wgpu::Buffer, bool))| wgpu::BindGroupLayoutEntry {
            binding: i as u32,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer {
                ty: wgpu::BufferBindingType::Storage { read_only },
                has_dynamic_offset: false,
                min_binding_size: None,
            },
            count: None,
        };
        let layout = device
            .device
            .create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
                label: Some(name),
                entries: &buffers.iter().enumerate().map(layout_entry).collect::<Vec<_>>(),
            });
        let pipeline_layout = device.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some(name),
            bind_group_layouts: &[Some(&layout)],
            immediate_size: 0,
        });
        let pipeline = device.make(name, text, &pipeline_layout)?;
        let entries: Vec<_> = buffers
            .iter()
            .enumerate()
            .map(|(i, (buffer, _))| wgpu::BindGroupEntry {
                binding: i as u32,
                resource: buffer.as_entire_binding(),
            })
            .collect();
        let bind_group = device.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some(name),
            layout: &layout,
            entries: &entries,
        });
        Ok(Probe {
            device,
            pipeline,
            bind_group,
        })
    }

    /// One pass of so many dispatches.
    pub(super) fn encode(&self, dispatches: u32, groups: u32) -> wgpu::CommandEncoder {
        let mut encoder = self.device.device.create_command_encoder(&Default::default());
        let mut pass = encoder.begin_compute_pass(&Default::default());
        for _ in 0..dispatches {
            pass.set_pipeline(&self.pipeline);
            pass.set_bind_group(0, &self.bind_group, &[]);
            pass.dispatch_workgroups(groups, 1, 1);
        }
        drop(pass);
        encoder
    }
}

/// Maps a buffer after a submission and copies its words.
pub(super) fn read_words(
    device: &Device,
    buffer: &wgpu::Buffer,
    submission: wgpu::SubmissionIndex,
) -> Result<Vec<u32>> {
    wait_for_map(device, buffer, wgpu::MapMode::Read, submission)?;
    let view = buffer
        .get_mapped_range(..)
        .map_err(|err| device.failure(format!("mapping a buffer: {err}")))?;
    let words = bytemuck::pod_collect_to_vec(&view);
    drop(view);
    buffer.unmap();
    Ok(words)
}

/// Maps a buffer and waits until a submission is done and the map is there.
pub(super) fn wait_for_map(
    device: &Device,
    buffer: &wgpu::Buffer,
    mode: wgpu::MapMode,
    submission: wgpu::SubmissionIndex,
) -> Result<()> {
    let (sender, receiver) = std::sync::mpsc::channel();
    buffer.map_async(mode, .., move |result| {
        let _ = sender.send(result);
    });
    device.wait(submission)?;
    // Another thread that polls the same device may have taken our callback and not called it yet.
    loop {
        device.check()?;
        match receiver.recv_timeout(Duration::from_millis(5)) {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(err)) => return Err(device.failure(format!("mapping a buffer: {err}"))),
            Err(RecvTimeoutError::Disconnected) => return Err(device.failure("a buffer's mapping was dropped")),
            Err(RecvTimeoutError::Timeout) => {
                let polled = device.device.poll(wgpu::PollType::Poll);
                polled.map_err(|err| device.failure(format!("waiting for the device: {err}")))?;
            }
        }
    }
}

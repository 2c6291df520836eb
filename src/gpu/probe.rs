//! Two questions that only the device itself can answer, asked once when it is opened.

use super::device::Device;
use crate::error::{Error, Kind, Result};
use half::f16;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

const HALVES: &str = "
@group(0) @binding(0) var<storage, read_write> out: array<vec2<f32>>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    out[id.x] = unpack2x16float((2u * id.x) | ((2u * id.x + 1u) << 16u));
}";

/// Whether `unpack2x16float` gives every one of the 65,536 halves exactly, subnormals included.
pub fn halves_are_exact(device: &Device) -> Result<bool> {
    let words = run(device, "probe.halves", HALVES, 65536, 512)?;
    Ok(words.iter().enumerate().all(|(bits, &word)| {
        let (wanted, found) = (f16::from_bits(bits as u16).to_f32(), f32::from_bits(word));
        // A weight that is not a number is refused elsewhere.
        wanted.is_nan() || wanted.to_bits() == found.to_bits()
    }))
}

const LANES: &str = "
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@compute @workgroup_size(128)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
    @builtin(subgroup_invocation_id) lane: u32,
    @builtin(subgroup_size) size: u32,
) {
    out[group.x * 128u + thread] = lane | (size << 8u) | (subgroupShuffleXor(thread, 1u) << 16u);
}";

/// Whether thread `t` of a workgroup is lane `t % size` of a subgroup, and shuffles reach the neighbour.
pub fn lanes_are_in_order(device: &Device, size: u32) -> Result<bool> {
    let words = run(device, "probe.lanes", LANES, 1024, 8)?;
    Ok(words.iter().enumerate().all(|(i, &word)| {
        let thread = i as u32 % 128;
        word == (thread % size) | (size << 8) | ((thread ^ 1) << 16)
    }))
}

fn run(device: &Device, name: &str, text: &str, words: u64, groups: u32) -> Result<Vec<u32>> {
    let pipeline = device.make(name, text, None)?;
    let scope = device.scope();
    let buffer = |usage| {
        device.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some(name),
            size: words * 4,
            usage,
            mapped_at_creation: false,
        })
    };
    let out = buffer(wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC);
    let read = buffer(wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST);
    let bind_group = device.device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: Some(name),
        layout: &pipeline.get_bind_group_layout(0),
        entries: &[wgpu::BindGroupEntry {
            binding: 0,
            resource: out.as_entire_binding(),
        }],
    });
    let mut encoder = device.device.create_command_encoder(&Default::default());
    {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        pass.set_pipeline(&pipeline);
        pass.set_bind_group(0, &bind_group, &[]);
        pass.dispatch_workgroups(groups, 1, 1);
    }
    encoder.copy_buffer_to_buffer(&out, 0, &read, 0, words * 4);
    let submission = device.queue.submit([encoder.finish()]);
    scope.finish()?;
    read_words(device, &read, submission)
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
        .map_err(|err| Error::new(Kind::DeviceError, format!("mapping a buffer: {err}")))?;
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
    let failed = |what: String| Error::new(Kind::DeviceError, what);
    let wait = wgpu::PollType::Wait {
        submission_index: Some(submission),
        timeout: None,
    };
    let polled = device.device.poll(wait);
    polled.map_err(|err| failed(format!("waiting for the device: {err}")))?;
    // Another thread that polls the same device may have taken our callback and not called it yet.
    loop {
        device.check()?;
        match receiver.recv_timeout(Duration::from_millis(5)) {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(err)) => return Err(failed(format!("mapping a buffer: {err}"))),
            Err(RecvTimeoutError::Disconnected) => return Err(failed("a buffer's mapping was dropped".into())),
            Err(RecvTimeoutError::Timeout) => {
                let polled = device.device.poll(wgpu::PollType::Poll);
                polled.map_err(|err| failed(format!("waiting for the device: {err}")))?;
            }
        }
    }
}

//! Device memory: the buffers of a graph, and reading buffers back.

use super::device::Device;
use crate::error::{Result, bail};
use crate::graph::{Buffer, BufferId, Graph, Matrix, Segment, Vector};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// The usage of a graph's buffers and vectors.
pub const STORAGE: wgpu::BufferUsages = wgpu::BufferUsages::STORAGE
    .union(wgpu::BufferUsages::COPY_DST)
    .union(wgpu::BufferUsages::COPY_SRC);
/// The usage of buffers that are read back.
pub const READBACK: wgpu::BufferUsages = wgpu::BufferUsages::MAP_READ.union(wgpu::BufferUsages::COPY_DST);

/// The offset of a storage binding is a multiple of this on every device.
const OFFSET_ALIGNMENT: u64 = 256;

/// Creates a buffer.
pub fn create(device: &Device, label: &str, bytes: u64, usage: wgpu::BufferUsages) -> wgpu::Buffer {
    device.device.create_buffer(&wgpu::BufferDescriptor {
        label: Some(label),
        size: bytes,
        usage,
        mapped_at_creation: false,
    })
}

/// The planes of a segment in one buffer: the code plane at offset 0, then the scale plane.
#[derive(Clone)]
pub struct SegmentBuffer {
    pub buffer: wgpu::Buffer,
    /// Offset of the scale plane.
    pub scales_at: u64,
    pub code_bytes: u64,
    pub scale_bytes: u64,
}

/// Everything that a graph has in device memory, apart from the parameters of its steps.
#[derive(Default)]
pub struct GraphMemory {
    pub buffers: Vec<wgpu::Buffer>,
    pub vectors: Vec<wgpu::Buffer>,
    /// The segments of each matrix.
    pub matrices: Vec<Vec<SegmentBuffer>>,
}

impl GraphMemory {
    /// Creates all buffers, without contents.
    pub fn new(device: &Device, graph: &Graph) -> GraphMemory {
        let buffers = graph.buffers.iter().map(|buffer| create_buffer(device, buffer));
        let vectors = graph.vectors.iter().map(|vector| create_vector(device, vector));
        let matrices = graph.matrices.iter().map(|matrix| create_matrix(device, matrix));
        GraphMemory {
            buffers: buffers.collect(),
            vectors: vectors.collect(),
            matrices: matrices.collect(),
        }
    }

    /// A buffer of the graph. Errors: `Internal` for one that does not exist.
    pub fn buffer(&self, buffer: BufferId) -> Result<&wgpu::Buffer> {
        match self.buffers.get(buffer) {
            Some(buffer) => Ok(buffer),
            None => bail!(Internal, "the graph has no buffer {buffer}"),
        }
    }

    /// The number of wgpu buffers.
    pub fn count(&self) -> usize {
        self.buffers.len() + self.vectors.len() + self.matrices.iter().map(Vec::len).sum::<usize>()
    }
}

/// Creates a buffer of a graph.
pub fn create_buffer(device: &Device, buffer: &Buffer) -> wgpu::Buffer {
    create(device, &buffer.label, buffer.bytes, STORAGE)
}

/// Creates the buffer of a vector.
pub fn create_vector(device: &Device, vector: &Vector) -> wgpu::Buffer {
    create(device, &vector.label, vector.padded_len() as u64 * 4, STORAGE)
}

/// Creates a buffer for each segment of a matrix.
pub fn create_matrix(device: &Device, matrix: &Matrix) -> Vec<SegmentBuffer> {
    let segment = |segment: &Segment| {
        let code_bytes = segment.geometry.code_bytes() as u64;
        let scale_bytes = segment.geometry.scale_bytes() as u64;
        let scales_at = code_bytes.next_multiple_of(OFFSET_ALIGNMENT);
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST;
        SegmentBuffer {
            buffer: create(device, &matrix.label, scales_at + scale_bytes, usage),
            scales_at,
            code_bytes,
            scale_bytes,
        }
    };
    matrix.segments.iter().map(segment).collect()
}

/// Maps a buffer after a submission and copies its words.
pub fn read_words(device: &Device, buffer: &wgpu::Buffer, submission: wgpu::SubmissionIndex) -> Result<Vec<u32>> {
    read(device, buffer, submission, bytemuck::pod_collect_to_vec)
}

/// Maps a buffer after a submission and calls `take` with its bytes.
pub fn read<T>(
    device: &Device,
    buffer: &wgpu::Buffer,
    submission: wgpu::SubmissionIndex,
    take: impl FnOnce(&[u8]) -> T,
) -> Result<T> {
    wait_for_map(device, buffer, wgpu::MapMode::Read, submission)?;
    let view = buffer
        .get_mapped_range(..)
        .map_err(|err| device.failure(format!("mapping a buffer: {err}")))?;
    let taken = take(&view);
    drop(view);
    buffer.unmap();
    Ok(taken)
}

/// Maps a buffer and waits until a submission is done and the buffer is mapped.
pub fn wait_for_map(
    device: &Device,
    buffer: &wgpu::Buffer,
    mode: wgpu::MapMode,
    submission: wgpu::SubmissionIndex,
) -> Result<()> {
    let (sender, receiver) = channel();
    buffer.map_async(mode, .., move |result| {
        let _ = sender.send(result);
    });
    device.wait(submission)?;
    // Another thread that polls the same device may have taken this callback and not called it yet.
    loop {
        device.check()?;
        match receiver.recv_timeout(Duration::from_millis(5)) {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(err)) => return Err(device.failure(format!("mapping a buffer: {err}"))),
            Err(RecvTimeoutError::Disconnected) => return Err(device.failure("the mapping of a buffer was dropped")),
            Err(RecvTimeoutError::Timeout) => {
                let polled = device.device.poll(wgpu::PollType::Poll);
                polled.map_err(|err| device.failure(format!("waiting for the device: {err}")))?;
            }
        }
    }
}

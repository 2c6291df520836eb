//! Device memory: the buffers of a graph, and reading buffers back.

use super::device::Device;
use crate::error::{Result, error};
use crate::graph::{BufferId, Graph, MatrixId, Segment, VectorId};
use std::collections::HashSet;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// The usage of weights.
const WEIGHTS: wgpu::BufferUsages = wgpu::BufferUsages::STORAGE.union(wgpu::BufferUsages::COPY_DST);
/// The usage of a graph's buffers and vectors.
const STORAGE: wgpu::BufferUsages = WEIGHTS.union(wgpu::BufferUsages::COPY_SRC);
/// The usage of buffers that are read back.
pub const READBACK: wgpu::BufferUsages = wgpu::BufferUsages::MAP_READ.union(wgpu::BufferUsages::COPY_DST);

/// The offset of a storage binding is a multiple of this on every device.
const OFFSET_ALIGNMENT: u64 = 256;

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
#[derive(Clone)]
pub struct GraphMemory {
    pub buffers: Vec<wgpu::Buffer>,
    pub vectors: Vec<wgpu::Buffer>,
    /// The segments of each matrix.
    pub matrices: Vec<Vec<SegmentBuffer>>,
}

/// A buffer or weight of a graph.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum Item {
    Buffer(BufferId),
    Vector(VectorId),
    Matrix(MatrixId),
}

/// The items of a graph that have new memory, without contents.
#[derive(Default)]
pub struct Created {
    pub items: HashSet<Item>,
    /// The number of new wgpu buffers.
    pub buffers: u64,
}

impl Created {
    fn add(&mut self, device: &Device, item: Item, label: &str, bytes: u64, usage: wgpu::BufferUsages) -> wgpu::Buffer {
        self.items.insert(item);
        self.buffers += 1;
        create(device, label, bytes, usage)
    }
}

impl GraphMemory {
    /// Memory for a graph. Takes over the memory of items that the graph `old` has as well, and creates the rest.
    pub fn new(device: &Device, graph: &Graph, old: Option<(&Graph, &GraphMemory)>) -> (GraphMemory, Created) {
        let mut created = Created::default();
        let kept = old.map(|(old, memory)| (&old.buffers[..], &memory.buffers[..]));
        let buffers = reuse(&graph.buffers, kept, |i, buffer| {
            created.add(device, Item::Buffer(i), &buffer.label, buffer.bytes, STORAGE)
        });
        let kept = old.map(|(old, memory)| (&old.vectors[..], &memory.vectors[..]));
        let vectors = reuse(&graph.vectors, kept, |i, vector| {
            let bytes = vector.padded_len() as u64 * 4;
            created.add(device, Item::Vector(i), &vector.label, bytes, STORAGE)
        });
        let kept = old.map(|(old, memory)| (&old.matrices[..], &memory.matrices[..]));
        let matrices = reuse(&graph.matrices, kept, |i, matrix| {
            let mut add = |bytes| created.add(device, Item::Matrix(i), &matrix.label, bytes, WEIGHTS);
            let segments = matrix.segments.iter();
            segments.map(|segment| segment_buffer(segment, &mut add)).collect()
        });
        let memory = GraphMemory {
            buffers,
            vectors,
            matrices,
        };
        (memory, created)
    }

    /// A buffer of the graph. Errors: `Internal` for one that does not exist.
    pub fn buffer(&self, buffer: BufferId) -> Result<&wgpu::Buffer> {
        let found = self.buffers.get(buffer);
        found.ok_or_else(|| error!(Internal, "the graph has no buffer {buffer}"))
    }
}

/// For each new item the memory of an equal old item, or new memory.
fn reuse<A: PartialEq, T: Clone>(
    new: &[A],
    kept: Option<(&[A], &[T])>,
    mut create: impl FnMut(usize, &A) -> T,
) -> Vec<T> {
    let (old, kept) = kept.unwrap_or_default();
    let one = |(i, wanted): (usize, &A)| {
        // Most items have the same index in both graphs.
        let found = match old.get(i) == Some(wanted) {
            true => Some(i),
            false => old.iter().position(|old| old == wanted),
        };
        match found.and_then(|i| kept.get(i)) {
            Some(kept) => kept.clone(),
            None => create(i, wanted),
        }
    };
    new.iter().enumerate().map(one).collect()
}

fn segment_buffer(segment: &Segment, create: impl FnOnce(u64) -> wgpu::Buffer) -> SegmentBuffer {
    let code_bytes = segment.geometry.code_bytes() as u64;
    let scale_bytes = segment.geometry.scale_bytes() as u64;
    let scales_at = code_bytes.next_multiple_of(OFFSET_ALIGNMENT);
    SegmentBuffer {
        buffer: create(scales_at + scale_bytes),
        scales_at,
        code_bytes,
        scale_bytes,
    }
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

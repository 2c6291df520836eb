//! Uploads weights and first contents. Rows are repacked from the tensors' payloads directly into a staging ring.

use super::device::Device;
use super::memory::{GraphMemory, Item, SegmentBuffer, wait_for_map};
use super::repack::{Region, RowBlock, row_blocks, row_ranges};
use crate::dtype::planes::{Amount, NO_ENTRY, Source};
use crate::error::{Result, bail};
use crate::graph::{Fill, Graph, Matrix, Run, Segment, sources, stored};
use crate::source::Tensors;
use rayon::prelude::*;
use std::slice;

/// Bytes of one staging buffer. An upload needs two of them and one block of host memory.
const RING_BYTES: usize = 2 << 20;

/// Two staging buffers that take turns: the host fills one while the device copies from the other.
pub struct Ring<'a> {
    device: &'a Device,
    buffers: [wgpu::Buffer; 2],
    /// The last copy out of each buffer; `None` while the buffer is mapped.
    busy: [Option<wgpu::SubmissionIndex>; 2],
    turn: usize,
    scratch: Vec<u8>,
    used: usize,
    copies: Vec<StagedCopy>,
    /// Bytes uploaded so far.
    pub uploaded: u64,
}

/// Bytes in a staging buffer, and their destination.
struct StagedCopy {
    from: usize,
    len: usize,
    to: wgpu::Buffer,
    offset: u64,
}

impl<'a> Ring<'a> {
    /// Creates the staging buffers. Errors: `OutOfMemory`, `DeviceError`.
    pub fn new(device: &'a Device) -> Result<Ring<'a>> {
        let scope = device.scope();
        let buffers = [0, 1].map(|_| {
            device.device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("staging"),
                size: RING_BYTES as u64,
                usage: wgpu::BufferUsages::MAP_WRITE | wgpu::BufferUsages::COPY_SRC,
                mapped_at_creation: true,
            })
        });
        scope.finish()?;
        Ok(Ring {
            device,
            buffers,
            busy: [None, None],
            turn: 0,
            scratch: vec![0; RING_BYTES],
            used: 0,
            copies: Vec::new(),
            uploaded: 0,
        })
    }

    /// Lets `fill` write `len` bytes that go to `offset` of `to`; both are multiples of 4.
    fn put(
        &mut self,
        to: &wgpu::Buffer,
        offset: u64,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        if len > RING_BYTES {
            bail!(
                OutOfMemory,
                "{len} bytes do not fit into a staging buffer of {RING_BYTES} bytes"
            );
        }
        if self.used + len > RING_BYTES {
            self.flush()?;
        }
        fill(&mut self.scratch[self.used..self.used + len])?;
        self.copies.push(StagedCopy {
            from: self.used,
            len,
            to: to.clone(),
            offset,
        });
        self.used += len;
        self.uploaded += len as u64;
        Ok(())
    }

    fn put_bytes(&mut self, to: &wgpu::Buffer, offset: u64, bytes: &[u8]) -> Result<()> {
        self.put(to, offset, bytes.len(), |out| {
            out.copy_from_slice(bytes);
            Ok(())
        })
    }

    /// Submits the copies that are pending.
    pub fn flush(&mut self) -> Result<()> {
        if self.used == 0 {
            return Ok(());
        }
        let buffer = &self.buffers[self.turn];
        if let Some(submission) = self.busy[self.turn].take() {
            wait_for_map(self.device, buffer, wgpu::MapMode::Write, submission)?;
        }
        let mut view = buffer
            .get_mapped_range_mut(..self.used as u64)
            .map_err(|err| self.device.failure(format!("mapping a staging buffer: {err}")))?;
        view.copy_from_slice(&self.scratch[..self.used]);
        drop(view);
        buffer.unmap();
        let mut encoder = self.device.device.create_command_encoder(&Default::default());
        for copy in self.copies.drain(..) {
            encoder.copy_buffer_to_buffer(buffer, copy.from as u64, &copy.to, copy.offset, copy.len as u64);
        }
        self.busy[self.turn] = Some(self.device.queue.submit([encoder.finish()]));
        self.turn ^= 1;
        self.used = 0;
        self.device.check()
    }
}

/// Uploads the weights and first contents of the items for which `wanted` is true. `progress` gets the bytes that the
/// ring has uploaded so far.
///
/// Errors: the device's, faults in the tensors' payloads, and errors of `progress`.
pub fn upload(
    ring: &mut Ring,
    graph: &Graph,
    memory: &GraphMemory,
    tensors: &dyn Tensors,
    wanted: &dyn Fn(Item) -> bool,
    progress: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<()> {
    for (i, (vector, to)) in graph.vectors.iter().zip(&memory.vectors).enumerate() {
        if wanted(Item::Vector(i)) {
            ring.put_bytes(to, 0, bytemuck::cast_slice(&vector.values(tensors)?))?;
        }
    }
    for (i, (buffer, to)) in graph.buffers.iter().zip(&memory.buffers).enumerate() {
        if wanted(Item::Buffer(i)) {
            upload_fill(ring, &buffer.fill, to, tensors)?;
        }
    }
    for (i, (matrix, to)) in graph.matrices.iter().zip(&memory.matrices).enumerate() {
        if wanted(Item::Matrix(i)) {
            upload_matrix(ring, matrix, to, tensors)?;
            progress(ring.uploaded)?;
        }
    }
    ring.flush()
}

fn upload_fill(ring: &mut Ring, fill: &Fill, to: &wgpu::Buffer, tensors: &dyn Tensors) -> Result<()> {
    let Fill::Rope {
        inv_freq, positions, ..
    } = fill
    else {
        let words = fill.words(tensors)?;
        let mut blocks = (0..).step_by(RING_BYTES).zip(words.chunks(RING_BYTES / 4));
        return blocks.try_for_each(|(at, words)| ring.put_bytes(to, at, bytemuck::cast_slice(words)));
    };
    let row = inv_freq.len() * 8;
    let block = (RING_BYTES / 2 / row).max(1) as u32;
    for first in (0..*positions).step_by(block as usize) {
        let count = block.min(positions - first);
        ring.put(to, u64::from(first) * row as u64, count as usize * row, |out| {
            out.par_chunks_exact_mut(row).enumerate().for_each(|(i, out)| {
                let pairs = fill.rope_row(first + i as u32);
                out.copy_from_slice(bytemuck::cast_slice(&pairs));
            });
            Ok(())
        })?;
    }
    Ok(())
}

/// Repacks and uploads a matrix. Each page of its tensors is read from the file once and then released, so a large
/// tensor is never completely in host memory.
fn upload_matrix(ring: &mut Ring, matrix: &Matrix, buffers: &[SegmentBuffer], tensors: &dyn Tensors) -> Result<()> {
    let stored = stored(&matrix.parts, tensors)?;
    let sources = sources(matrix.planes, &stored)?;
    let release = |blocks: &[RowBlock]| {
        let mut read: Vec<_> = blocks.iter().map(|block| block.tensor).collect();
        read.dedup();
        read.iter().for_each(|&tensor| tensors.release(matrix.parts[tensor]));
    };
    for (segment, to) in matrix.segments.iter().zip(buffers) {
        upload_segment(ring, segment, to, &sources, &release)?;
    }
    ring.flush()?;
    matrix.parts.iter().for_each(|&id| tensors.release(id));
    Ok(())
}

fn upload_segment(
    ring: &mut Ring,
    segment: &Segment,
    to: &SegmentBuffer,
    sources: &[Source],
    release: &dyn Fn(&[RowBlock]),
) -> Result<()> {
    let geometry = segment.geometry;
    if let Some(header) = geometry.header() {
        ring.put_bytes(&to.buffer, to.scales_at, &header.to_le_bytes())?;
    }
    let put = &mut |offset: u64, len: usize, write: Write| ring.put(&to.buffer, offset, len, write);
    let least = (1..32).find(|&rows| geometry.may_begin_at(rows)).unwrap_or(32);
    let most = (RING_BYTES / 2 / geometry.widest_row_bytes() / 32 * 32).max(least);
    for rows in row_ranges(segment, sources, most) {
        let blocks = row_blocks(&segment.runs, rows.clone(), geometry.begin());
        put_blocks(put, segment, to, sources, rows.start, &blocks)?;
        release(&blocks);
    }
    for (tensor, source) in sources.iter().enumerate() {
        put_col_scales(put, segment, to, tensor, source)?;
    }
    if geometry.planes.has_overlay() {
        put_overlay(put, to.scales_at, geometry.begin(), &segment.runs, sources)?;
        // The end of the last row's entries.
        let end = (geometry.begin().words + geometry.amount.words) as u32;
        let at = to.scales_at + geometry.record_offset(geometry.rows) as u64;
        ring.put_bytes(&to.buffer, at, &end.to_le_bytes())?;
    }
    Ok(())
}

/// Overwrites run number `run` of a segment with as many rows of another tensor. `first` is the row of `source` that
/// belongs to the first row of the matrix's first segment. Later submissions see the new rows. Returns the bytes sent.
///
/// Errors: faults in the payload; `Bounds` for rows that need more than the run's capacity.
pub fn overwrite_run(
    device: &Device,
    segment: &Segment,
    to: &SegmentBuffer,
    run: usize,
    source: &Source,
    first: usize,
) -> Result<u64> {
    let Some(old) = segment.runs.get(run) else {
        bail!(Internal, "run {run} of a segment with {} runs", segment.runs.len());
    };
    let (begin, count, capacity) = (first + segment.row0 as usize, old.rows.len(), old.capacity);
    let rows = begin..begin + count;
    let amount = source.amount(rows.clone());
    if !amount.fits(capacity) {
        bail!(
            Bounds,
            "{count} rows of an expert need {amount:?}, its slot has {capacity:?}"
        );
    }
    let mut sent = 0;
    let put = &mut |offset: u64, len: usize, write: Write| {
        let mut bytes = vec![0; len];
        write(&mut bytes)?;
        device.queue.write_buffer(&to.buffer, offset, &bytes);
        sent += len as u64;
        Ok(())
    };
    let (at, before) = segment.before(run);
    let before = segment.geometry.begin() + before;
    let sources = slice::from_ref(source);
    let runs = [Run {
        part: 0,
        rows,
        capacity,
    }];
    put_blocks(put, segment, to, sources, at, &row_blocks(&runs, 0..count, before))?;
    put_col_scales(put, segment, to, run, source)?;
    if segment.geometry.planes.has_overlay() {
        put_overlay(put, to.scales_at, before, &runs, sources)?;
    }
    Ok(sent)
}

/// Writes all bytes of a slice.
type Write<'w> = &'w mut dyn FnMut(&mut [u8]) -> Result<()>;
/// Gives a number of bytes to a writer, and puts them at an offset of a segment's buffer.
type Put<'p> = dyn FnMut(u64, usize, Write) -> Result<()> + 'p;

/// Puts consecutive blocks. `row`: index of the first row among the stored rows.
fn put_blocks(
    put: &mut Put,
    segment: &Segment,
    to: &SegmentBuffer,
    sources: &[Source],
    row: usize,
    blocks: &[RowBlock],
) -> Result<()> {
    for region in Region::ALL {
        let bytes = region.bytes(blocks, sources);
        if let Some(first) = blocks.first().filter(|_| bytes != 0) {
            let at = region.offset(segment, to, sources, row, first);
            put(at, bytes.next_multiple_of(4), &mut |out| {
                let (data, padding) = out.split_at_mut(bytes);
                padding.fill(0);
                region.write(blocks, sources, data)
            })?;
        }
    }
    Ok(())
}

/// Puts the column scales of the segment's tensor or run of this number, in layouts that have them.
fn put_col_scales(put: &mut Put, segment: &Segment, to: &SegmentBuffer, number: usize, source: &Source) -> Result<()> {
    let geometry = segment.geometry;
    if !geometry.planes.has_column_scales() {
        return Ok(());
    }
    let at = to.scales_at + geometry.col_scale_offset(number) as u64;
    put(at, geometry.groups() * 64, &mut |out| source.col_scales(out))
}

/// Puts the overlay entries of runs, and unused entries in the rest of their capacities. `before`: what is stored before.
fn put_overlay(put: &mut Put, scales_at: u64, before: Amount, runs: &[Run], sources: &[Source]) -> Result<()> {
    let mut at = scales_at + before.words as u64 * 4;
    let mut bytes = Vec::new();
    let mut send = |bytes: &mut Vec<u8>| -> Result<()> {
        put(at, bytes.len(), &mut |out| {
            out.copy_from_slice(bytes);
            Ok(())
        })?;
        at += bytes.len() as u64;
        bytes.clear();
        Ok(())
    };
    for run in runs {
        let source = &sources[run.part];
        let unused = run.capacity.less(source.amount(run.rows.clone())).words;
        let rows = run.rows.clone().map(Some);
        for row in rows.chain(std::iter::repeat_n(None, unused)) {
            // One row adds at most 4 bytes for each column, which is far less than a staging buffer holds.
            match row {
                Some(row) => source.overlay(row, &mut bytes)?,
                None => bytes.extend(NO_ENTRY.to_le_bytes()),
            }
            if bytes.len() >= RING_BYTES / 4 {
                send(&mut bytes)?;
            }
        }
    }
    match bytes.is_empty() {
        true => Ok(()),
        false => send(&mut bytes),
    }
}

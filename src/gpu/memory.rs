//! Weights on their way to the device: repacked in blocks of rows, straight from the file's map into a staging ring.

use super::device::Device;
use super::probe::wait_for_map;
use crate::container::Tensors;
use crate::dtype::planes::{Amount, NO_ENTRY, Origin, Planes, SHARED_ROWS, Source};
use crate::error::{Result, bail};
use crate::program::{Fill, Matrix, Run, Segment, Vector, sources};
use rayon::prelude::*;
use std::ops::Range;

/// Bytes of one staging buffer. Two of them and one block of host memory are all that an upload takes.
const RING_BYTES: usize = 4 << 20;
/// Rows that one task repacks.
const TASK_ROWS: usize = 64;

/// Two staging buffers that take turns: one is filled while the device copies from the other.
pub struct Ring<'a> {
    device: &'a Device,
    buffers: [wgpu::Buffer; 2],
    /// The last copy out of each buffer; `None` while it is mapped.
    busy: [Option<wgpu::SubmissionIndex>; 2],
    turn: usize,
    scratch: Vec<u8>,
    used: usize,
    copies: Vec<(wgpu::Buffer, u64, usize, usize)>,
    /// Bytes put so far.
    pub uploaded: u64,
}

impl<'a> Ring<'a> {
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

    /// Lets `fill` write `len` bytes that go to `offset` of `target`; both are multiples of 4.
    fn put(
        &mut self,
        target: &wgpu::Buffer,
        offset: u64,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        if len > RING_BYTES {
            bail!(
                OutOfMemory,
                "{len} bytes do not fit into a staging buffer of {RING_BYTES}"
            );
        }
        if self.used + len > RING_BYTES {
            self.flush()?;
        }
        fill(&mut self.scratch[self.used..self.used + len])?;
        self.copies.push((target.clone(), offset, self.used, len));
        self.used += len;
        self.uploaded += len as u64;
        Ok(())
    }

    /// Sends what was put.
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
            .map_err(|err| self.device.failure(format!("staging: {err}")))?;
        view.copy_from_slice(&self.scratch[..self.used]);
        drop(view);
        buffer.unmap();
        let mut encoder = self.device.device.create_command_encoder(&Default::default());
        for (target, offset, at, len) in self.copies.drain(..) {
            encoder.copy_buffer_to_buffer(buffer, at as u64, &target, offset, len as u64);
        }
        self.busy[self.turn] = Some(self.device.queue.submit([encoder.finish()]));
        self.turn ^= 1;
        self.used = 0;
        self.device.check()
    }
}

/// Where a segment's planes lie in its buffer.
#[derive(Clone)]
pub struct SegmentBuffer {
    pub buffer: wgpu::Buffer,
    pub scales_at: u64,
    pub code_bytes: u64,
    pub scale_bytes: u64,
}

/// Storage offsets are multiples of this on every device.
const OFFSET_ALIGNMENT: u64 = 256;

/// Creates a buffer for each segment.
pub fn allocate(device: &Device, matrix: &Matrix) -> Vec<SegmentBuffer> {
    let create = |segment: &Segment| {
        let (code_bytes, scale_bytes) = (
            segment.geometry.code_bytes() as u64,
            segment.geometry.scale_bytes() as u64,
        );
        let scales_at = code_bytes.next_multiple_of(OFFSET_ALIGNMENT);
        let buffer = device.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some(&matrix.label),
            size: scales_at + scale_bytes,
            usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        SegmentBuffer {
            buffer,
            scales_at,
            code_bytes,
            scale_bytes,
        }
    };
    matrix.segments.iter().map(create).collect()
}

/// Repacks and sends a matrix; each page of its tensors is read from the file once.
pub fn upload_matrix(ring: &mut Ring, matrix: &Matrix, buffers: &[SegmentBuffer], tensors: &dyn Tensors) -> Result<()> {
    let sources = sources(matrix.planes, &matrix.parts, tensors)?;
    // Pages that were read are given back as the upload goes on, so that a large tensor never is in memory as a whole.
    let release = |pieces: &[Piece]| {
        let mut parts: Vec<_> = pieces.iter().map(|piece| piece.part).collect();
        parts.dedup();
        parts.iter().for_each(|&part| tensors.release(matrix.parts[part]));
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
    release: &dyn Fn(&[Piece]),
) -> Result<()> {
    let geometry = segment.geometry;
    if let Some(header) = geometry.header() {
        ring.put(&to.buffer, to.scales_at, 4, |out| {
            out.copy_from_slice(&header.to_le_bytes());
            Ok(())
        })?;
    }
    let least = (1..32).find(|&rows| geometry.may_begin_at(rows)).unwrap_or(32);
    let block = (RING_BYTES / 2 / geometry.widest_row_bytes() / 32 * 32).max(least);
    for rows in blocks(segment, sources, block) {
        let pieces = pieces(&segment.runs, rows.clone(), geometry.begin());
        for part in Part::ALL {
            let bytes = part.bytes(&pieces, sources);
            if let Some(first) = pieces.first().filter(|_| bytes != 0) {
                let at = part.offset(segment, to, sources, rows.start, first);
                ring.put(&to.buffer, at, bytes.next_multiple_of(4), |out| {
                    let (data, padding) = out.split_at_mut(bytes);
                    padding.fill(0);
                    part.write(&pieces, sources, data)
                })?;
            }
        }
        release(&pieces);
    }
    if geometry.planes == Planes::I8Col {
        for (part, source) in sources.iter().enumerate() {
            let at = to.scales_at + geometry.col_scale_offset(part) as u64;
            ring.put(&to.buffer, at, geometry.units() * 64, |out| source.col_scales(out))?;
        }
    }
    if geometry.planes.has_overlay() {
        upload_overlay(ring, segment, to, sources)?;
    }
    Ok(())
}

/// What of the planes lies row by row.
#[derive(Clone, Copy)]
enum Part {
    Codes,
    Words,
    Records,
    SharedRecords,
    UnitScales,
}

impl Part {
    const ALL: [Part; 5] = [
        Part::Codes,
        Part::Words,
        Part::Records,
        Part::SharedRecords,
        Part::UnitScales,
    ];

    fn piece_bytes(self, piece: &Piece, sources: &[Source]) -> usize {
        let source = &sources[piece.part];
        match self {
            Part::Codes => source.code_bytes(piece.origin, &piece.rows),
            Part::Words => source.word_bytes(&piece.rows),
            Part::Records => source.record_bytes(&piece.rows),
            Part::SharedRecords => 0,
            Part::UnitScales => source.unit_scale_bytes(piece.origin, &piece.rows),
        }
    }

    /// Of pieces of which the first begins a record.
    fn bytes(self, pieces: &[Piece], sources: &[Source]) -> usize {
        match (self, pieces.first()) {
            (Part::SharedRecords, Some(first)) if sources[first.part].planes() == Planes::BitsN => {
                let rows: usize = pieces.iter().map(|piece| piece.rows.len()).sum();
                rows.div_ceil(SHARED_ROWS) * 12
            }
            _ => pieces.iter().map(|piece| self.piece_bytes(piece, sources)).sum(),
        }
    }

    /// Where in the buffer it lies of pieces of which `first`, with stored row `row`, is the first.
    fn offset(self, segment: &Segment, to: &SegmentBuffer, sources: &[Source], row: usize, first: &Piece) -> u64 {
        let geometry = segment.geometry;
        let before = sources[first.part].before_row(first.origin, first.rows.start);
        let (codes, scales) = (0, to.scales_at);
        match self {
            Part::Codes => codes + (row * geometry.code_row_bytes() + before.vectors * 16) as u64,
            Part::Words => codes + before.words as u64 * 4,
            Part::Records | Part::SharedRecords => scales + geometry.record_offset(row) as u64,
            Part::UnitScales => scales + geometry.unit_scale_offset(row, before) as u64,
        }
    }

    fn write(self, pieces: &[Piece], sources: &[Source], out: &mut [u8]) -> Result<()> {
        if let Part::SharedRecords = self {
            return shared_records(pieces, sources, out);
        }
        let mut tasks = Vec::with_capacity(pieces.len());
        let mut rest = out;
        for piece in pieces {
            let (here, after) = rest.split_at_mut(self.piece_bytes(piece, sources));
            tasks.push((piece, here));
            rest = after;
        }
        tasks.into_par_iter().try_for_each(|(piece, out)| {
            let (source, rows) = (&sources[piece.part], piece.rows.clone());
            match self {
                Part::Codes => source.codes(piece.origin, rows, out),
                Part::Words => source.words(rows, out),
                Part::Records => source.records(piece.origin, rows, out),
                Part::SharedRecords => Ok(()),
                Part::UnitScales => source.unit_scales(piece.origin, rows, out),
            }
        })
    }
}

/// Writes the records that rows of pieces share.
fn shared_records(pieces: &[Piece], sources: &[Source], out: &mut [u8]) -> Result<()> {
    out.fill(0);
    let records = out.as_chunks_mut::<12>().0;
    let rows = pieces
        .iter()
        .flat_map(|piece| piece.rows.clone().map(move |row| (piece, row)));
    for (i, (piece, row)) in rows.enumerate() {
        let record = &mut records[i / SHARED_ROWS];
        sources[piece.part].shared_record(piece.origin, row, i % SHARED_ROWS, record)?;
    }
    Ok(())
}

/// The rows of a segment by and by, at most so many at a time. Behind a run that leaves room the codes of the next begin
/// elsewhere.
fn blocks(segment: &Segment, sources: &[Source], most: usize) -> Vec<Range<usize>> {
    let mut blocks = Vec::new();
    let mut send = |rows: Range<usize>| {
        let firsts = rows.clone().step_by(most);
        blocks.extend(firsts.map(|first| first..(first + most).min(rows.end)));
    };
    let (mut from, mut at) = (0, 0);
    for run in &segment.runs {
        at += run.rows.len();
        if sources[run.part].amount(run.rows.clone()) != run.room {
            send(from..at);
            from = at;
        }
    }
    send(from..at);
    blocks
}

/// Sends other rows to run number `run` of a segment: those from `first` on of `source`, less the rows of earlier segments.
/// What is submitted later sees them. Returns how many bytes that were.
///
/// Errors: what the payload has wrong with it, `Bounds` for rows that hold more than there is room for.
pub fn replace(
    device: &Device,
    segment: &Segment,
    to: &SegmentBuffer,
    run: usize,
    source: &Source,
    first: usize,
) -> Result<u64> {
    let geometry = segment.geometry;
    let Some(here) = segment.runs.get(run) else {
        bail!(Usage, "no run {run} of {}", segment.runs.len());
    };
    let (at, before) = segment.before(run);
    let (rows, begin) = (here.rows.len(), first + segment.row0 as usize);
    let amount = source.amount(begin..begin + rows);
    if !amount.fits(here.room) {
        bail!(
            Bounds,
            "{rows} rows that vary hold {amount:?}, there is room for {:?}",
            here.room
        );
    }
    let sources = std::slice::from_ref(source);
    let moved = Run {
        part: 0,
        rows: begin..begin + rows,
        room: here.room,
    };
    let before = geometry.begin() + before;
    let pieces = pieces(std::slice::from_ref(&moved), 0..rows, before);
    let mut sent = 0;
    let mut send = |offset: u64, bytes: &[u8]| {
        if !bytes.is_empty() {
            device.queue.write_buffer(&to.buffer, offset, bytes);
            sent += bytes.len() as u64;
        }
    };
    for part in Part::ALL {
        let mut bytes = vec![0; part.bytes(&pieces, sources)];
        if let Some(first) = pieces.first().filter(|_| !bytes.is_empty()) {
            part.write(&pieces, sources, &mut bytes)?;
            send(part.offset(segment, to, sources, at, first), &bytes);
        }
    }
    if geometry.planes == Planes::I8Col {
        let mut scales = vec![0; geometry.units() * 64];
        source.col_scales(&mut scales)?;
        send(to.scales_at + geometry.col_scale_offset(run) as u64, &scales);
    }
    if geometry.planes.has_overlay() {
        let mut entries = Vec::with_capacity(here.room.words * 4);
        moved
            .rows
            .clone()
            .try_for_each(|row| source.overlay(row, &mut entries))?;
        entries.extend(no_entries(here.room.less(amount)));
        send(to.scales_at + before.words as u64 * 4, &entries);
    }
    Ok(sent)
}

/// As many overlay entries that change nothing, as the device holds them.
fn no_entries(room: Amount) -> impl Iterator<Item = u8> {
    (0..room.words).flat_map(|_| NO_ENTRY.to_le_bytes())
}

/// Sends overlay entries, and where the last row's end.
fn upload_overlay(ring: &mut Ring, segment: &Segment, to: &SegmentBuffer, sources: &[Source]) -> Result<()> {
    let geometry = segment.geometry;
    let mut at = to.scales_at + geometry.begin().words as u64 * 4;
    let mut bytes = Vec::new();
    let mut send = |bytes: &mut Vec<u8>| {
        let sent = ring.put(&to.buffer, at, bytes.len(), |out| {
            out.copy_from_slice(bytes);
            Ok(())
        });
        at += bytes.len() as u64;
        bytes.clear();
        sent
    };
    for run in &segment.runs {
        let source = &sources[run.part];
        for row in run.rows.clone() {
            // A row has at most one entry a column.
            source.overlay(row, &mut bytes)?;
            if bytes.len() >= RING_BYTES / 4 {
                send(&mut bytes)?;
            }
        }
        for byte in no_entries(run.room.less(source.amount(run.rows.clone()))) {
            bytes.push(byte);
            if bytes.len() == RING_BYTES / 4 {
                send(&mut bytes)?;
            }
        }
    }
    if !bytes.is_empty() {
        send(&mut bytes)?;
    }
    let end = (geometry.begin().words + geometry.amount.words) as u32;
    let at = to.scales_at + geometry.record_offset(geometry.rows) as u64;
    ring.put(&to.buffer, at, 4, |out| {
        out.copy_from_slice(&end.to_le_bytes());
        Ok(())
    })
}

/// A few rows that one task repacks.
struct Piece {
    part: usize,
    rows: Range<usize>,
    /// Where its run lies.
    origin: Origin,
}

/// The stored rows `range` of some runs, before the first of which is `before`.
fn pieces(runs: &[Run], range: Range<usize>, mut before: Amount) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut at = 0;
    for run in runs {
        let (from, to) = (range.start.max(at), range.end.min(at + run.rows.len()));
        for first in (from..to).step_by(TASK_ROWS) {
            let start = run.rows.start + first - at;
            let rows = start..start + TASK_ROWS.min(to - first);
            pieces.push(Piece {
                part: run.part,
                rows,
                origin: Origin {
                    first: run.rows.start,
                    before,
                },
            });
        }
        at += run.rows.len();
        before += run.room;
    }
    pieces
}

/// Decodes and sends a vector.
pub fn upload_vector(ring: &mut Ring, vector: &Vector, to: &wgpu::Buffer, tensors: &dyn Tensors) -> Result<()> {
    let values = vector.values(tensors)?;
    ring.put(to, 0, values.len() * 4, |out| {
        out.copy_from_slice(bytemuck::cast_slice(&values));
        Ok(())
    })
}

/// Sends a buffer's first contents, if it has any.
pub fn upload_fill(ring: &mut Ring, fill: &Fill, to: &wgpu::Buffer, tensors: &dyn Tensors) -> Result<()> {
    let (inv_freq, positions) = match fill {
        Fill::Zero => return Ok(()),
        Fill::Experts { .. } => {
            let words = fill.expert_words(tensors)?;
            return ring.put(to, 0, words.len() * 4, |out| {
                out.copy_from_slice(bytemuck::cast_slice(&words));
                Ok(())
            });
        }
        Fill::Rope {
            inv_freq, positions, ..
        } => (inv_freq, positions),
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

/// Creates a plain buffer.
pub fn buffer(device: &Device, label: &str, bytes: u64, usage: wgpu::BufferUsages) -> wgpu::Buffer {
    device.device.create_buffer(&wgpu::BufferDescriptor {
        label: Some(label),
        size: bytes,
        usage,
        mapped_at_creation: false,
    })
}

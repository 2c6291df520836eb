//! Offsets and contents of rows in the planes of a segment.

use super::memory::SegmentBuffer;
use crate::dtype::planes::{Amount, Origin, Planes, SHARED_ROWS, Source};
use crate::error::Result;
use crate::graph::{Run, Segment};
use rayon::prelude::*;
use std::ops::Range;

/// Largest number of rows that one task repacks.
const TASK_ROWS: usize = 64;

/// Consecutive rows of one tensor.
pub struct RowBlock {
    /// Index among the stacked tensors.
    pub tensor: usize,
    /// Rows of the tensor.
    pub rows: Range<usize>,
    /// The first row and the offset of the run that the rows belong to.
    pub origin: Origin,
}

/// The stored rows `range` of some runs; `before` is the amount that is stored before the first run.
pub fn row_blocks(runs: &[Run], range: Range<usize>, mut before: Amount) -> Vec<RowBlock> {
    let mut blocks = Vec::new();
    let mut at = 0;
    for run in runs {
        let (from, to) = (range.start.max(at), range.end.min(at + run.rows.len()));
        for first in (from..to).step_by(TASK_ROWS) {
            let start = run.rows.start + first - at;
            blocks.push(RowBlock {
                tensor: run.part,
                rows: start..start + TASK_ROWS.min(to - first),
                origin: Origin {
                    first: run.rows.start,
                    before,
                },
            });
        }
        at += run.rows.len();
        before += run.capacity;
    }
    blocks
}

/// The stored rows of a segment in ranges of at most `most` rows. A range ends after a run that does not fill its
/// capacity, because there is a gap before the codes of the next run.
pub fn row_ranges(segment: &Segment, sources: &[Source], most: usize) -> Vec<Range<usize>> {
    let mut ranges = Vec::new();
    let mut push = |rows: Range<usize>| {
        let firsts = rows.clone().step_by(most);
        ranges.extend(firsts.map(|first| first..(first + most).min(rows.end)));
    };
    let (mut from, mut at) = (0, 0);
    for run in &segment.runs {
        at += run.rows.len();
        if sources[run.part].amount(run.rows.clone()) != run.capacity {
            push(from..at);
            from = at;
        }
    }
    push(from..at);
    ranges
}

/// A region of the planes that is ordered by row.
#[derive(Clone, Copy)]
pub enum Region {
    /// Vectors of codes.
    Codes,
    /// Words of the code plane that follow its vectors.
    Words,
    /// A record for each row, or for every [`SHARED_ROWS`] rows.
    Records,
    /// Scales of groups of 32 columns.
    GroupScales,
}

impl Region {
    pub const ALL: [Region; 4] = [Region::Codes, Region::Words, Region::Records, Region::GroupScales];

    /// Whether the blocks have records that rows share.
    fn is_shared(self, blocks: &[RowBlock], sources: &[Source]) -> bool {
        let first = blocks.first().map(|first| sources[first.tensor].planes());
        matches!(self, Region::Records) && first.is_some_and(Planes::shares_records)
    }

    fn block_bytes(self, block: &RowBlock, sources: &[Source]) -> usize {
        let source = &sources[block.tensor];
        match self {
            Region::Codes => source.code_bytes(block.origin, &block.rows),
            Region::Words => source.word_bytes(&block.rows),
            Region::Records => source.record_bytes(&block.rows),
            Region::GroupScales => source.group_scale_bytes(block.origin, &block.rows),
        }
    }

    /// Bytes that consecutive blocks take. The first block has to begin a shared record.
    pub fn bytes(self, blocks: &[RowBlock], sources: &[Source]) -> usize {
        match self.is_shared(blocks, sources) {
            true => {
                blocks
                    .iter()
                    .map(|block| block.rows.len())
                    .sum::<usize>()
                    .div_ceil(SHARED_ROWS)
                    * 12
            }
            false => blocks.iter().map(|block| self.block_bytes(block, sources)).sum(),
        }
    }

    /// The offset of a block in the segment's buffer. `row`: index of its first row among the stored rows.
    pub fn offset(
        self,
        segment: &Segment,
        to: &SegmentBuffer,
        sources: &[Source],
        row: usize,
        block: &RowBlock,
    ) -> u64 {
        let geometry = segment.geometry;
        let before = sources[block.tensor].before_row(block.origin, block.rows.start);
        match self {
            Region::Codes => (row * geometry.code_row_bytes() + before.vectors * 16) as u64,
            Region::Words => before.words as u64 * 4,
            Region::Records => to.scales_at + geometry.record_offset(row) as u64,
            Region::GroupScales => to.scales_at + geometry.group_scale_offset(before) as u64,
        }
    }

    /// Writes the contents of consecutive blocks. Errors: faults in the tensors' payloads.
    pub fn write(self, blocks: &[RowBlock], sources: &[Source], out: &mut [u8]) -> Result<()> {
        if self.is_shared(blocks, sources) {
            return shared_records(blocks, sources, out);
        }
        let mut tasks = Vec::with_capacity(blocks.len());
        let mut rest = out;
        for block in blocks {
            let (here, after) = rest.split_at_mut(self.block_bytes(block, sources));
            tasks.push((block, here));
            rest = after;
        }
        tasks.into_par_iter().try_for_each(|(block, out)| {
            let (source, rows) = (&sources[block.tensor], block.rows.clone());
            match self {
                Region::Codes => source.codes(block.origin, rows, out),
                Region::Words => source.words(rows, out),
                Region::Records => source.records(block.origin, rows, out),
                Region::GroupScales => source.group_scales(block.origin, rows, out),
            }
        })
    }
}

fn shared_records(blocks: &[RowBlock], sources: &[Source], out: &mut [u8]) -> Result<()> {
    out.fill(0);
    let (records, _) = out.as_chunks_mut::<12>();
    let rows = blocks
        .iter()
        .flat_map(|block| block.rows.clone().map(move |row| (block, row)));
    for (i, (block, row)) in rows.enumerate() {
        let record = &mut records[i / SHARED_ROWS];
        sources[block.tensor].shared_record(block.origin, row, i % SHARED_ROWS, record)?;
    }
    Ok(())
}

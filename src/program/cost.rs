//! What a plan takes and what its programs cost, told from the plan alone.

use super::{Bind, Buffer, BufferId, Extent, Plan, Program, Step, Which};
use crate::kernel::{Access, Op};
use std::collections::HashSet;

/// Columns that a chunk of attention takes together; see `shaders/lib/attention_chunk.wgsl`.
const CHUNK_COLUMNS: u32 = 4;

/// What a plan takes on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Bytes of all weights.
    pub weight_bytes: u64,
    /// Bytes of cached keys and values, for all positions of the context.
    pub kv_bytes: u64,
    /// Bytes of the states of recurrent layers.
    pub state_bytes: u64,
    /// Bytes of all other buffers: activations, tables.
    pub other_bytes: u64,
    /// The programs that have steps.
    pub programs: Vec<ProgramCost>,
}

/// What one run of a program costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramCost {
    /// Which program.
    pub which: Which,
    /// Its steps.
    pub dispatches: usize,
    /// Steps that have to wait until those before them are done: see [`Program::barriers`].
    pub barriers: usize,
    /// Bytes of weights that one run with one column, or a round with all its drafts, reads.
    pub weight_bytes: u64,
}

/// What attention reads of cached keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvRead {
    /// Bytes of a position: its keys and values, of the heads that are read.
    pub bytes: u64,
    /// Positions a column sees, itself included; 0 = all.
    pub window: u32,
    /// Columns that read together.
    pub columns: u32,
}

impl KvRead {
    /// Bytes that a run reads.
    pub fn of_run(&self, extent: Extent) -> u64 {
        let together = self.columns.max(1);
        let start = extent.end.saturating_sub(extent.columns);
        let firsts = (start..extent.end).step_by(together as usize);
        let seen = firsts.map(|pos| {
            let first = match self.window {
                0 => 0,
                window => (pos + 1).saturating_sub(window),
            };
            u64::from(extent.end.min(pos.saturating_add(together)) - first)
        });
        seen.sum::<u64>() * self.bytes
    }
}

impl Plan {
    /// What the attention steps of a program read of the caches; of a speculative round, whose draft head has fewer columns to
    /// itself, at most. Steps that read alike are one.
    pub fn kv_reads(&self, which: Which) -> Vec<KvRead> {
        let mut reads: Vec<KvRead> = Vec::new();
        let program = self.program(which);
        let mut shares = program.shares.iter().peekable();
        for (number, step) in program.steps.iter().enumerate() {
            let share = shares.next_if(|share| share.0 == number).map(|share| share.1[0]);
            let (kv_heads, head_vectors, window, columns) = match &step.op {
                Op::AttnBlock(p) => (p.kv_heads, p.head_vectors, p.window, 1),
                Op::AttnBlockSome(p) => (p.kv_heads, p.head_vectors, p.window, 1),
                Op::AttnChunk(p) => (p.kv_heads, p.head_vectors, p.window, CHUNK_COLUMNS),
                Op::AttnChunkSome(p) => (p.kv_heads, p.head_vectors, p.window, CHUNK_COLUMNS),
                _ => continue,
            };
            let heads = share.unwrap_or(u64::from(kv_heads));
            let bytes = 2 * heads * u64::from(head_vectors) * 4 * self.kv.bytes();
            let alike = |read: &&mut KvRead| (read.window, read.columns) == (window, columns);
            match reads.iter_mut().find(alike) {
                Some(read) => read.bytes += bytes,
                None => reads.push(KvRead { bytes, window, columns }),
            }
        }
        reads
    }

    /// Steps that the loops of a thread take at most, of the kernels where that grows with the context: attention of a chunk
    /// goes over its keys once and over its weights twice in blocks of 64, see `shaders/lib/attention_chunk.wgsl`.
    pub fn loop_steps(&self) -> u64 {
        let steps = self.programs.iter().flat_map(|program| &program.steps);
        let of_step = |step: &Step| {
            let (Op::AttnChunk(p) | Op::AttnChunkSome(p)) = &step.op else {
                return 0;
            };
            let seen = match p.window {
                0 => self.ctx,
                window => self.ctx.min(window.saturating_add(CHUNK_COLUMNS + 64)),
            };
            // Each loop takes a step to find that it is done.
            u64::from(seen.div_ceil(64)) * (u64::from(p.head_vectors) + 2 * 64 + 4)
        };
        steps.map(of_step).max().unwrap_or(0)
    }

    /// What the plan takes, and what its programs cost.
    pub fn cost(&self) -> Cost {
        let steps = || self.programs.iter().flat_map(|program| &program.steps);
        let caches = self.written_by(steps(), |op| matches!(op, Op::Rope(_)), &["k_cache", "v_cache"]);
        let states = self.written_by(steps(), |op| matches!(op, Op::DeltaNet(_)), &["ring", "state"]);
        let programs = Which::ALL
            .iter()
            .filter(|&&which| !self.program(which).steps.is_empty());
        Cost {
            weight_bytes: self.weight_bytes(),
            kv_bytes: caches,
            state_bytes: states,
            other_bytes: self.buffer_bytes() - caches - states,
            programs: programs
                .map(|&which| ProgramCost {
                    which,
                    dispatches: self.program(which).steps.len(),
                    barriers: self.program(which).barriers(),
                    weight_bytes: self.weight_bytes_read(which),
                })
                .collect(),
        }
    }

    /// Bytes of the buffers that some steps bind under one of these names to write them.
    fn written_by<'a>(
        &self,
        steps: impl Iterator<Item = &'a Step>,
        which: impl Fn(&Op) -> bool,
        names: &[&str],
    ) -> u64 {
        let written = steps.filter(|step| which(&step.op)).flat_map(Step::writes);
        let buffers: HashSet<BufferId> = written
            .filter(|(name, _)| names.contains(name))
            .map(|(_, buffer)| buffer)
            .collect();
        let buffers = buffers.iter().filter_map(|&buffer| self.buffers.get(buffer));
        buffers.map(|buffer: &Buffer| buffer.bytes).sum()
    }
}

impl Program {
    /// Steps that have to wait: those that read or write what a step since the last wait wrote, or write what one of these
    /// read. As a wait is for everything before it, this is how many barriers the program needs in its order.
    pub fn barriers(&self) -> usize {
        let (mut read, mut written) = (HashSet::new(), HashSet::new());
        let mut barriers = 0;
        for step in &self.steps {
            let uses = step.uses();
            let waits = uses.iter().any(|(buffer, access)| {
                written.contains(buffer) || (*access == Access::Write && read.contains(buffer))
            });
            if waits {
                barriers += 1;
                read.clear();
                written.clear();
            }
            for (buffer, access) in uses {
                match access {
                    Access::Read => read.insert(buffer),
                    Access::Write => written.insert(buffer),
                };
            }
        }
        barriers
    }
}

impl Step {
    /// The buffers it binds, and how.
    fn uses(&self) -> Vec<(BufferId, Access)> {
        let written: Vec<BufferId> = self.writes().into_iter().map(|(_, buffer)| buffer).collect();
        let bound = self.bindings.iter().filter_map(|bind| match *bind {
            Bind::Buffer(buffer) => Some(buffer),
            Bind::Weight(..) | Bind::Vector(_) => None,
        });
        bound
            .map(|buffer| match written.contains(&buffer) {
                true => (buffer, Access::Write),
                false => (buffer, Access::Read),
            })
            .collect()
    }
}

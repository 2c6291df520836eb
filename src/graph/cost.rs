//! The memory that a graph needs and the costs of its programs, computed from the graph alone.

use super::program::{Graph, Program, Resolved, Selection, Step};
use crate::op::{Access, BatchShape, Bind, BufferId, WeightRead};
use std::collections::HashSet;

/// The memory that a graph needs on a device, and the costs of its programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Bytes of all weights.
    pub weight_bytes: u64,
    /// Bytes of the key-value cache, for all positions of the context.
    pub kv_bytes: u64,
    /// Bytes of the states of recurrent layers.
    pub state_bytes: u64,
    /// Bytes of all other buffers: activations, tables.
    pub other_bytes: u64,
    /// The programs that have steps.
    pub programs: Vec<ProgramCost>,
}

/// The cost of one run of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct ProgramCost {
    /// Its name.
    #[serde(rename = "program")]
    pub name: &'static str,
    /// The steps that run.
    pub dispatches: usize,
    /// Steps that have to wait for earlier steps, see [`Graph::barriers`].
    pub barriers: usize,
    /// Bytes of weights that one run reads. A decoding run is assumed to have the largest number of tokens.
    pub weight_bytes: u64,
}

/// Bytes of the key-value cache that attention reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvBytes {
    /// Bytes of the keys and values of one position, of the heads that are read.
    pub position: u64,
    /// Positions that a token sees, its own included; 0 = all.
    pub window: u32,
    /// Tokens that share one reading.
    pub tokens: u32,
}

impl KvBytes {
    /// Bytes that a run reads whose tokens have the last positions before `shape.end`.
    pub fn of_run(&self, shape: BatchShape) -> u64 {
        let together = self.tokens.max(1);
        let start = shape.end.saturating_sub(shape.tokens);
        let firsts = (start..shape.end).step_by(together as usize);
        let seen = firsts.map(|pos| {
            let first = match self.window {
                0 => 0,
                window => (pos + 1).saturating_sub(window),
            };
            u64::from(shape.end.min(pos.saturating_add(together)) - first)
        });
        seen.sum::<u64>() * self.position
    }
}

impl Graph {
    /// Bytes of weights that one run of a program reads. A decoding run has as many tokens as the graph's width, and
    /// each token reads its own experts. If a layer has several banks, each is counted as if all experts were chosen
    /// there.
    pub fn weight_bytes_read(&self, program: &Program, selection: &Selection) -> u64 {
        let resolved = program.resolve(selection).into_iter();
        resolved
            .map(|resolved| self.step_weight_bytes(program, &resolved))
            .sum()
    }

    fn step_weight_bytes(&self, program: &Program, resolved: &Resolved) -> u64 {
        let step = &program.steps[resolved.step];
        let bytes = step.bindings.iter().map(|bind| match *bind {
            Bind::Weight(matrix, segment) => {
                let geometry = self.matrices[matrix].segments[segment].geometry;
                let (whole, stored) = (geometry.data_bytes(), geometry.rows.max(1) as u64);
                let share = |part: u64, of: u64| (u128::from(whole) * u128::from(part) / u128::from(of.max(1))) as u64;
                if let Some([part, of]) = resolved.share {
                    return share(part, of);
                }
                let tokens = u64::from(step.width.min(self.width));
                let experts = |count: u32, rows: u32| {
                    let rows = u64::from(rows);
                    let present = geometry.rows as u64 / rows.max(1);
                    share(u64::from(count).min(present) * rows, stored)
                };
                match step.op.weight_read() {
                    WeightRead::All => whole,
                    WeightRead::Rows(rows) => share(rows, stored),
                    WeightRead::RowsEachToken(rows) => tokens * share(rows, stored),
                    WeightRead::Experts(count, rows) => experts(count, rows),
                    WeightRead::ExpertsEachToken(count, rows) => tokens * experts(count, rows),
                }
            }
            // Zeros stand for a bias that the product does not have.
            Bind::Vector(vector) if self.vectors[vector].is_zero() => 0,
            Bind::Vector(vector) => self.vectors[vector].padded_len() as u64 * 4,
            Bind::Buffer(_) => 0,
        });
        bytes.sum()
    }

    /// Reads of the key-value cache by the attention steps of a program. Steps with the same window and tokens are added
    /// up. For a speculative step this is an upper limit, because its draft head runs fewer tokens.
    pub fn kv_reads(&self, program: &Program, selection: &Selection) -> Vec<KvBytes> {
        let mut reads: Vec<KvBytes> = Vec::new();
        for resolved in program.resolve(selection) {
            let Some(read) = program.steps[resolved.step].op.kv_read() else {
                continue;
            };
            let heads = resolved.share.map_or(read.kv_heads, |share| share[0]);
            let position = 2 * heads * read.head * self.kv.bytes();
            let (window, tokens) = (read.window, read.tokens);
            let same = |known: &&mut KvBytes| (known.window, known.tokens) == (window, tokens);
            match reads.iter_mut().find(same) {
                Some(known) => known.position += position,
                None => reads.push(KvBytes {
                    position,
                    window,
                    tokens,
                }),
            }
        }
        reads
    }

    /// Largest number of loop iterations of a thread, over the kernels in which it grows with the context.
    pub fn loop_steps(&self) -> u64 {
        let steps = self.programs.iter().flat_map(|program| &program.steps);
        steps.map(|step| step.op.loop_steps()).max().unwrap_or(0)
    }

    /// The memory that the graph needs, and the costs of its programs under a selection.
    pub fn cost(&self, selection: &Selection) -> Cost {
        let caches = self.bytes_written_as(&["k_cache", "v_cache"]);
        let states = self.bytes_written_as(&["ring", "state"]);
        let programs = self.programs.iter().filter(|program| !program.steps.is_empty());
        Cost {
            weight_bytes: self.weight_bytes(),
            kv_bytes: caches,
            state_bytes: states,
            other_bytes: self.buffer_bytes() - caches - states,
            programs: programs
                .map(|program| ProgramCost {
                    name: program.name,
                    dispatches: program.resolve(selection).len(),
                    barriers: self.barriers(program, selection),
                    weight_bytes: self.weight_bytes_read(program, selection),
                })
                .collect(),
        }
    }

    /// Bytes of the buffers that steps write under one of these names.
    fn bytes_written_as(&self, names: &[&str]) -> u64 {
        let steps = self.programs.iter().flat_map(|program| &program.steps);
        let uses = steps.flat_map(Step::buffers);
        let written = uses.filter(|(name, _, access)| *access == Access::Write && names.contains(name));
        let buffers: HashSet<BufferId> = written.map(|(_, buffer, _)| buffer).collect();
        let buffers = buffers.iter().filter_map(|&buffer| self.buffers.get(buffer));
        buffers.map(|buffer| buffer.bytes).sum()
    }

    /// The number of barriers that a program needs in its order. A step has to wait if it reads or writes a buffer
    /// that a step since the last barrier wrote, or if it writes a buffer that such a step read.
    pub fn barriers(&self, program: &Program, selection: &Selection) -> usize {
        let (mut read, mut written) = (HashSet::new(), HashSet::new());
        let mut barriers = 0;
        for resolved in program.resolve(selection) {
            let uses: Vec<_> = program.steps[resolved.step].buffers().collect();
            let waits = uses.iter().any(|(_, buffer, access)| {
                written.contains(buffer) || (*access == Access::Write && read.contains(buffer))
            });
            if waits {
                barriers += 1;
                read.clear();
                written.clear();
            }
            for (_, buffer, access) in uses {
                match access {
                    Access::Read => read.insert(buffer),
                    Access::Write => written.insert(buffer),
                };
            }
        }
        barriers
    }
}

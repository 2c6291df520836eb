//! What one run of the network does, as data: steps over named buffers and weights.
//!
//! A [`Plan`] is built once from a [`crate::model::Model`] and performed by either executor, the device's or the host's. No
//! wgpu types here, and nothing that changes from token to token: that lives in the `ctl` buffer, which kernels write.

mod attention;
mod bank;
mod build;
mod cost;
mod delta_net;
mod draft;
mod ffn;
mod masking;
mod moe;
mod paged;
mod place;
mod walk;
mod weights;

pub use bank::{ABSENT, Slice, Stack};
pub use build::{ExpertOptions, PlanOptions, plan, plan_with};
pub use cost::{Cost, KvRead, ProgramCost};
pub use masking::{Axis, Content, Masking, Part, Shared, Target, Visit, When};
pub use paged::{Member, Paged, Pause, Routed, Table, Waiting};
pub use weights::{Measured, source, sources};

use crate::container::{TensorId, Tensors};
use crate::dtype::planes::{Amount, Geometry, Planes};
use crate::error::Result;
use crate::kernel::{Access, Kv, MAX_COLUMNS, Op};
use std::ops::Range;
use std::sync::Arc;

/// Positions of one attention block; a test holds it to `shaders/lib/attention.wgsl`.
pub const ATTENTION_BLOCK: u32 = 64;
/// Bytes of a step's parameters with what follows them: the largest offset alignment that WebGPU allows a device to ask for.
pub const PARAMS_SLOT: u64 = 256;

/// Index into [`Plan::buffers`].
pub type BufferId = usize;
/// Index into [`Plan::matrices`].
pub type MatrixId = usize;
/// Index into [`Plan::vectors`].
pub type VectorId = usize;

/// What fills a buffer before the first run; everything else starts as zeros.
#[derive(Clone, Debug, PartialEq)]
pub enum Fill {
    /// Zeros.
    Zero,
    /// `(cos, sin)` of `position * inv_freq[i]`, both times `factor`: `[positions, inv_freq.len()]` pairs of f32.
    Rope {
        /// Radians a position, one a pair.
        inv_freq: Vec<f32>,
        /// Factor of both (YaRN, LongRoPE).
        factor: f32,
        /// How many positions.
        positions: u32,
    },
    /// What a layer's experts have in common, and the place of each in a bank: see `shaders/lib/experts.wgsl`.
    Experts {
        /// The words before the experts.
        header: [u32; 8],
        /// The place of each expert, or [`ABSENT`].
        places: Vec<u32>,
        /// What is added to their scores for ranking.
        bias: Option<TensorId>,
    },
}

impl Fill {
    /// `[cos, sin, cos, sin, ...]` of one position; empty for zeros. The angle is rounded to f32 before its cosine is
    /// taken, as models trained in f32 do.
    pub fn rope_row(&self, position: u32) -> Vec<f32> {
        let Fill::Rope { inv_freq, factor, .. } = self else {
            return Vec::new();
        };
        let pair = |freq: &f32| {
            let angle = f64::from(position as f32 * freq);
            [
                (angle.cos() * f64::from(*factor)) as f32,
                (angle.sin() * f64::from(*factor)) as f32,
            ]
        };
        inv_freq.iter().flat_map(pair).collect()
    }

    /// The table of experts; empty for anything else. Errors: what the bias has wrong with it.
    pub fn expert_words(&self, tensors: &dyn Tensors) -> Result<Vec<u32>> {
        let Fill::Experts { header, places, bias } = self else {
            return Ok(Vec::new());
        };
        let vector = Vector {
            label: String::new(),
            pieces: vec![Piece {
                tensor: *bias,
                len: places.len(),
            }],
            add: 0.0,
        };
        let biases = vector.values(tensors)?;
        let experts = places.iter().zip(&biases);
        let experts = experts.flat_map(|(&place, bias)| [place, bias.to_bits()]);
        Ok(header.iter().copied().chain(experts).collect())
    }
}

/// A buffer of activations or state.
#[derive(Clone, Debug, PartialEq)]
pub struct Buffer {
    /// Its role, as in `decode.qkv` or `layer.07.k`.
    pub label: String,
    /// Its size.
    pub bytes: u64,
    /// Its first contents.
    pub fill: Fill,
}

/// Rows of one tensor within a segment, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Which of the matrix's stacked tensors.
    pub part: usize,
    /// Its rows.
    pub rows: Range<usize>,
    /// What they hold, or others that may take their place.
    pub room: Amount,
}

/// As much of a matrix as one binding holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// First output that its rows compute.
    pub row0: u32,
    /// Its rows, in the order they are stored.
    pub runs: Vec<Run>,
    /// The sizes of its planes.
    pub geometry: Geometry,
    /// For each of up to three parts, the first stored row (`u32::MAX` for a part that comes later or not at all).
    pub part_rows: [u32; 3],
}

/// How tensors make one weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stacking {
    /// One below the other.
    Rows,
    /// Two of the same height; each segment has the same rows of both.
    Pair,
    /// As a pair, but both are the two halves of one tensor, which is named twice.
    Halves,
}

/// Tensors with one type and width, stacked into one weight.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    /// Its role, as in `layer.07.attn.qkv`.
    pub label: String,
    /// The stacked tensors.
    pub parts: Vec<TensorId>,
    /// Device layout.
    pub planes: Planes,
    /// Columns.
    pub cols: usize,
    /// The pieces.
    pub segments: Vec<Segment>,
}

/// One piece of a [`Vector`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The tensor, or zeros.
    pub tensor: Option<TensorId>,
    /// Elements.
    pub len: usize,
}

/// 1-D tensors kept as f32, one after another, padded with zeros to a multiple of 32 elements.
#[derive(Clone, Debug, PartialEq)]
pub struct Vector {
    /// Its role, as in `layer.07.attn.norm`.
    pub label: String,
    /// What it holds.
    pub pieces: Vec<Piece>,
    /// Added to every element: 1 for norms that multiply by 1 + w.
    pub add: f32,
}

impl Vector {
    /// Elements with padding.
    pub fn padded_len(&self) -> usize {
        self.pieces
            .iter()
            .map(|piece| piece.len)
            .sum::<usize>()
            .next_multiple_of(32)
    }
}

/// What a binding of a step is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bind {
    /// Both planes of a segment: two bindings, `codes` and `scales`.
    Weight(MatrixId, usize),
    /// A vector.
    Vector(VectorId),
    /// A buffer.
    Buffer(BufferId),
}

/// How many workgroups a step needs; resolved when it is encoded, for that run's columns and positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grid {
    /// So many teams, folded into rows.
    Teams(u32),
    /// The same for each column that the step computes.
    TeamsEach(u32),
    /// So many threads, times the columns of the run divided by so many a workgroup.
    Threads(u32, u32),
    /// So many workgroups, times the columns of the run divided by so many a workgroup.
    Groups(u32, u32),
    /// One workgroup a column.
    Columns,
    /// The run's attention blocks × so many key-value heads, or query heads, × columns.
    Blocks(u32),
    /// So many teams for each of so many slots of each column that the step computes.
    Slots(u32, u32),
    /// So many threads for each tile of grouped columns: as many as each column has entries, but at most so many.
    Tiles {
        /// Threads.
        threads: u32,
        /// Entries of a column.
        entries: u32,
        /// Tiles there is room for.
        most: u32,
    },
    /// One workgroup.
    One,
}

impl Grid {
    /// The extent that an operator's kernel needs; how much a team or a thread takes is said at the head of its WGSL.
    pub fn of(op: &Op) -> Grid {
        match op {
            Op::Embed(p) => Grid::Threads(p.units * 4, 1),
            Op::Prep(p) => Grid::Threads(p.vectors, 1),
            Op::Norm(_) | Op::AddNorm(_) => Grid::Columns,
            Op::Cap(p) => Grid::Threads(p.vectors, 1),
            Op::Matvec(p) => Grid::Teams(p.rows.div_ceil(4)),
            Op::MatvecAdd(p) => Grid::Teams(p.rows.div_ceil(4)),
            Op::MatvecGlu(p) => Grid::Teams(p.part1.div_ceil(2)),
            // At most: a mask says how much of it is needed.
            Op::MatvecSome(p) => Grid::Teams(p.rows.div_ceil(4)),
            Op::MatvecAddSome(p) => Grid::Teams(p.rows.div_ceil(4)),
            Op::MatvecGluSome(p) => Grid::Teams(p.part1.div_ceil(2)),
            Op::Silence(p) => Grid::Threads(p.vectors, 1),
            Op::Matmul(p) => Grid::Threads(p.rows.div_ceil(4), 8),
            Op::MatmulAdd(p) => Grid::Threads(p.rows.div_ceil(4), 8),
            Op::MatmulGlu(p) => Grid::Threads(p.part1.div_ceil(4), 4),
            Op::MatmulSome(p) => Grid::Threads(p.rows.div_ceil(4), 8),
            Op::MatmulAddSome(p) => Grid::Threads(p.rows.div_ceil(4), 8),
            Op::MatmulGluSome(p) => Grid::Threads(p.part1.div_ceil(4), 4),
            Op::Glu(p) => Grid::Threads(p.vectors, 1),
            Op::Rope(p) => Grid::Groups(p.heads + 2 * p.kv_heads, 1),
            Op::AttnBlock(p) => Grid::Blocks(p.kv_heads),
            Op::AttnMerge(p) => Grid::Threads(p.heads * p.head_vectors, 1),
            Op::AttnChunk(p) => Grid::Groups(p.heads, 4),
            // At most, too; of a merge it is all, with zeros for what is left out.
            Op::AttnBlockSome(p) => Grid::Blocks(p.heads),
            Op::AttnMergeSome(p) => Grid::Threads(p.heads * p.head_vectors, 1),
            Op::AttnChunkSome(p) => Grid::Groups(p.heads, 4),
            Op::DeltaNet(p) => Grid::Groups(p.value_heads, 0),
            Op::MoeGlu(p) => {
                let pairs = p.outputs.div_ceil(2);
                let shared = p.shared_outputs.div_ceil(2 * pairs.max(1));
                Grid::Slots(pairs, p.first_shared + shared)
            }
            Op::MoeMatvec(p) => Grid::Slots(p.outputs.div_ceil(4), p.slots.max(1)),
            Op::MoeDown(p) => Grid::TeamsEach(p.outputs.div_ceil(4)),
            Op::MoeRoute(_) | Op::MoeCount(_) => Grid::Columns,
            Op::MoeMatmulGlu(p) => Grid::Tiles {
                threads: p.outputs.div_ceil(4),
                entries: p.x_entries,
                most: p.tiles,
            },
            Op::MoeMatmulUp(p) => Grid::Tiles {
                threads: p.outputs.div_ceil(4),
                entries: p.x_entries,
                most: p.tiles,
            },
            Op::MoeMatmul(p) => Grid::Tiles {
                threads: p.outputs.div_ceil(4),
                entries: p.top_k,
                most: p.tiles,
            },
            Op::MoeCombine(p) => Grid::Threads(p.vectors, 1),
            Op::MoeLists(_) | Op::Sample(_) => Grid::One,
            Op::LastColumn(_) | Op::RoundBegin(_) | Op::Draft(_) => Grid::One,
        }
    }
}

/// One dispatch.
#[derive(Clone, Debug)]
pub struct Step {
    /// Its role, as in `layer.07.attn.q`.
    pub label: String,
    /// The kernel and its parameters.
    pub op: Op,
    /// The type of its weights' planes.
    pub planes: Option<Planes>,
    /// Its storage bindings, in the catalogue's order.
    pub bindings: Vec<Bind>,
    /// Its extent.
    pub grid: Grid,
    /// Columns that the matvec family computes side by side: 1, 2, 4 or 8. Of these the experts of mixtures, which are not read
    /// for several columns at once, compute as many as the run has.
    pub columns: u32,
}

impl Step {
    /// The buffers it writes, each with the binding's name in the catalogue.
    pub fn writes(&self) -> Vec<(&'static str, BufferId)> {
        // A weight is one binding here and two in the catalogue, always the first.
        let planes = 2 * usize::from(matches!(self.bindings.first(), Some(Bind::Weight(..))));
        let bound = self.bindings[planes / 2..].iter();
        let written = self.op.kernel().row().bindings[planes..].iter().zip(bound);
        written
            .filter_map(|(&(name, access), bind)| match *bind {
                Bind::Buffer(buffer) if access == Access::Write => Some((name, buffer)),
                _ => None,
            })
            .collect()
    }
}

/// A list of steps: one run.
#[derive(Clone, Debug, Default)]
pub struct Program {
    /// The steps, in order.
    pub steps: Vec<Step>,
    /// For each layer, how many steps precede its end: after them the residual stream is the layer's output.
    pub layer_ends: Vec<usize>,
    /// For each layer, the buffer that holds the residual stream then.
    pub hidden: Vec<BufferId>,
    /// The buffer that holds the logits at the end, if the program makes any.
    pub logits: Option<BufferId>,
    /// Steps that run only under a mask, or only without; the others always run. Steps of several ranges need all of them.
    pub conditions: Vec<(Range<usize>, When)>,
    /// Of steps that were chosen, their numbers among those that were planned; empty where all were.
    pub numbers: Vec<usize>,
    /// Steps that read only a share of their weight, or of the heads of their caches: so many of so many.
    pub shares: Vec<(usize, [u64; 2])>,
}

impl Program {
    /// The same steps for so many columns side by side.
    fn widened(&self, columns: u32) -> Program {
        let wide = |step: &Step| Step {
            columns,
            ..step.clone()
        };
        Program {
            steps: self.steps.iter().map(wide).collect(),
            ..self.clone()
        }
    }

    /// The same steps after others, which always run.
    fn after(&self, mut first: Vec<Step>) -> Program {
        let by = first.len();
        first.extend(self.steps.iter().cloned());
        let conditions = self.conditions.iter();
        Program {
            steps: first,
            logits: self.logits,
            conditions: conditions
                .map(|(range, when)| (range.start + by..range.end + by, *when))
                .collect(),
            ..Program::default()
        }
    }
}

/// Which program to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// One token: from `ctl.token` to the next one.
    Decode,
    /// A chunk of prompt tokens into the caches.
    Prefill,
    /// From the last column of a prefill to the first token.
    Head,
    /// A prefill that also makes the logits of every column.
    PrefillLogits,
    /// A speculative round: the draft head drafts, where there is one, then the network judges all drafts in one run.
    Round,
    /// A prefill for the draft head's other reading of hidden states, where the file does not say which one is meant.
    OtherPrefill,
    /// A round with that reading.
    OtherRound,
}

impl Which {
    /// All of them, in the order of [`Plan::programs`].
    pub const ALL: [Which; 7] = [
        Which::Decode,
        Which::Prefill,
        Which::Head,
        Which::PrefillLogits,
        Which::Round,
        Which::OtherPrefill,
        Which::OtherRound,
    ];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Which::Decode => "decode",
            Which::Prefill => "prefill",
            Which::Head => "head",
            Which::PrefillLogits => "prefill_logits",
            Which::Round => "round",
            Which::OtherPrefill => "other_prefill",
            Which::OtherRound => "other_round",
        }
    }
}

/// Buffers of the draft head.
#[derive(Clone, Copy, Debug)]
pub struct HeadBuffers {
    /// Its control words.
    pub ctl: BufferId,
    /// For each token of a prefill chunk the one that follows it.
    pub next_tokens: BufferId,
}

/// The buffers every plan has.
#[derive(Clone, Copy, Debug)]
pub struct Fixed {
    /// The control words: see `shaders/lib/ctl.wgsl`.
    pub ctl: BufferId,
    /// Sampler settings and tables.
    pub settings: BufferId,
    /// Tokens of a prefill chunk.
    pub tokens: BufferId,
    /// Which tokens the conversation has seen: see `shaders/op/sample.wgsl`.
    pub seen: BufferId,
    /// Those of the draft head, where one is used.
    pub head: Option<HeadBuffers>,
}

/// Everything a session needs, as data.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Buffers of activations and state.
    pub buffers: Vec<Buffer>,
    /// Weights.
    pub matrices: Vec<Matrix>,
    /// Norm weights and biases.
    pub vectors: Vec<Vector>,
    /// The programs, by [`Which`] order.
    pub programs: [Program; Which::ALL.len()],
    /// Most drafts of a speculative round; 0 = none.
    pub drafts: u32,
    /// Well-known buffers.
    pub fixed: Fixed,
    /// Positions of the context.
    pub ctx: u32,
    /// Columns of a prefill chunk.
    pub chunk: u32,
    /// Type of the caches.
    pub kv: Kv,
    /// Tokens of the vocabulary.
    pub vocab: u32,
    /// Elements of the residual stream.
    pub hidden: u32,
    /// Recurrent layers keep their state after so many last positions; `None`: there are no such layers, and a session can
    /// go back to any position.
    pub kept_states: Option<u32>,
    /// What masks choose the programs from, in a model that has masks.
    pub masking: Option<Arc<Masking>>,
    /// The words that buffers begin with under the mask in force, or without one.
    pub lists: Vec<(BufferId, Vec<u32>)>,
    /// Mixtures whose choices are counted.
    pub routed: Vec<Routed>,
    /// Banks that hold some of their experts at a time.
    pub paged: Vec<Paged>,
}

impl Segment {
    /// How many rows are stored before a run, and what is there for them.
    pub fn before(&self, run: usize) -> (usize, Amount) {
        let before = self.runs.iter().take(run);
        before.fold((0, Amount::default()), |(rows, room), run| {
            (rows + run.rows.len(), room + run.room)
        })
    }
}

impl Plan {
    /// One of the programs.
    pub fn program(&self, which: Which) -> &Program {
        &self.programs[which as usize]
    }

    /// Bytes of all weights on the device.
    pub fn weight_bytes(&self) -> u64 {
        let matrices = self
            .matrices
            .iter()
            .flat_map(|matrix| &matrix.segments)
            .map(|s| s.geometry.data_bytes());
        let vectors = self.vectors.iter().map(|vector| vector.padded_len() as u64 * 4);
        matrices.sum::<u64>() + vectors.sum::<u64>()
    }

    /// Bytes of all buffers on the device, those of the steps' parameters among them.
    pub fn buffer_bytes(&self) -> u64 {
        let buffers: u64 = self.buffers.iter().map(|buffer| buffer.bytes).sum();
        let steps: usize = self.planned().iter().map(|program| program.steps.len()).sum();
        buffers + steps as u64 * PARAMS_SLOT
    }

    /// Bytes of weights that one run of a program with one column, or a round with all its drafts, reads: whole matrices, one row
    /// of the embedding, and of a bank for each column that is decoded as many experts as a token takes (where a layer has several
    /// banks, as many of each as there can be), of a map that a mask restricts what is left of it.
    pub fn weight_bytes_read(&self, which: Which) -> u64 {
        let mut bytes = 0;
        let program = self.program(which);
        let mut shares = program.shares.iter().peekable();
        for (number, step) in program.steps.iter().enumerate() {
            let [some, all] = shares
                .next_if(|share| share.0 == number)
                .map_or([1, 1], |share| share.1);
            // A step may be wider than a round.
            let columns = u64::from(step.columns.min(self.drafts + 1));
            for bind in &step.bindings {
                bytes += match *bind {
                    Bind::Weight(matrix, segment) => {
                        let geometry = self.matrices[matrix].segments[segment].geometry;
                        let whole = geometry.data_bytes();
                        // So many rows, each with its share of what all rows have in common.
                        let rows = |rows: u32| (whole as u128 * u128::from(rows) / geometry.rows.max(1) as u128) as u64;
                        // Those of so many experts, or of all there are.
                        let experts = |taken: u32, outputs: u32| {
                            let placed = geometry.rows as u32 / outputs.max(1);
                            taken.min(placed) * outputs
                        };
                        match &step.op {
                            Op::Embed(_) => rows(1),
                            Op::MoeGlu(p) => {
                                columns * rows(2 * (p.shared_outputs + p.first_shared.min(p.placed) * p.outputs))
                            }
                            Op::MoeMatvec(p) => columns * rows(experts(p.slots.max(1), p.outputs)),
                            Op::MoeDown(p) => columns * rows(experts(p.slots, p.outputs)),
                            Op::MoeMatmulGlu(p) => rows(2 * p.x_entries.min(p.placed) * p.outputs),
                            Op::MoeMatmulUp(p) => rows(experts(p.x_entries, p.outputs)),
                            Op::MoeMatmul(p) => rows(experts(p.top_k, p.outputs)),
                            Op::MatmulGlu(p) => rows((2 * p.part1).min(p.rows)),
                            _ => (u128::from(whole) * u128::from(some) / u128::from(all.max(1))) as u64,
                        }
                    }
                    Bind::Vector(vector) => self.vectors[vector].padded_len() as u64 * 4,
                    Bind::Buffer(_) => 0,
                };
            }
        }
        bytes
    }
}

/// How long one run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Columns: tokens of this run.
    pub columns: u32,
    /// Positions filled after it.
    pub end: u32,
}

/// The control words, which are read back after a run; see `shaders/lib/ctl.wgsl`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Ctl {
    /// The token to run next and drafts of those that follow it; after a run, from 1 on, the tokens it sampled.
    pub tokens: [u32; MAX_COLUMNS as usize + 1],
    /// Position of the first column of the next run.
    pub pos: u32,
    /// Columns of the next run; 0 = it does nothing.
    pub columns: u32,
    /// Tokens sampled so far.
    pub step: u32,
    /// 0 running, 1 a stop token was sampled, 2 the logits were not finite.
    pub stop: u32,
    /// Tokens that the last run sampled.
    pub count: u32,
    /// Drafts that it judged.
    pub drafted: u32,
    /// Position of the last token that a speculative round may sample.
    pub last: u32,
}

impl Ctl {
    /// What the last run sampled, in order.
    pub fn sampled(&self) -> &[u32] {
        let count = (self.count as usize).min(MAX_COLUMNS as usize);
        &self.tokens[1..=count]
    }
}

/// What an executor did, in totals; differences of two snapshots describe a stretch of work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Command buffers submitted by runs.
    pub submits: u64,
    /// Compute passes.
    pub passes: u64,
    /// Dispatches.
    pub dispatches: u64,
    /// Bytes copied back by runs.
    pub readback_bytes: u64,
    /// Bytes of weights that runs read, by plan.
    pub weight_bytes: u64,
    /// Bytes of cached keys and values that runs read, by plan: what a run's columns see, once for each of a decoding run's
    /// columns and each four of a chunk's.
    pub kv_bytes: u64,
    /// Bind groups created.
    pub bind_groups_created: u64,
    /// Buffers created.
    pub buffers_created: u64,
    /// Writes from the host into a buffer.
    pub write_buffer_calls: u64,
    /// Pipelines created.
    pub pipelines_compiled: u64,
    /// Microseconds spent on creating pipelines, summed over threads.
    pub pipeline_us: u64,
    /// Bytes of weights uploaded.
    pub upload_bytes: u64,
    /// Bytes of device memory in use: weights, buffers, parameters.
    pub gpu_bytes: u64,
    /// Experts of paged banks that were wanted and there, each once a layer and run.
    pub expert_hits: u64,
    /// Those that were wanted and had to be fetched.
    pub expert_misses: u64,
    /// Bytes that fetching took.
    pub paged_bytes: u64,
}

impl Counters {
    /// What was done since an earlier snapshot. `gpu_bytes` is not a total and stays as it is.
    pub fn since(&self, before: &Counters) -> Counters {
        Counters {
            submits: self.submits - before.submits,
            passes: self.passes - before.passes,
            dispatches: self.dispatches - before.dispatches,
            readback_bytes: self.readback_bytes - before.readback_bytes,
            weight_bytes: self.weight_bytes - before.weight_bytes,
            kv_bytes: self.kv_bytes - before.kv_bytes,
            bind_groups_created: self.bind_groups_created - before.bind_groups_created,
            buffers_created: self.buffers_created - before.buffers_created,
            write_buffer_calls: self.write_buffer_calls - before.write_buffer_calls,
            pipelines_compiled: self.pipelines_compiled - before.pipelines_compiled,
            pipeline_us: self.pipeline_us - before.pipeline_us,
            upload_bytes: self.upload_bytes - before.upload_bytes,
            gpu_bytes: self.gpu_bytes,
            expert_hits: self.expert_hits - before.expert_hits,
            expert_misses: self.expert_misses - before.expert_misses,
            paged_bytes: self.paged_bytes - before.paged_bytes,
        }
    }
}

/// A run whose control words can be waited for.
pub struct Ticket(pub(crate) u64);

/// Performs a plan. Both implementations run the same steps over the same named buffers.
pub trait Executor: Send {
    /// Runs some steps of a program, in order, after everything submitted before. Does not wait.
    fn run(&mut self, which: Which, steps: Range<usize>, extent: Extent) -> Result<()>;

    /// Runs a whole program and takes a snapshot of the control words after it. Does not wait.
    fn submit(&mut self, which: Which, extent: Extent) -> Result<Ticket>;

    /// The same with some steps of a program.
    fn submit_part(&mut self, which: Which, steps: Range<usize>, extent: Extent) -> Result<Ticket>;

    /// Waits for a run. Tickets are waited for in the order they were given; at most two are open.
    fn wait(&mut self, ticket: Ticket) -> Result<Ctl>;

    /// Runs the programs of another plan from now on: of the one that was realised, chosen by [`Plan::with_mask`]. Nothing is
    /// made for it.
    fn select(&mut self, plan: Arc<Plan>) -> Result<()>;

    /// Performs another plan of the same network from now on, with tensors that differ from those before in `changed`, in order.
    /// Nothing may be under way. What both plans have in common stays where it is, and of that only what holds one of the
    /// changed tensors is written anew; state is not kept.
    ///
    /// Errors: `OutOfMemory`, the device's, and what the tensors' payloads have wrong with them. After one it performs the plan
    /// before, or, where weights are half written, nothing until they are replaced once more.
    fn replace(&mut self, plan: Arc<Plan>, tensors: Arc<dyn Tensors>, changed: &[TensorId]) -> Result<()>;

    /// Writes words at the start of a buffer, before everything submitted later.
    fn write(&mut self, buffer: BufferId, words: &[u32]) -> Result<()>;

    /// Reads words of a buffer, after everything submitted before.
    fn read(&mut self, buffer: BufferId, first: usize, count: usize) -> Result<Vec<u32>>;

    /// What was done so far.
    fn counters(&self) -> Counters;
}

#[cfg(test)]
impl Plan {
    /// A plan whose programs have so many steps, for executors that only pretend.
    pub(crate) fn of_nothing(steps: usize, chunk: u32, kept_states: Option<u32>) -> Plan {
        let step = Step {
            label: String::new(),
            op: Op::Sample(bytemuck::Zeroable::zeroed()),
            planes: None,
            bindings: Vec::new(),
            grid: Grid::One,
            columns: 1,
        };
        let program = Program {
            steps: vec![step; steps],
            ..Program::default()
        };
        Plan {
            buffers: Vec::new(),
            matrices: Vec::new(),
            vectors: Vec::new(),
            programs: std::array::from_fn(|_| program.clone()),
            fixed: Fixed {
                ctl: 0,
                settings: 0,
                tokens: 0,
                seen: 0,
                head: None,
            },
            ctx: 512,
            chunk,
            kv: Kv::F16,
            vocab: 10,
            hidden: 32,
            masking: None,
            lists: Vec::new(),
            kept_states,
            drafts: 0,
            routed: Vec::new(),
            paged: Vec::new(),
        }
    }
}

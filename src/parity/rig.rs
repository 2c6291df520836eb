//! From a case to a plan of a few steps over made-up tensors, and to what its buffers hold before each round.

mod attention;
mod delta_net;
mod linear;
mod moe;
mod random;
mod sample;

use super::cases::{Embed, Norm, Over, Overlay, Spec};
use crate::container::{MemoryTensors, Tensors};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::kernel::{self, Kv, Op};
use crate::program::{
    Bind, Buffer, BufferId, Ctl, Extent, Fill, Fixed, Grid, Matrix, Piece, Plan, Program, Stacking, Step, Vector, Which,
};
use crate::sampling::SETTINGS_WORDS;
use random::{Random, padded};
use std::sync::Arc;

/// Words behind each buffer's contents that nothing may touch.
const FENCE_WORDS: usize = 64;
/// What every word holds that a round does not set: not a number as f32 and as two f16, and told from one that is computed.
pub(super) const UNSET: u32 = 0x7fc1_7fc1;
/// Positions of the caches in attention cases: more than any round reaches, and no multiple of a block.
const POSITIONS: u32 = 280;

/// A plan whose decode program is the case, and its rounds.
#[derive(Clone)]
pub struct Rig {
    /// The plan.
    pub plan: Plan,
    /// Its tensors.
    pub tensors: Arc<dyn Tensors>,
    /// What is run.
    pub rounds: Vec<Round>,
}

/// One run of a rig's program.
#[derive(Clone, Debug)]
pub struct Round {
    /// What is special about it.
    pub name: String,
    /// First words of buffers; every other word of every buffer is a NaN that nothing computes.
    pub inputs: Vec<(BufferId, Vec<u32>)>,
    /// Its extent.
    pub extent: Extent,
}

impl Rig {
    /// What a buffer holds before a round.
    pub fn contents(&self, round: &Round, buffer: BufferId) -> Vec<u32> {
        let mut words = vec![UNSET; self.plan.buffers[buffer].bytes as usize / 4];
        for (_, input) in round.inputs.iter().filter(|(id, _)| *id == buffer) {
            words[..input.len()].copy_from_slice(input);
        }
        words
    }
}

/// A plan in the making. Buffers 0, 1, 2 are ctl, settings and tokens.
struct Maker {
    random: Random,
    buffers: Vec<Buffer>,
    vectors: Vec<Vector>,
    matrices: Vec<Matrix>,
    tensors: Vec<(String, Dtype, Vec<u64>, Vec<u8>)>,
    steps: Vec<Step>,
    rounds: Vec<Round>,
    kv: Kv,
}

const CTL: BufferId = 0;
const SETTINGS: BufferId = 1;
const TOKENS: BufferId = 2;

impl Spec {
    /// The case as a plan; `max_binding` is the device's.
    pub(super) fn rig(&self, seed: u64, max_binding: u64) -> Result<Rig> {
        let mut maker = Maker {
            random: Random(seed << 32),
            buffers: Vec::new(),
            vectors: Vec::new(),
            matrices: Vec::new(),
            tensors: Vec::new(),
            steps: Vec::new(),
            rounds: Vec::new(),
            kv: Kv::F32,
        };
        maker.buffer("ctl", size_of::<Ctl>() / 4);
        let sampler = matches!(self, Spec::Sample(_));
        maker.buffer("settings", if sampler { SETTINGS_WORDS } else { 8 });
        maker.buffer("tokens", 64);
        let tensors = match self {
            Spec::Embed(spec) => maker.embed(spec, max_binding)?,
            Spec::Norm(spec) => maker.norm(spec)?,
            Spec::Linear(spec) => maker.linear(spec, max_binding)?,
            Spec::Rope(spec) => maker.rope(spec)?,
            Spec::Attention(spec) => maker.attention(spec)?,
            Spec::DeltaNet(spec) => maker.delta_net(spec)?,
            Spec::Moe(spec) => maker.moe(spec, max_binding)?,
            Spec::Sample(spec) => maker.sample(spec)?,
            Spec::Draft(spec) => maker.draft(spec)?,
            Spec::RoundBegin(depth) => maker.round_begin(*depth)?,
        };
        let program = Program {
            steps: maker.steps,
            ..Program::default()
        };
        Ok(Rig {
            plan: Plan {
                buffers: maker.buffers,
                matrices: maker.matrices,
                vectors: maker.vectors,
                programs: {
                    let mut programs = <[Program; Which::ALL.len()]>::default();
                    programs[Which::Decode as usize] = program;
                    programs
                },
                drafts: 0,
                fixed: Fixed {
                    ctl: CTL,
                    settings: SETTINGS,
                    tokens: TOKENS,
                    seen: TOKENS,
                    head: None,
                },
                ctx: POSITIONS,
                chunk: 64,
                kv: maker.kv,
                vocab: 0,
                hidden: 0,
                kept_states: None,
                masking: None,
                lists: Vec::new(),
                routed: Vec::new(),
                paged: Vec::new(),
            },
            tensors,
            rounds: maker.rounds,
        })
    }
}

impl Maker {
    /// A buffer of so many words, and its fence.
    fn buffer(&mut self, label: &str, words: usize) -> BufferId {
        self.buffers.push(Buffer {
            label: label.into(),
            bytes: (words.next_multiple_of(FENCE_WORDS) + FENCE_WORDS) as u64 * 4,
            fill: Fill::Zero,
        });
        self.buffers.len() - 1
    }

    /// A vector of random elements that is part of every round.
    fn vector(&mut self, label: &str, len: usize) -> Result<Bind> {
        let payload = self.random.payload(Dtype::F32, 1, len, 1.0, Overlay::Empty)?;
        self.tensors.push((label.into(), Dtype::F32, vec![len as u64], payload));
        let piece = Piece {
            tensor: Some(self.tensors.len() - 1),
            len,
        };
        Ok(self.pieces(label, vec![piece]))
    }

    fn pieces(&mut self, label: &str, pieces: Vec<Piece>) -> Bind {
        self.vectors.push(Vector {
            label: label.into(),
            pieces,
            add: 0.0,
        });
        Bind::Vector(self.vectors.len() - 1)
    }

    fn tensor(&mut self, dtype: Dtype, rows: usize, cols: usize, amplitude: f32, overlay: Overlay) -> Result<usize> {
        let payload = self.random.payload(dtype, rows, cols, amplitude, overlay)?;
        let name = format!("w{}", self.tensors.len());
        self.tensors
            .push((name, dtype, vec![rows as u64, cols as u64], payload));
        Ok(self.tensors.len() - 1)
    }

    /// The tensors so far.
    fn tensors(&mut self) -> Result<Arc<dyn Tensors>> {
        Ok(Arc::new(MemoryTensors::new(std::mem::take(&mut self.tensors))?))
    }

    fn step(&mut self, op: Op, bindings: Vec<Bind>) {
        let planes = bindings.iter().find_map(|bind| match *bind {
            Bind::Weight(matrix, _) => Some(self.matrices[matrix].planes),
            _ => None,
        });
        self.steps.push(Step {
            label: op.kernel().stem().into(),
            grid: Grid::of(&op),
            op,
            planes,
            bindings,
            columns: 1,
        });
    }

    /// Lets the last step compute so many columns side by side.
    fn widen(&mut self, columns: u32) {
        if let Some(step) = self.steps.last_mut() {
            step.columns = columns;
        }
    }

    fn round(&mut self, pos: u32, columns: u32, mut inputs: Vec<(BufferId, Vec<u32>)>) {
        let ctl = Ctl {
            pos,
            columns,
            ..Ctl::default()
        };
        inputs.push((CTL, bytemuck::cast_slice(&[ctl]).to_vec()));
        self.rounds.push(Round {
            name: format!("{columns} columns from position {pos}"),
            inputs,
            extent: Extent {
                columns,
                end: pos + columns,
            },
        });
    }

    fn embed(&mut self, spec: &Embed, max_binding: u64) -> Result<Arc<dyn Tensors>> {
        let table = self.tensor(spec.dtype, spec.rows, spec.cols, spec.amplitude, spec.overlay)?;
        let tensors = self.tensors()?;
        let matrix = Matrix::stack(
            "embed".into(),
            &[table],
            Stacking::Rows,
            &*tensors,
            max_binding.min(spec.max_binding),
        )?;
        let units = spec.cols.div_ceil(32);
        let h = self.buffer("h", units * 32 * spec.columns as usize);
        self.matrices.push(matrix.clone());
        for (i, segment) in matrix.segments.iter().enumerate() {
            let op = Op::Embed(kernel::Embed {
                rows: segment.geometry.rows as u32,
                units: units as u32,
                row0: segment.row0,
                multiplier: 11.3,
            });
            let buffers = [CTL, TOKENS, h].map(Bind::Buffer);
            self.step(op, [&[Bind::Weight(0, i)], &buffers[..]].concat());
        }
        // The first and the last row, and some between.
        let rows = spec.rows as u64;
        let mut tokens = vec![0, rows as u32 - 1];
        tokens.resize_with(spec.columns as usize, || (self.random.bits() % rows) as u32);
        self.round(0, spec.columns, vec![(TOKENS, tokens)]);
        Ok(tensors)
    }

    fn norm(&mut self, spec: &Norm) -> Result<Arc<dyn Tensors>> {
        let (stride, most) = (
            spec.cols.next_multiple_of(32),
            spec.columns.iter().max().copied().unwrap_or(1),
        );
        let g = self.vector("g", spec.cols)?;
        let x = self.buffer("x", stride * most as usize);
        let (ctl, x_bind) = (Bind::Buffer(CTL), Bind::Buffer(x));
        let vectors = stride as u32 / 4;
        let (inv_cols, eps) = (1.0 / spec.cols as f32, 1e-2);
        // What the operator takes besides x.
        let mut besides = None;
        let mut bits = None;
        match spec.over {
            Over::Prep => {
                let sums = (stride / 4).next_multiple_of(32);
                let (hg, squares) = (
                    self.buffer("hg", stride * most as usize),
                    self.buffer("squares", sums * most as usize),
                );
                let bindings = vec![ctl, x_bind, g, Bind::Buffer(hg), Bind::Buffer(squares)];
                self.step(Op::Prep(kernel::Prep { vectors }), bindings);
            }
            Over::Norm => {
                // Between two results lies room that stays as it is.
                let (y_stride, y_first) = (vectors + 16, 8);
                let y = self.buffer("y", y_stride as usize * 4 * most as usize);
                let op = Op::Norm(kernel::Norm {
                    vectors,
                    inv_cols,
                    eps,
                    y_stride,
                    y_first,
                });
                self.step(op, vec![ctl, x_bind, g, Bind::Buffer(y)]);
            }
            Over::AddNorm => {
                let post = self.vector("post", spec.cols)?;
                let h = self.buffer("h", stride * most as usize);
                let y = self.buffer("y", stride * most as usize);
                let op = Op::AddNorm(kernel::AddNorm { vectors, inv_cols, eps });
                self.step(op, vec![ctl, x_bind, post, g, Bind::Buffer(h), Bind::Buffer(y)]);
                besides = Some(h);
            }
            Over::Glu(gelu) => {
                let up = self.buffer("up", stride * most as usize);
                let gelu = u32::from(gelu);
                let op = Op::Glu(kernel::Glu { vectors, gelu });
                self.step(op, vec![ctl, Bind::Buffer(up), x_bind]);
                besides = Some(up);
            }
            Over::LastColumn => {
                let to = self.buffer("to", stride);
                let op = Op::LastColumn(kernel::LastColumn { vectors });
                self.step(op, [x, to, CTL].map(Bind::Buffer).to_vec());
            }
            Over::Silence => {
                let buffer = self.buffer("bits", stride / 32);
                self.step(
                    Op::Silence(kernel::Silence { vectors }),
                    vec![ctl, Bind::Buffer(buffer), x_bind],
                );
                bits = Some(buffer);
            }
            Over::Cap(cap) => {
                let multiplier = 0.75;
                let op = Op::Cap(kernel::Cap {
                    vectors,
                    multiplier,
                    cap,
                });
                self.step(op, vec![ctl, x_bind]);
            }
        }
        for &columns in &spec.columns {
            let mut inputs = Vec::new();
            for buffer in [Some(x), besides].into_iter().flatten() {
                let values = padded(&mut self.random, columns as usize, spec.cols, stride, 0.3);
                inputs.push((buffer, values));
            }
            if let Some(bits) = bits {
                let words = (0..stride / 32).map(|_| self.random.bits() as u32).collect();
                inputs.push((bits, words));
            }
            self.round(0, columns, inputs);
        }
        self.tensors()
    }
}

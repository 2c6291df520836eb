//! From a case to a plan of a few steps over made-up tensors, and to what its buffers hold before each round.

use super::cases::{Attention, Embed, Linear, Logits, Norm, Part, Product, Rope, Sample, Spec};
use crate::container::{MemoryTensors, Tensors};
use crate::dtype::Dtype;
use crate::dtype::encode::encode;
use crate::error::Result;
use crate::kernel::{self, Kv, Op};
use crate::program::{
    ATTENTION_BLOCK, Bind, Buffer, BufferId, Ctl, Extent, Fill, Fixed, Grid, Matrix, Piece, Plan, Program, Step, Vector,
};
use crate::sampling::{SETTINGS_WORDS, Sampling};
use half::f16;
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

/// Numbers that only depend on a seed and a counter (SplitMix64, Steele et al. 2014).
struct Random(u64);

impl Random {
    fn at(seed: u64, index: u64) -> u64 {
        let mut z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number in -1..1.
    fn unit(bits: u64) -> f32 {
        (bits >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        Random::at(0, self.0)
    }

    fn floats(&mut self, count: usize, amplitude: f32) -> Vec<f32> {
        (0..count).map(|_| Random::unit(self.bits()) * amplitude).collect()
    }

    fn words(&mut self, count: usize, amplitude: f32) -> Vec<u32> {
        words(&self.floats(count, amplitude))
    }

    /// A payload of weights; a tenth of the rows is ten times smaller.
    fn payload(&mut self, dtype: Dtype, rows: usize, cols: usize, amplitude: f32) -> Result<Vec<u8>> {
        let seed = self.bits();
        encode(dtype, rows, cols, &|first, out| {
            for (i, value) in out.iter_mut().enumerate() {
                let index = first * cols + i;
                let factor = if (index / cols) % 10 == 3 { 0.1 } else { 1.0 };
                *value = Random::unit(Random::at(seed, index as u64)) * amplitude * factor;
            }
            Ok(())
        })
    }
}

fn words(floats: &[f32]) -> Vec<u32> {
    floats.iter().map(|value| value.to_bits()).collect()
}

/// Columns of `len` values, each padded with zeros to `stride`.
fn padded(random: &mut Random, columns: usize, len: usize, stride: usize, amplitude: f32) -> Vec<u32> {
    let mut all = Vec::new();
    for _ in 0..columns {
        all.extend(random.words(len, amplitude));
        all.resize(all.len() + stride - len, 0);
    }
    all
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
            Spec::Sample(spec) => maker.sample(spec)?,
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
                programs: [program, Program::default(), Program::default(), Program::default()],
                fixed: Fixed {
                    ctl: CTL,
                    settings: SETTINGS,
                    tokens: TOKENS,
                },
                ctx: POSITIONS,
                chunk: 64,
                kv: maker.kv,
                vocab: 0,
                hidden: 0,
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
        let payload = self.random.payload(Dtype::F32, 1, len, 1.0)?;
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

    fn tensor(&mut self, dtype: Dtype, rows: usize, cols: usize, amplitude: f32) -> Result<usize> {
        let payload = self.random.payload(dtype, rows, cols, amplitude)?;
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
        });
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
        let table = self.tensor(spec.dtype, spec.rows, spec.cols, spec.amplitude)?;
        let tensors = self.tensors()?;
        let matrix = Matrix::stack(
            "embed".into(),
            &[table],
            false,
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
        let vectors = stride as u32 / 4;
        if spec.prep {
            let (hg, squares) = (self.buffer("hg", stride), self.buffer("squares", stride / 4));
            let bindings = vec![
                Bind::Buffer(CTL),
                Bind::Buffer(x),
                g,
                Bind::Buffer(hg),
                Bind::Buffer(squares),
            ];
            self.step(Op::Prep(kernel::Prep { vectors }), bindings);
        } else {
            let y = self.buffer("y", stride * most as usize);
            let op = Op::Norm(kernel::Norm {
                vectors,
                inv_cols: 1.0 / spec.cols as f32,
                eps: 1e-2,
            });
            self.step(op, vec![Bind::Buffer(CTL), Bind::Buffer(x), g, Bind::Buffer(y)]);
        }
        for &columns in &spec.columns {
            let values = padded(&mut self.random, columns as usize, spec.cols, stride, 0.3);
            self.round(0, columns, vec![(x, values)]);
        }
        self.tensors()
    }

    fn linear(&mut self, spec: &Linear, max_binding: u64) -> Result<Arc<dyn Tensors>> {
        let pair = spec.product.is_pair();
        let parts = spec.parts.iter();
        let parts = parts.map(|&(dtype, rows)| self.tensor(dtype, rows, spec.cols, spec.amplitude));
        let parts = parts.collect::<Result<Vec<_>>>()?;
        let stacked: usize = spec.parts.iter().map(|part| part.1).sum();
        let outputs = if pair { stacked / 2 } else { stacked };
        let bias_up = outputs.next_multiple_of(4);
        let bias = self.vector("bias", if pair { bias_up + outputs } else { outputs })?;
        let g = self.vector("g", outputs)?;
        let tensors = self.tensors()?;
        let limit = max_binding.min(spec.max_binding);
        let matrix = Matrix::stack("w".into(), &parts, pair, &*tensors, limit)?;
        self.matrices.push(matrix.clone());

        let units = spec.cols.div_ceil(32);
        let most = spec.columns.iter().max().copied().unwrap_or(1) as usize;
        let y_len = outputs.next_multiple_of(32);
        let x = self.buffer("x", units * 32 * most.next_multiple_of(8));
        let squares_in = self.buffer("squares.in", spec.cols.div_ceil(16) * 4);
        let y = self.buffer("y", y_len * most);
        let (hg, squares) = (self.buffer("hg", y_len), self.buffer("squares", y_len / 4));
        for (i, segment) in matrix.segments.iter().enumerate() {
            let (rows, units, row0) = (segment.geometry.rows as u32, units as u32, segment.row0);
            let [_, part1, part2] = segment.part_rows;
            let square_vectors = if spec.norm { spec.cols.div_ceil(16) as u32 } else { 0 };
            let (inv_cols, eps) = (1.0 / spec.cols as f32, 1e-2);
            let (has_bias, bias_up, gelu) = (u32::from(spec.bias), bias_up as u32, u32::from(spec.gelu));
            let y_stride = (y_len / 4) as u32;
            let op = match spec.product {
                Product::Matvec => Op::Matvec(kernel::Matvec {
                    rows,
                    units,
                    row0,
                    part1,
                    part2,
                    square_vectors,
                    inv_cols,
                    eps,
                    has_bias,
                }),
                Product::MatvecAdd => Op::MatvecAdd(kernel::MatvecAdd {
                    rows,
                    units,
                    row0,
                    part1,
                    part2,
                    has_bias,
                }),
                Product::MatvecGlu => Op::MatvecGlu(kernel::MatvecGlu {
                    rows,
                    units,
                    row0,
                    part1,
                    part2,
                    square_vectors,
                    inv_cols,
                    eps,
                    has_bias,
                    bias_up,
                    gelu,
                }),
                Product::Matmul => Op::Matmul(kernel::Matmul {
                    rows,
                    units,
                    row0,
                    part1,
                    part2,
                    y_stride,
                    has_bias,
                }),
                Product::MatmulAdd => Op::MatmulAdd(kernel::MatmulAdd {
                    rows,
                    units,
                    row0,
                    part1,
                    part2,
                    y_stride,
                    has_bias,
                }),
                Product::MatmulGlu => Op::MatmulGlu(kernel::MatmulGlu {
                    rows,
                    units,
                    row0,
                    part1,
                    part2,
                    y_stride,
                    has_bias,
                    bias_up,
                    gelu,
                }),
            };
            let mut bindings = vec![Bind::Weight(0, i)];
            let buffers: &[BufferId] = match spec.product {
                Product::Matvec | Product::MatvecGlu => &[x, squares_in],
                Product::MatvecAdd => &[x],
                Product::Matmul | Product::MatmulAdd | Product::MatmulGlu => &[CTL, x],
            };
            bindings.extend(buffers.iter().map(|&buffer| Bind::Buffer(buffer)));
            bindings.push(bias);
            match spec.product {
                Product::MatvecAdd => bindings.extend([g, Bind::Buffer(y), Bind::Buffer(hg), Bind::Buffer(squares)]),
                _ => bindings.push(Bind::Buffer(y)),
            }
            self.step(op, bindings);
        }
        for &columns in &spec.columns {
            let n = columns as usize;
            let mut inputs = vec![(x, padded(&mut self.random, n, spec.cols, units * 32, 1.0))];
            if spec.norm {
                let count = spec.cols.div_ceil(4);
                let squares = self.random.floats(count, 1.0).iter().map(|v| v * v).collect::<Vec<_>>();
                let mut squares = words(&squares);
                squares.resize(spec.cols.div_ceil(16) * 4, 0);
                inputs.push((squares_in, squares));
            }
            if matches!(spec.product, Product::MatvecAdd | Product::MatmulAdd) {
                inputs.push((y, padded(&mut self.random, n, outputs, y_len, 1.0)));
            }
            self.round(0, columns, inputs);
        }
        Ok(tensors)
    }

    /// A cache of which every head's positions before `end` are set.
    fn cache(&mut self, kv_heads: u32, head_dim: u32, end: u32) -> Vec<u32> {
        let (head, all) = (
            (POSITIONS * head_dim) as usize,
            (kv_heads * POSITIONS * head_dim) as usize,
        );
        let mut values = self.random.floats(all, 1.0);
        for kv_head in values.chunks_exact_mut(head) {
            kv_head[(end * head_dim) as usize..].fill(f32::from_bits(UNSET));
        }
        match self.kv {
            Kv::F32 => words(&values),
            Kv::F16 => {
                let half = |value: f32| u32::from(f16::from_f32(value).to_bits());
                values
                    .chunks_exact(2)
                    .map(|pair| half(pair[0]) | half(pair[1]) << 16)
                    .collect()
            }
        }
    }

    fn cache_words(&self, kv_heads: u32, head_dim: u32) -> usize {
        (u64::from(kv_heads * POSITIONS * head_dim) * self.kv.bytes() / 4) as usize
    }

    fn rope(&mut self, spec: &Rope) -> Result<Arc<dyn Tensors>> {
        self.kv = spec.kv;
        let most = spec.runs.iter().map(|run| run.1).max().unwrap_or(1);
        let stride = (spec.heads + 2 * spec.kv_heads) * spec.head_dim;
        let q_norm = self.vector("q_norm", spec.head_dim as usize)?;
        let k_norm = self.vector("k_norm", spec.head_dim as usize)?;
        let table = self.buffer("table", (POSITIONS * spec.rot) as usize);
        let qkv = self.buffer("qkv", (stride * most) as usize);
        let cache_words = self.cache_words(spec.kv_heads, spec.head_dim);
        let (k_cache, v_cache) = (self.buffer("k_cache", cache_words), self.buffer("v_cache", cache_words));
        let op = Op::Rope(kernel::Rope {
            heads: spec.heads,
            kv_heads: spec.kv_heads,
            head_vectors: spec.head_dim / 4,
            rot_vectors: spec.rot / 8,
            positions: POSITIONS,
            eps: 1e-2,
            qk_norm: u32::from(spec.qk_norm),
        });
        let buffers = [qkv, k_cache, v_cache].map(Bind::Buffer);
        let first = [Bind::Buffer(CTL), Bind::Buffer(table), q_norm, k_norm];
        self.step(op, [&first[..], &buffers].concat());
        let fill = Fill::Rope {
            inv_freq: (0..spec.rot / 2)
                .map(|i| 0.7 * 100f32.powf(-2.0 * i as f32 / spec.rot as f32))
                .collect(),
            factor: 1.1,
            positions: POSITIONS,
        };
        let rows: Vec<f32> = (0..POSITIONS).flat_map(|position| fill.rope_row(position)).collect();
        for &(pos, columns) in &spec.runs {
            let values = self.random.words((stride * columns) as usize, 1.0);
            self.round(pos, columns, vec![(table, words(&rows)), (qkv, values)]);
        }
        self.tensors()
    }

    fn attention(&mut self, spec: &Attention) -> Result<Arc<dyn Tensors>> {
        self.kv = spec.kv;
        let Attention {
            heads,
            kv_heads,
            head_dim,
            window,
            softcap,
            ..
        } = *spec;
        let most = spec.runs.iter().map(|run| run.1).max().unwrap_or(1);
        let head_vectors = head_dim / 4;
        let scale = 1.0 / (head_dim as f32).sqrt();
        let blocks = POSITIONS.div_ceil(ATTENTION_BLOCK);
        let positions = POSITIONS;
        let stride = (heads + 2 * kv_heads) * head_dim;
        let part_len = (heads * blocks * (4 + head_dim)) as usize;
        // One vector more than a column needs.
        let y_stride = heads * head_vectors + 1;
        let qkv = self.buffer("qkv", (stride * most) as usize);
        let cache_words = self.cache_words(kv_heads, head_dim);
        let (k_cache, v_cache) = (self.buffer("k_cache", cache_words), self.buffer("v_cache", cache_words));
        let part = self.buffer("part", part_len * most as usize);
        let y = self.buffer("y", (y_stride * 4 * most) as usize);
        let (op, buffers) = match spec.part {
            Part::Block => {
                let op = kernel::AttnBlock {
                    heads,
                    kv_heads,
                    head_vectors,
                    positions,
                    blocks,
                    scale,
                    softcap,
                    window,
                };
                (Op::AttnBlock(op), vec![CTL, qkv, k_cache, v_cache, part])
            }
            Part::Merge => {
                let op = kernel::AttnMerge {
                    heads,
                    head_vectors,
                    blocks,
                    scale,
                    softcap,
                    window,
                    y_stride,
                };
                (Op::AttnMerge(op), vec![CTL, part, y])
            }
            Part::Chunk => {
                let op = kernel::AttnChunk {
                    heads,
                    kv_heads,
                    head_vectors,
                    positions,
                    scale,
                    softcap,
                    window,
                    y_stride,
                };
                (Op::AttnChunk(op), vec![CTL, qkv, k_cache, v_cache, y])
            }
        };
        self.step(op, buffers.into_iter().map(Bind::Buffer).collect());
        for &(pos, columns) in &spec.runs {
            let end = pos + columns;
            let inputs = match spec.part {
                Part::Merge => vec![(part, self.blocks(spec, pos, columns, blocks))],
                Part::Block | Part::Chunk => {
                    // Large queries, so that some keys stand out.
                    let q = self.random.words((stride * columns) as usize, 8.0);
                    let (k, v) = (self.cache(kv_heads, head_dim, end), self.cache(kv_heads, head_dim, end));
                    vec![(qkv, q), (k_cache, k), (v_cache, v)]
                }
            };
            self.round(pos, columns, inputs);
        }
        self.tensors()
    }

    /// What attn_block leaves for attn_merge: records of visible blocks, the others unset.
    fn blocks(&mut self, spec: &Attention, pos: u32, columns: u32, blocks: u32) -> Vec<u32> {
        let mut all = Vec::new();
        for pos in pos..pos + columns {
            let first = if spec.window == 0 {
                0
            } else {
                (pos + 1).saturating_sub(spec.window)
            };
            let visible = first / ATTENTION_BLOCK..=pos / ATTENTION_BLOCK;
            for number in (0..spec.heads).flat_map(|_| 0..blocks) {
                if !visible.contains(&number) {
                    all.resize(all.len() + 4 + spec.head_dim as usize, UNSET);
                    continue;
                }
                let largest = self.random.floats(1, 9.0)[0];
                let total = 1.0 + self.random.floats(1, 1.0)[0].abs() * 30.0;
                all.extend(words(&[largest, total, 0.0, 0.0]));
                all.extend(self.random.words(spec.head_dim as usize, total));
            }
        }
        all
    }

    fn sample(&mut self, spec: &Sample) -> Result<Arc<dyn Tensors>> {
        let vocab = spec.vocab as usize;
        let logits = self.buffer("logits", vocab);
        self.step(
            Op::Sample(kernel::Sample { vocab: spec.vocab }),
            [SETTINGS, logits, CTL].map(Bind::Buffer).to_vec(),
        );
        let all = Sampling {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
        };
        let with = |temperature, top_k, top_p, min_p| Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
            seed: 0,
        };
        let settings = [
            Sampling::greedy(),
            all,
            Sampling::default(),
            with(2.0, 1, 1.0, 0.0),
            with(1.0, 7, 1.0, 0.0),
            with(1.0, 100_000, 1.0, 0.0),
            with(1.5, 0, 0.9, 0.0),
            with(0.5, 0, 0.05, 0.0),
            with(1.0, 0, 1.0, 0.2),
            with(1.5, 40, 0.9, 0.05),
            with(0.01, 0, 1.0, 0.0),
        ];
        for sampling in &settings {
            for draw in 0..spec.draws {
                let mut values = self.logits(spec.logits, vocab);
                if spec.logits == Logits::Broken {
                    let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
                    values[(self.random.bits() % vocab as u64) as usize] = bad[draw as usize % 3];
                }
                let stops = match draw % 3 {
                    // Sometimes every token of a small vocabulary, the last of the list among them.
                    0 => (0..16).collect(),
                    1 => vec![(self.random.bits() % vocab as u64) as u32],
                    _ => Vec::new(),
                };
                let seed = self.random.bits();
                let settings = Sampling {
                    seed,
                    ..sampling.clone()
                };
                // A round in four comes after the end of an answer, which stays as it is.
                let ctl = Ctl {
                    token: 3,
                    pos: (self.random.bits() % 5000) as u32,
                    columns: 1 + draw,
                    step: draw,
                    stop: u32::from(draw % 4 == 3),
                    sampled: 3,
                };
                self.rounds.push(Round {
                    name: format!("{settings:?} at position {}", ctl.pos),
                    inputs: vec![
                        (SETTINGS, settings.words(&stops)?),
                        (logits, words(&values)),
                        (CTL, bytemuck::cast_slice(&[ctl]).to_vec()),
                    ],
                    extent: Extent { columns: 1, end: 1 },
                });
            }
        }
        self.tensors()
    }

    fn logits(&mut self, kind: Logits, vocab: usize) -> Vec<f32> {
        let value = |bits: u64| match kind {
            Logits::Spread | Logits::Broken => Random::unit(bits) * 9.0,
            // -2..=2 in halves; every other zero is negative.
            Logits::Ties => ((bits >> 40) % 9) as f32 * 0.5 - 2.0,
            Logits::Flat => -1.25,
        };
        let signed = |value: f32, bits: u64| if value == 0.0 && bits & 1 == 1 { -0.0 } else { value };
        let mut next = || {
            let bits = self.random.bits();
            signed(value(bits), bits)
        };
        (0..vocab).map(|_| next()).collect()
    }
}

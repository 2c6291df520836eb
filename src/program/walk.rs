//! The steps that every layer is made of, each written for decode (one column or a few) and prefill (a chunk) side by side.

use super::build::Builder;
use super::moe::MoeScratch;
use super::{Bind, BufferId, Fixed, Grid, Masking, Matrix, MatrixId, Piece, Program, Stacking, Step, VectorId, When};
use crate::container::TensorId;
use crate::dtype::planes::Planes;
use crate::error::Result;
use crate::kernel::{self, Op};
use crate::model::{Linear, Model};

/// Which program a step belongs to.
#[derive(Clone, Copy)]
pub(super) enum Mode {
    Decode,
    Prefill,
}

/// Buffers of activations, for the columns of a decoding run or for a chunk.
#[derive(Clone, Copy)]
pub(super) struct Scratch {
    /// The control words of the run.
    pub ctl: BufferId,
    /// The residual stream.
    pub h: BufferId,
    /// What the next linear map reads: the normalised stream, or in decode the stream times the norm's weight.
    pub x: BufferId,
    /// What a linear map made before its own norm is applied.
    pub y: BufferId,
    pub qkv: BufferId,
    pub attn: BufferId,
    pub act: BufferId,
    /// What the up projection makes, where a kernel of its own does.
    pub up: BufferId,
    /// Sums of squares of the stream, from which a decoding map takes its norm.
    pub squares: BufferId,
    /// Blocks of attention before they are merged.
    pub part: BufferId,
}

/// A stacked weight, its bias, and where its outputs begin.
#[derive(Clone, Copy)]
pub(super) struct Source {
    pub matrix: MatrixId,
    pub bias: Option<VectorId>,
    pub row0: u32,
}

/// How a decoding map finds the norm of its input.
#[derive(Clone, Copy)]
pub(super) struct DecodeNorm {
    pub square_vectors: u32,
    pub inv_cols: f32,
    pub eps: f32,
}

pub(super) struct Walk<'a> {
    pub(super) b: Builder<'a>,
    pub(super) model: &'a Model,
    pub(super) fixed: Fixed,
    pub(super) ropes: Vec<BufferId>,
    pub(super) none: VectorId,
    pub(super) decode: Scratch,
    pub(super) prefill: Scratch,
    /// Whether `decode.x` is normalised already, instead of leaving that to its reader and the squares.
    pub(super) decode_normed: bool,
    /// Whether `prefill.x` is normalised already.
    pub(super) prefill_normed: bool,
    /// Buffers of mixtures of experts, where the network has any.
    pub(super) moe: Option<MoeScratch>,
    /// What masks fill, and what they can restrict.
    pub(super) masking: Masking,
    programs: [Program; 2],
}

impl<'a> Walk<'a> {
    pub(super) fn new(
        b: Builder<'a>,
        model: &'a Model,
        fixed: Fixed,
        ropes: Vec<BufferId>,
        none: VectorId,
        [decode, prefill]: [Scratch; 2],
    ) -> Walk<'a> {
        Walk {
            b,
            model,
            fixed,
            ropes,
            none,
            decode,
            prefill,
            decode_normed: false,
            prefill_normed: false,
            moe: None,
            masking: Masking::default(),
            programs: Default::default(),
        }
    }

    pub(super) fn take(&mut self, mode: Mode) -> Program {
        std::mem::take(&mut self.programs[mode as usize])
    }

    pub(super) fn put(&mut self, mode: Mode, program: Program) {
        self.programs[mode as usize] = program;
    }

    pub(super) fn end_layer(&mut self) {
        let streams = [self.decode.h, self.prefill.h];
        for (program, stream) in self.programs.iter_mut().zip(streams) {
            program.layer_ends.push(program.steps.len());
            program.hidden.push(stream);
        }
    }

    pub(super) fn push(&mut self, mode: Mode, label: &str, op: Op, planes: Option<Planes>, bindings: Vec<Bind>) {
        let step = Step {
            label: label.to_string(),
            grid: Grid::of(&op),
            op,
            planes,
            bindings,
            columns: 1,
        };
        self.push_step(mode, step);
    }

    pub(super) fn push_step(&mut self, mode: Mode, step: Step) {
        self.programs[mode as usize].steps.push(step);
    }

    /// The steps of a program so far.
    pub(super) fn steps(&self, mode: Mode) -> &[Step] {
        &self.programs[mode as usize].steps
    }

    /// How many steps a program has so far.
    pub(super) fn at(&self, mode: Mode) -> usize {
        self.steps(mode).len()
    }

    /// The steps from `from` on run only under a condition.
    pub(super) fn only(&mut self, mode: Mode, from: usize, when: When) {
        let range = from..self.at(mode);
        self.programs[mode as usize].only(range, when);
    }

    pub(super) fn scratch(&self, mode: Mode) -> Scratch {
        match mode {
            Mode::Decode => self.decode,
            Mode::Prefill => self.prefill,
        }
    }

    pub(super) fn vector(&mut self, label: String, tensor: TensorId) -> VectorId {
        let len = self.b.tensors.infos()[tensor].rows_cols().1;
        let tensor = Some(tensor);
        self.b.vector(label, vec![Piece { tensor, len }], self.model.norm_add)
    }

    pub(super) fn norm_vector(&mut self, layer: usize, tensor: TensorId) -> VectorId {
        let last = layer == self.model.layers.len();
        let label = if last {
            "head.norm".into()
        } else {
            format!("layer.{layer:02}.attn.norm")
        };
        self.vector(label, tensor)
    }

    /// Vectors of 4 in a column, padding included.
    pub(super) fn vectors_of(elements: usize) -> u32 {
        (elements.next_multiple_of(32) / 4) as u32
    }

    pub(super) fn embed(&mut self, mode: Mode, matrix: MatrixId, tokens: BufferId) {
        let Matrix { planes, segments, .. } = self.b.matrices[matrix].clone();
        for (i, segment) in segments.iter().enumerate() {
            let op = Op::Embed(kernel::Embed {
                rows: segment.geometry.rows as u32,
                units: segment.geometry.units() as u32,
                row0: segment.row0,
                multiplier: self.model.embed_multiplier,
            });
            let scratch = self.scratch(mode);
            let bindings = vec![
                Bind::Weight(matrix, i),
                Bind::Buffer(scratch.ctl),
                Bind::Buffer(tokens),
                Bind::Buffer(scratch.h),
            ];
            self.push(mode, "embed", op, Some(planes), bindings);
        }
    }

    /// Makes the last column of `source` the only one of the run of `ctl`, in `to`.
    pub(super) fn last_column(&mut self, source: BufferId, to: BufferId, ctl: BufferId) {
        let vectors = Self::vectors_of(self.model.hidden);
        let bindings = [source, to, ctl].map(Bind::Buffer).to_vec();
        let op = Op::LastColumn(kernel::LastColumn { vectors });
        self.push(Mode::Decode, "last", op, None, bindings);
    }

    /// Readies the columns of `source` for decoding.
    pub(super) fn prep(&mut self, source: BufferId, norm: VectorId) {
        let vectors = Self::vectors_of(self.model.hidden);
        let bindings = vec![
            Bind::Buffer(self.decode.ctl),
            Bind::Buffer(source),
            Bind::Vector(norm),
            Bind::Buffer(self.decode.x),
            Bind::Buffer(self.decode.squares),
        ];
        self.push(Mode::Decode, "prep", Op::Prep(kernel::Prep { vectors }), None, bindings);
        self.decode_normed = false;
    }

    /// Normalises the prefill's stream, unless that was done with the last addition to it.
    pub(super) fn norm(&mut self, norm: VectorId, label: &str) {
        if std::mem::take(&mut self.prefill_normed) {
            return;
        }
        let to = (self.prefill.x, Self::vectors_of(self.model.hidden), 0);
        self.norm_into(Mode::Prefill, self.prefill.h, norm, to, label);
    }

    /// Normalises columns of the stream's width into a buffer, given with the vectors of 4 from one of its columns to the
    /// next and the first that is written.
    pub(super) fn norm_into(
        &mut self,
        mode: Mode,
        source: BufferId,
        norm: VectorId,
        (to, y_stride, y_first): (BufferId, u32, u32),
        label: &str,
    ) {
        let op = Op::Norm(kernel::Norm {
            vectors: Self::vectors_of(self.model.hidden),
            inv_cols: 1.0 / self.model.hidden as f32,
            eps: self.model.eps,
            y_stride,
            y_first,
        });
        let bindings = vec![
            Bind::Buffer(self.scratch(mode).ctl),
            Bind::Buffer(source),
            Bind::Vector(norm),
            Bind::Buffer(to),
        ];
        self.push(mode, label, op, None, bindings);
    }

    /// Readies the stream as it is for `next_norm`, as the last step of a layer does.
    pub(super) fn ready(&mut self, mode: Mode, next_norm: VectorId, label: &str) {
        let to = (self.scratch(mode).x, Self::vectors_of(self.model.hidden), 0);
        match mode {
            Mode::Decode if !self.decode_normed => self.prep(self.decode.h, next_norm),
            Mode::Decode => self.norm_into(mode, self.decode.h, next_norm, to, label),
            Mode::Prefill if self.prefill_normed => self.norm_into(mode, self.prefill.h, next_norm, to, label),
            Mode::Prefill => {}
        }
    }

    /// Puts the normalised stream in place of the stream, readied for `next_norm`.
    pub(super) fn between_passes(&mut self, norm: VectorId, next_norm: VectorId, pass: usize) {
        for scratch in [Mode::Decode, Mode::Prefill] {
            let Scratch { h, y, .. } = self.scratch(scratch);
            let to = (y, Self::vectors_of(self.model.hidden), 0);
            self.norm_into(scratch, h, norm, to, &format!("pass.{pass}.norm"));
        }
        // A buffer cannot be read and written by one step, so the stream moves to the other one.
        self.swap_stream();
        self.prep(self.decode.h, next_norm);
        self.prefill_normed = false;
    }

    /// The stream is the other buffer from here on.
    pub(super) fn swap_stream(&mut self) {
        for scratch in [&mut self.decode, &mut self.prefill] {
            std::mem::swap(&mut scratch.h, &mut scratch.y);
        }
    }

    /// How the readers of `decode.x` find its norm.
    pub(super) fn decode_norm(&self) -> DecodeNorm {
        if self.decode_normed {
            return AS_IT_IS;
        }
        DecodeNorm {
            // One sum covers 4 elements, one vector 4 sums.
            square_vectors: self.model.hidden.div_ceil(16) as u32,
            inv_cols: 1.0 / self.model.hidden as f32,
            eps: self.model.eps,
        }
    }

    /// y = linear(x) for decoding; y is a buffer and the vectors of 4 from one of its columns to the next.
    pub(super) fn matvec(
        &mut self,
        from: Source,
        x: BufferId,
        norm: DecodeNorm,
        (y, y_stride): (BufferId, u32),
        label: &str,
    ) {
        let Matrix { planes, segments, .. } = self.b.matrices[from.matrix].clone();
        for (i, segment) in segments.iter().enumerate() {
            let op = Op::Matvec(kernel::Matvec {
                rows: segment.geometry.rows as u32,
                units: segment.geometry.units() as u32,
                row0: from.row0 + segment.row0,
                part1: segment.part_rows[1],
                part2: segment.part_rows[2],
                square_vectors: norm.square_vectors,
                inv_cols: norm.inv_cols,
                eps: norm.eps,
                has_bias: u32::from(from.bias.is_some()),
                y_stride,
            });
            let bindings = vec![
                Bind::Weight(from.matrix, i),
                Bind::Buffer(x),
                Bind::Buffer(self.decode.squares),
                Bind::Vector(from.bias.unwrap_or(self.none)),
                Bind::Buffer(y),
            ];
            self.push(Mode::Decode, label, op, Some(planes), bindings);
        }
    }

    /// y = linear(x) for a chunk; `y_stride` vectors of 4 lie between two columns of y.
    pub(super) fn matmul(&mut self, from: Source, x: BufferId, y: BufferId, y_stride: u32, label: &str) {
        let Matrix { planes, segments, .. } = self.b.matrices[from.matrix].clone();
        for (i, segment) in segments.iter().enumerate() {
            let op = Op::Matmul(kernel::Matmul {
                rows: segment.geometry.rows as u32,
                units: segment.geometry.units() as u32,
                row0: from.row0 + segment.row0,
                part1: segment.part_rows[1],
                part2: segment.part_rows[2],
                y_stride,
                has_bias: u32::from(from.bias.is_some()),
            });
            let bindings = vec![
                Bind::Weight(from.matrix, i),
                Bind::Buffer(self.prefill.ctl),
                Bind::Buffer(x),
                Bind::Vector(from.bias.unwrap_or(self.none)),
                Bind::Buffer(y),
            ];
            self.push(Mode::Prefill, label, op, Some(planes), bindings);
        }
    }

    /// h += linear(x), or h += norm(linear(x)) where the layer has a norm there; `next_norm` is the one that follows.
    pub(super) fn residual(
        &mut self,
        label: &str,
        linear: &Linear,
        x: [BufferId; 2],
        post_norm: Option<TensorId>,
        next_norm: VectorId,
    ) -> Result<()> {
        let matrix = self.b.matrix(label.into(), &[linear.weight], Stacking::Rows)?;
        let bias = self.b.biases(format!("{label}.bias"), &[linear])?;
        match post_norm {
            None => self.add(label, matrix, bias, x, next_norm),
            Some(tensor) => {
                let from = Source { matrix, bias, row0: 0 };
                let y_stride = Self::vectors_of(linear.rows);
                self.matvec(from, x[0], AS_IT_IS, (self.decode.y, y_stride), label);
                self.matmul(from, x[1], self.prefill.y, y_stride, label);
                let label = format!("{label}.norm");
                let post_norm = self.vector(label.clone(), tensor);
                self.add_norm(&label, post_norm, next_norm);
            }
        }
        Ok(())
    }

    fn add(&mut self, label: &str, matrix: MatrixId, bias: Option<VectorId>, x: [BufferId; 2], next_norm: VectorId) {
        self.matvec_add(label, matrix, bias, x[0], next_norm);
        let has_bias = u32::from(bias.is_some());
        let bias = Bind::Vector(bias.unwrap_or(self.none));
        let Matrix { planes, segments, .. } = self.b.matrices[matrix].clone();
        for (i, segment) in segments.iter().enumerate() {
            let [_, part1, part2] = segment.part_rows;
            let y_stride = Self::vectors_of(self.model.hidden);
            let op = Op::MatmulAdd(kernel::Matmul {
                rows: segment.geometry.rows as u32,
                units: segment.geometry.units() as u32,
                row0: segment.row0,
                part1,
                part2,
                y_stride,
                has_bias,
            });
            let bindings = vec![
                Bind::Weight(matrix, i),
                Bind::Buffer(self.prefill.ctl),
                Bind::Buffer(x[1]),
                bias,
                Bind::Buffer(self.prefill.h),
            ];
            self.push(Mode::Prefill, label, op, Some(planes), bindings);
        }
        self.decode_normed = false;
        self.prefill_normed = false;
    }

    /// h += linear(x) for decoding, readied for `next_norm`.
    pub(super) fn matvec_add(
        &mut self,
        label: &str,
        matrix: MatrixId,
        bias: Option<VectorId>,
        x: BufferId,
        next_norm: VectorId,
    ) {
        let has_bias = u32::from(bias.is_some());
        let bias = Bind::Vector(bias.unwrap_or(self.none));
        let Matrix { planes, segments, .. } = self.b.matrices[matrix].clone();
        for (i, segment) in segments.iter().enumerate() {
            let [_, part1, part2] = segment.part_rows;
            let op = Op::MatvecAdd(kernel::MatvecAdd {
                rows: segment.geometry.rows as u32,
                units: segment.geometry.units() as u32,
                row0: segment.row0,
                part1,
                part2,
                has_bias,
                y_stride: Self::vectors_of(self.model.hidden),
            });
            let bindings = vec![
                Bind::Weight(matrix, i),
                Bind::Buffer(x),
                bias,
                Bind::Vector(next_norm),
                Bind::Buffer(self.decode.h),
                Bind::Buffer(self.decode.x),
                Bind::Buffer(self.decode.squares),
            ];
            self.push(Mode::Decode, label, op, Some(planes), bindings);
        }
    }

    pub(super) fn add_norm(&mut self, label: &str, post_norm: VectorId, next_norm: VectorId) {
        let op = Op::AddNorm(kernel::AddNorm {
            vectors: Self::vectors_of(self.model.hidden),
            inv_cols: 1.0 / self.model.hidden as f32,
            eps: self.model.eps,
        });
        for mode in [Mode::Decode, Mode::Prefill] {
            let scratch = self.scratch(mode);
            let bindings = vec![
                Bind::Buffer(scratch.ctl),
                Bind::Buffer(scratch.y),
                Bind::Vector(post_norm),
                Bind::Vector(next_norm),
                Bind::Buffer(scratch.h),
                Bind::Buffer(scratch.x),
            ];
            self.push(mode, label, op, None, bindings);
        }
        self.decode_normed = true;
        self.prefill_normed = true;
    }

    /// Logits of the columns and the choice of the tokens that follow them.
    pub(super) fn head(&mut self, matrix: MatrixId, bias: Option<VectorId>, logits: BufferId) {
        let from = Source { matrix, bias, row0: 0 };
        let stride = Self::vectors_of(self.model.vocab);
        self.matvec(from, self.decode.x, self.decode_norm(), (logits, stride), "head");
        self.cap(Mode::Decode, logits);
        let op = Op::Sample(kernel::Sample {
            vocab: self.model.vocab as u32,
            stride: stride * 4,
        });
        let fixed = self.fixed;
        let bindings = [fixed.settings, logits, fixed.ctl, fixed.seen]
            .map(Bind::Buffer)
            .to_vec();
        self.push(Mode::Decode, "sample", op, None, bindings);
    }

    /// Logits of every column of a chunk.
    pub(super) fn all_logits(&mut self, matrix: MatrixId, bias: Option<VectorId>, norm: VectorId, logits: BufferId) {
        self.norm(norm, "head.norm");
        let from = Source { matrix, bias, row0: 0 };
        self.matmul(from, self.prefill.x, logits, Self::vectors_of(self.model.vocab), "head");
        self.cap(Mode::Prefill, logits);
    }

    /// Multiplies and caps logits, where the network does.
    fn cap(&mut self, mode: Mode, logits: BufferId) {
        let (multiplier, cap) = (self.model.logit_multiplier, self.model.logit_softcap);
        if multiplier == 1.0 && cap == 0.0 {
            return;
        }
        let vectors = Self::vectors_of(self.model.vocab);
        let op = Op::Cap(kernel::Cap {
            vectors,
            multiplier,
            cap,
        });
        let bindings = [self.scratch(mode).ctl, logits].map(Bind::Buffer).to_vec();
        self.push(mode, "head.cap", op, None, bindings);
    }
}

/// An input that needs no norm: the factor 1 / sqrt(0 + 1).
pub(super) const AS_IT_IS: DecodeNorm = DecodeNorm {
    square_vectors: 0,
    inv_cols: 0.0,
    eps: 1.0,
};

//! Steps that all layers use: embedding, norms, products with weights, and the head.

use super::context::{DECODE, DecodeNorm, Lowering, PREFILL, Phase, Product, Streams, vectors_of};
use super::masking::MaskUse;
use crate::error::Result;
use crate::graph::{Masked, Stacking};
use crate::model::Linear;
use crate::op::{self, Bind, BufferId, MatrixId, VectorId};
use crate::source::TensorId;

impl Lowering<'_> {
    pub fn embed(&mut self, phase: Phase, matrix: MatrixId, h: BufferId) {
        for segment in self.segments(matrix) {
            let params = op::embed::Params {
                rows: segment.rows,
                groups: segment.groups,
                row0: segment.row0,
                multiplier: self.model.embed_multiplier,
            };
            let bindings = op::embed::Bindings {
                w: segment.weight,
                batch: Bind::Buffer(self.scratch[phase as usize].batch),
                h: Bind::Buffer(h),
            };
            self.emit(phase, "embed", params, bindings);
        }
    }

    /// Makes the last token of a batch the only one, and copies its row of `source` to `to`.
    pub fn last_token(&mut self, source: BufferId, to: BufferId, batch: BufferId) {
        let vectors = vectors_of(self.model.hidden);
        let bindings = op::last_token::Bindings {
            source: Bind::Buffer(source),
            to: Bind::Buffer(to),
            batch: Bind::Buffer(batch),
        };
        self.emit(Phase::Decode, "last", op::last_token::Params { vectors }, bindings);
    }

    /// Scales the stream in `source` for decoding, and sums its squares.
    pub fn pre_norm(&mut self, source: BufferId, norm: VectorId) {
        let scratch = self.scratch[DECODE];
        let bindings = op::pre_norm::Bindings {
            batch: Bind::Buffer(scratch.batch),
            source: Bind::Buffer(source),
            g: Bind::Vector(norm),
            x_scaled: Bind::Buffer(scratch.x),
            squares: Bind::Buffer(scratch.squares),
        };
        let vectors = vectors_of(self.model.hidden);
        self.emit(Phase::Decode, "pre_norm", op::pre_norm::Params { vectors }, bindings);
    }

    /// Normalises the stream of prefill, unless the last step that added to it did.
    pub fn prefill_norm(&mut self, streams: &Streams, norm: VectorId, label: &str) {
        if !streams[PREFILL].normed {
            self.norm_to_x(Phase::Prefill, streams[PREFILL].h, norm, label);
        }
    }

    /// Normalises rows of the stream's width into `x`.
    pub fn norm_to_x(&mut self, phase: Phase, source: BufferId, norm: VectorId, label: &str) {
        let to = (self.scratch[phase as usize].x, vectors_of(self.model.hidden), 0);
        self.norm_into(phase, source, norm, to, label);
    }

    /// Normalises rows of the stream's width into a buffer: `(buffer, vectors of 4 from one row to the next, first
    /// vector that is written)`.
    pub fn norm_into(
        &mut self,
        phase: Phase,
        source: BufferId,
        norm: VectorId,
        (to, y_stride, y_first): (BufferId, u32, u32),
        label: &str,
    ) {
        let params = op::norm::Params {
            vectors: vectors_of(self.model.hidden),
            inv_cols: 1.0 / self.model.hidden as f32,
            eps: self.model.eps,
            y_stride,
            y_first,
        };
        let bindings = op::norm::Bindings {
            batch: Bind::Buffer(self.scratch[phase as usize].batch),
            x: Bind::Buffer(source),
            g: Bind::Vector(norm),
            y: Bind::Buffer(to),
        };
        self.emit(phase, label, params, bindings);
    }

    /// Prepares the stream for `norm` as the last step of a layer does. For layers that are left out.
    pub fn prepare(&mut self, streams: &Streams, norm: VectorId, label: &str) {
        for phase in Phase::BOTH {
            let stream = streams[phase as usize];
            match (phase, stream.normed) {
                (_, true) => self.norm_to_x(phase, stream.h, norm, label),
                (Phase::Decode, false) => self.pre_norm(stream.h, norm),
                (Phase::Prefill, false) => {}
            }
        }
    }

    /// Replaces the stream by the normalised stream between two passes over the layers, and prepares it for
    /// `next_norm`.
    pub fn between_passes(&mut self, streams: &Streams, norm: VectorId, next_norm: VectorId, pass: usize) -> Streams {
        for phase in Phase::BOTH {
            let stream = streams[phase as usize];
            let to = (stream.other, vectors_of(self.model.hidden), 0);
            self.norm_into(phase, stream.h, norm, to, &format!("pass.{pass}.norm"));
        }
        // A step cannot read and write one buffer, so the stream moves to the other one.
        let streams = streams.map(|stream| stream.swapped());
        self.pre_norm(streams[DECODE].h, next_norm);
        streams
    }

    /// `y = product(x)` for decoding. `y`: a buffer, and the vectors of 4 from one token's row to the next.
    pub fn matvec(
        &mut self,
        label: &str,
        from: Product,
        x: BufferId,
        norm: DecodeNorm,
        (y, y_stride): (BufferId, u32),
        lists: &[Option<Masked>],
    ) {
        for (segment, &masked) in self.segments(from.matrix).iter().zip(lists) {
            let params = op::matvec::Params {
                rows: segment.rows,
                groups: segment.groups,
                row0: from.row0 + segment.row0,
                second_row: segment.second_row,
                third_row: segment.third_row,
                square_vectors: norm.square_vectors,
                inv_cols: norm.inv_cols,
                eps: norm.eps,
                has_bias: u32::from(from.bias.is_some()),
                y_stride,
            };
            let bindings = op::matvec::Bindings {
                w: segment.weight,
                x: Bind::Buffer(x),
                squares: Bind::Buffer(self.scratch[DECODE].squares),
                list: self.list(masked),
                bias: self.bias(from.bias),
                y: Bind::Buffer(y),
            };
            self.emit_masked(Phase::Decode, label, params, bindings, masked);
        }
    }

    /// `y = product(x)` for a chunk.
    pub fn matmul(
        &mut self,
        label: &str,
        from: Product,
        x: BufferId,
        (y, y_stride): (BufferId, u32),
        lists: &[Option<Masked>],
    ) {
        for (segment, &masked) in self.segments(from.matrix).iter().zip(lists) {
            let params = op::matmul::Params {
                rows: segment.rows,
                groups: segment.groups,
                row0: from.row0 + segment.row0,
                second_row: segment.second_row,
                third_row: segment.third_row,
                y_stride,
                has_bias: u32::from(from.bias.is_some()),
            };
            let bindings = op::matmul::Bindings {
                w: segment.weight,
                batch: Bind::Buffer(self.scratch[PREFILL].batch),
                x: Bind::Buffer(x),
                list: self.list(masked),
                bias: self.bias(from.bias),
                y: Bind::Buffer(y),
            };
            self.emit_masked(Phase::Prefill, label, params, bindings, masked);
        }
    }

    /// `y = product(x)` in both phases.
    pub fn product(
        &mut self,
        label: &str,
        from: Product,
        x: [BufferId; 2],
        norm: DecodeNorm,
        (y, y_stride): ([BufferId; 2], u32),
        mask: Option<MaskUse>,
    ) -> Result<()> {
        let lists = self.lists(label, from.matrix, from.row0, mask)?;
        self.matvec(label, from, x[DECODE], norm, (y[DECODE], y_stride), &lists);
        self.matmul(label, from, x[PREFILL], (y[PREFILL], y_stride), &lists);
        Ok(())
    }

    /// `h += linear(x)`, or `h += norm(linear(x))` if the layer has a norm there. `next_norm`: the norm that follows.
    pub fn residual(
        &mut self,
        label: &str,
        linear: &Linear,
        x: [BufferId; 2],
        (post_norm, next_norm): (Option<TensorId>, VectorId),
        streams: Streams,
        mask: Option<MaskUse>,
    ) -> Result<Streams> {
        let matrix = self.b.matrix(label, &[linear.weight], Stacking::Rows)?;
        let bias = self.b.biases(format!("{label}.bias"), &[linear]);
        let from = Product { matrix, bias, row0: 0 };
        let Some(tensor) = post_norm else {
            let lists = self.lists(label, matrix, 0, mask)?;
            self.matvec_add(label, from, x[DECODE], next_norm, &streams, &lists);
            self.matmul_add(label, from, x[PREFILL], &streams, &lists);
            return Ok(streams.map(|stream| stream.with_normed(false)));
        };
        let y = streams.map(|stream| stream.other);
        self.product(label, from, x, DecodeNorm::NONE, (y, vectors_of(linear.rows)), mask)?;
        let label = format!("{label}.norm");
        let post_norm = self.norm_weight(label.clone(), tensor);
        Ok(self.add_norm(&label, post_norm, next_norm, streams))
    }

    /// `h += product(x)` for decoding, and the first half of `next_norm`. A product with a bias does not run as the
    /// masked variant. The result is the same, because its input is zero in the columns that a mask leaves out.
    pub fn matvec_add(
        &mut self,
        label: &str,
        from: Product,
        x: BufferId,
        next_norm: VectorId,
        streams: &Streams,
        lists: &[Option<Masked>],
    ) {
        let scratch = self.scratch[DECODE];
        for (segment, &masked) in self.segments(from.matrix).iter().zip(lists) {
            let masked = masked.filter(|_| from.bias.is_none());
            let params = op::matvec_add::Params {
                rows: segment.rows,
                groups: segment.groups,
                row0: segment.row0,
                second_row: segment.second_row,
                third_row: segment.third_row,
                has_bias: u32::from(from.bias.is_some()),
                y_stride: vectors_of(self.model.hidden),
            };
            let bindings = op::matvec_add::Bindings {
                w: segment.weight,
                x: Bind::Buffer(x),
                list: masked.map_or(self.bias(from.bias), |masked| Bind::Buffer(masked.list)),
                g: Bind::Vector(next_norm),
                h: Bind::Buffer(streams[DECODE].h),
                x_scaled: Bind::Buffer(scratch.x),
                squares: Bind::Buffer(scratch.squares),
            };
            self.emit_masked(Phase::Decode, label, params, bindings, masked);
        }
    }

    fn matmul_add(&mut self, label: &str, from: Product, x: BufferId, streams: &Streams, lists: &[Option<Masked>]) {
        for (segment, &masked) in self.segments(from.matrix).iter().zip(lists) {
            let params = op::matmul_add::Params {
                rows: segment.rows,
                groups: segment.groups,
                row0: segment.row0,
                second_row: segment.second_row,
                third_row: segment.third_row,
                y_stride: vectors_of(self.model.hidden),
                has_bias: u32::from(from.bias.is_some()),
            };
            let bindings = op::matmul_add::Bindings {
                w: segment.weight,
                batch: Bind::Buffer(self.scratch[PREFILL].batch),
                x: Bind::Buffer(x),
                list: self.list(masked),
                bias: self.bias(from.bias),
                h: Bind::Buffer(streams[PREFILL].h),
            };
            self.emit_masked(Phase::Prefill, label, params, bindings, masked);
        }
    }

    /// `h += norm(other)`, then `x = norm(h)`.
    pub fn add_norm(&mut self, label: &str, post_norm: VectorId, next_norm: VectorId, streams: Streams) -> Streams {
        let params = op::add_norm::Params {
            vectors: vectors_of(self.model.hidden),
            inv_cols: 1.0 / self.model.hidden as f32,
            eps: self.model.eps,
        };
        for phase in Phase::BOTH {
            let (scratch, stream) = (self.scratch[phase as usize], streams[phase as usize]);
            let bindings = op::add_norm::Bindings {
                batch: Bind::Buffer(scratch.batch),
                y: Bind::Buffer(stream.other),
                post: Bind::Vector(post_norm),
                g: Bind::Vector(next_norm),
                h: Bind::Buffer(stream.h),
                x: Bind::Buffer(scratch.x),
            };
            self.emit(phase, label, params, bindings);
        }
        streams.map(|stream| stream.with_normed(true))
    }

    /// Computes the logits of decoded tokens, and samples the tokens that follow.
    pub fn head(&mut self, from: Product, norm: DecodeNorm, logits: BufferId) {
        let stride = vectors_of(self.model.vocab);
        let lists = vec![None; self.b.matrices[from.matrix].segments.len()];
        self.matvec("head", from, self.scratch[DECODE].x, norm, (logits, stride), &lists);
        self.cap(Phase::Decode, logits);
        let params = op::sample::Params {
            vocab: self.model.vocab as u32,
            stride: stride * 4,
        };
        let bindings = op::sample::Bindings {
            settings: Bind::Buffer(self.buffers.settings),
            logits: Bind::Buffer(logits),
            batch: Bind::Buffer(self.buffers.batch),
            slots: Bind::Buffer(self.buffers.slots),
            seen: Bind::Buffer(self.buffers.seen),
        };
        self.emit(Phase::Decode, "sample", params, bindings);
    }

    /// The logits of every token of a chunk.
    pub fn all_logits(&mut self, from: Product, streams: &Streams, norm: VectorId, logits: BufferId) {
        self.prefill_norm(streams, norm, "head.norm");
        let lists = vec![None; self.b.matrices[from.matrix].segments.len()];
        let y = (logits, vectors_of(self.model.vocab));
        self.matmul("head", from, self.scratch[PREFILL].x, y, &lists);
        self.cap(Phase::Prefill, logits);
    }

    /// Multiplier and cap of logits, if the network has them.
    fn cap(&mut self, phase: Phase, logits: BufferId) {
        let (multiplier, cap) = (self.model.logit_multiplier, self.model.logit_softcap);
        if multiplier == 1.0 && cap == 0.0 {
            return;
        }
        let params = op::cap::Params {
            vectors: vectors_of(self.model.vocab),
            multiplier,
            cap,
        };
        let bindings = op::cap::Bindings {
            batch: Bind::Buffer(self.scratch[phase as usize].batch),
            y: Bind::Buffer(logits),
        };
        self.emit(phase, "head.cap", params, bindings);
    }
}

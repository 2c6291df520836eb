//! Steps that all layers use: embedding, norms, products with weights, and the head.

use super::context::{DECODE, DecodeNorm, Ends, Half, Lowering, PREFILL, Phase, Product, Streams, vectors_of};
use super::masking::MaskUse;
use crate::error::Result;
use crate::graph::Stacking;
use crate::model::Linear;
use crate::op::{self, Bind, BufferId, MatrixId, VectorId};
use crate::source::TensorId;

impl Lowering<'_> {
    pub fn embed(&mut self, phase: Phase, matrix: MatrixId, h: BufferId) -> Result<()> {
        let rotated = self.rotated_rows(phase);
        for segment in self.segments(matrix) {
            let params = op::embed::Params {
                rows: segment.rows,
                groups: segment.groups,
                row0: segment.row0,
                multiplier: self.model.embed_multiplier,
            };
            let (w, batch) = (segment.weight, self.scratch[phase as usize].batch);
            let [batch, h] = [batch, rotated.unwrap_or(h)].map(Bind::Buffer);
            let bindings = op::embed::Bindings { w, batch, h };
            self.emit(phase, "embed", params, bindings);
        }
        if let Some(rows) = rotated {
            self.rotate(phase, "embed.rotate", self.model.hidden, true, rows, Some(h))?;
        }
        Ok(())
    }

    /// Makes the last token of a batch the only one, and copies its row of `source` to `to`.
    pub fn last_token(&mut self, source: BufferId, to: BufferId, batch: BufferId) {
        let vectors = vectors_of(self.model.hidden);
        let [source, to, batch] = [source, to, batch].map(Bind::Buffer);
        let bindings = op::last_token::Bindings { source, to, batch };
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
        if !streams.normed {
            self.norm_to_x(Phase::Prefill, streams.h[PREFILL], norm, label);
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
        let [batch, x, y] = [self.scratch[phase as usize].batch, source, to].map(Bind::Buffer);
        let g = Bind::Vector(norm);
        self.emit(phase, label, params, op::norm::Bindings { batch, x, g, y });
    }

    /// Normalises the streams into their other buffers, and swaps the buffers.
    pub fn norm_swapped(&mut self, streams: &Streams, norm: VectorId, label: &str) -> Streams {
        for phase in Phase::BOTH {
            let to = (streams.other[phase as usize], vectors_of(self.model.hidden), 0);
            self.norm_into(phase, streams.h[phase as usize], norm, to, label);
        }
        // A step cannot read and write one buffer, so the stream moves to the other one.
        Streams {
            h: streams.other,
            other: streams.h,
            normed: false,
        }
    }

    /// Prepares the stream for `norm` as the last step of a layer does. For layers that are left out.
    pub fn prepare(&mut self, streams: &Streams, norm: VectorId, label: &str) {
        if !streams.normed {
            return self.pre_norm(streams.h[DECODE], norm);
        }
        for phase in Phase::BOTH {
            self.norm_to_x(phase, streams.h[phase as usize], norm, label);
        }
    }

    /// A weight and its bias.
    pub fn linear(&mut self, label: &str, linear: &Linear, mask: Option<MaskUse>) -> Result<Product> {
        let matrix = self.b.matrix(label, &[linear.weight], Stacking::Rows)?;
        let bias = self.b.biases(format!("{label}.bias"), &[linear]);
        self.operand(label, (matrix, 0), bias, mask)
    }

    /// `y = product(x)` for decoding. `y`: a buffer, and the vectors of 4 from one token's row to the next.
    pub fn matvec(
        &mut self,
        label: &str,
        from: &Product,
        x: BufferId,
        norm: DecodeNorm,
        (y, y_stride): (BufferId, u32),
    ) {
        for segment in &from.segments {
            let params = op::matvec::Params {
                rows: segment.rows,
                groups: segment.groups,
                row0: segment.row0,
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
                list: self.list(segment.masked),
                bias: self.bias(from.bias),
                y: Bind::Buffer(y),
            };
            self.emit_masked(Phase::Decode, label, params, bindings, segment.masked);
        }
    }

    /// `y = product(x)` for a chunk.
    pub fn matmul(&mut self, label: &str, from: &Product, x: BufferId, (y, y_stride): (BufferId, u32)) {
        for segment in &from.segments {
            let params = op::matmul::Params {
                rows: segment.rows,
                groups: segment.groups,
                row0: segment.row0,
                second_row: segment.second_row,
                third_row: segment.third_row,
                y_stride,
                has_bias: u32::from(from.bias.is_some()),
            };
            let bindings = op::matmul::Bindings {
                w: segment.weight,
                batch: Bind::Buffer(self.scratch[PREFILL].batch),
                x: Bind::Buffer(x),
                list: self.list(segment.masked),
                bias: self.bias(from.bias),
                y: Bind::Buffer(y),
            };
            self.emit_masked(Phase::Prefill, label, params, bindings, segment.masked);
        }
    }

    /// `y = product(x)` in both phases.
    pub fn product(
        &mut self,
        label: &str,
        from: &Product,
        x: [BufferId; 2],
        norm: DecodeNorm,
        (y, y_stride): ([BufferId; 2], u32),
    ) {
        self.matvec(label, from, x[DECODE], norm, (y[DECODE], y_stride));
        self.matmul(label, from, x[PREFILL], (y[PREFILL], y_stride));
    }

    /// `h += linear(x)`, or `h += norm(linear(x))` if the layer has a norm there.
    pub fn residual(
        &mut self,
        label: &str,
        linear: &Linear,
        x: [BufferId; 2],
        half: &Half,
        mask: Option<MaskUse>,
    ) -> Result<Streams> {
        let streams = half.streams;
        // Zeros in the columns that a mask leaves out do not stay zeros.
        let mask = mask.filter(|_| !self.is_rotated(linear.weight));
        let from = self.linear(label, linear, mask)?;
        let x = self.inputs(label, (linear.weight, linear.cols), x)?;
        let Some(post_norm) = half.post_norm else {
            self.matvec_add(label, &from, x[DECODE], half.next_norm, &streams);
            self.matmul_add(label, &from, x[PREFILL], &streams);
            let normed = false;
            return Ok(Streams { normed, ..streams });
        };
        let y = (streams.other, vectors_of(linear.rows));
        self.product(label, &from, x, DecodeNorm::NONE, y);
        Ok(self.add_norm(&format!("{label}.norm"), post_norm, half))
    }

    /// `h += product(x)` for decoding, and the first half of `next_norm`. A product with a bias does not run as the
    /// masked variant. The result is the same, because its input is zero in the columns that a mask leaves out.
    pub fn matvec_add(&mut self, label: &str, from: &Product, x: BufferId, next_norm: VectorId, streams: &Streams) {
        let scratch = self.scratch[DECODE];
        for segment in &from.segments {
            let masked = segment.masked.filter(|_| from.bias.is_none());
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
                h: Bind::Buffer(streams.h[DECODE]),
                x_scaled: Bind::Buffer(scratch.x),
                squares: Bind::Buffer(scratch.squares),
            };
            self.emit_masked(Phase::Decode, label, params, bindings, masked);
        }
    }

    fn matmul_add(&mut self, label: &str, from: &Product, x: BufferId, streams: &Streams) {
        for segment in &from.segments {
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
                list: self.list(segment.masked),
                bias: self.bias(from.bias),
                h: Bind::Buffer(streams.h[PREFILL]),
            };
            self.emit_masked(Phase::Prefill, label, params, bindings, segment.masked);
        }
    }

    /// `h += norm(other)`, then `x = norm(h)` with the norm that follows.
    pub fn add_norm(&mut self, label: &str, post_norm: TensorId, half: &Half) -> Streams {
        let streams = half.streams;
        let post = Bind::Vector(self.norm_weight(label, post_norm));
        let params = op::add_norm::Params {
            vectors: vectors_of(self.model.hidden),
            inv_cols: 1.0 / self.model.hidden as f32,
            eps: self.model.eps,
        };
        for phase in Phase::BOTH {
            let scratch = self.scratch[phase as usize];
            let bindings = op::add_norm::Bindings {
                batch: Bind::Buffer(scratch.batch),
                y: Bind::Buffer(streams.other[phase as usize]),
                post,
                g: Bind::Vector(half.next_norm),
                h: Bind::Buffer(streams.h[phase as usize]),
                x: Bind::Buffer(scratch.x),
            };
            self.emit(phase, label, params, bindings);
        }
        let normed = true;
        Streams { normed, ..streams }
    }

    /// Computes the logits of decoded tokens, and samples the tokens that follow.
    pub fn head(&mut self, ends: &Ends, norm: DecodeNorm) -> Result<()> {
        let stride = vectors_of(self.model.vocab);
        let weight = (self.model.lm_head.weight, self.model.hidden);
        let x = self.input(Phase::Decode, "head", weight, self.scratch[DECODE].x)?;
        self.matvec("head", &ends.head, x, norm, (ends.logits, stride));
        self.cap(Phase::Decode, ends.logits);
        let params = op::sample::Params {
            vocab: self.model.vocab as u32,
            stride: stride * 4,
        };
        let bindings = op::sample::Bindings {
            settings: Bind::Buffer(self.buffers.settings),
            logits: Bind::Buffer(ends.logits),
            batch: Bind::Buffer(self.buffers.batch),
            slots: Bind::Buffer(self.buffers.slots),
            seen: Bind::Buffer(self.buffers.seen),
        };
        self.emit(Phase::Decode, "sample", params, bindings);
        Ok(())
    }

    /// The logits of every token of a chunk.
    pub fn all_logits(&mut self, ends: &Ends, logits: BufferId) -> Result<()> {
        self.prefill_norm(&ends.streams, ends.final_norm, "head.norm");
        let y = (logits, vectors_of(self.model.vocab));
        let weight = (self.model.lm_head.weight, self.model.hidden);
        let x = self.input(Phase::Prefill, "head", weight, self.scratch[PREFILL].x)?;
        self.matmul("head", &ends.head, x, y);
        self.cap(Phase::Prefill, logits);
        Ok(())
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
        let [batch, y] = [self.scratch[phase as usize].batch, logits].map(Bind::Buffer);
        self.emit(phase, "head.cap", params, op::cap::Bindings { batch, y });
    }
}

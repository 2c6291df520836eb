//! Gated feed-forward networks as steps: gate and up in one, down with the residual.

use super::masking::Part;
use super::place::{Masked, Place, Side};
use super::walk::{Mode, Source, Walk};
use super::{Bind, Matrix, Piece, Stacking, VectorId};
use crate::error::{Result, bail};
use crate::kernel::{self, Op};
use crate::model::{Activation, FeedForward, Ffn, GateUp, Layer, Linear};

impl Walk<'_> {
    /// Both modes of h += ffn(norm(h)).
    pub(super) fn ffn(&mut self, place: Place, layer: &Layer, norm: VectorId, next_norm: VectorId) -> Result<()> {
        match &layer.ffn {
            FeedForward::Dense(ffn) => self.dense(place, layer, ffn, norm, next_norm),
            FeedForward::Moe(moe) => self.moe(place, layer, moe, norm, next_norm),
        }
    }

    fn dense(&mut self, place: Place, layer: &Layer, ffn: &Ffn, norm: VectorId, next_norm: VectorId) -> Result<()> {
        let name = |part: &str| format!("{place}.ffn.{part}");
        let width = ffn.down.cols;
        let neurons = self.masked(place, Part::Neurons, width, 1);
        // The up biases begin at a whole vector.
        let bias_up = width.next_multiple_of(4);
        let (matrix, biases) = match &ffn.gate_up {
            GateUp::Split(gate, up) => {
                if self.b.gate_up_apart(layer)? {
                    self.gate_up_apart(&name, [gate, up], norm, neurons)?;
                    return self.down(&name, layer, ffn, neurons, next_norm);
                }
                let parts = [gate.weight, up.weight];
                let matrix = self.b.matrix(name("gate_up"), &parts, Stacking::Pair)?;
                (matrix, [gate.bias, up.bias])
            }
            GateUp::Fused(both) => {
                if both.bias.is_some() {
                    bail!(UnsupportedModel, "{place}: a bias of a fused gate and up projection");
                }
                let parts = [both.weight; 2];
                (self.b.matrix(name("gate_up"), &parts, Stacking::Halves)?, [None; 2])
            }
        };
        let bias = match biases {
            [None, None] => None,
            [gate, up] => {
                let pieces = [(gate, width), (None, bias_up - width), (up, width)];
                let pieces = pieces.map(|(tensor, len)| Piece { tensor, len }).to_vec();
                Some(self.b.vector(name("gate_up.bias"), pieces, 0.0))
            }
        };
        let gelu = u32::from(self.model.activation == Activation::GeluTanh);
        let has_bias = u32::from(bias.is_some());
        let bias = Bind::Vector(bias.unwrap_or(self.none));
        self.norm(norm, &name("norm"));
        let Matrix { planes, segments, .. } = self.b.matrices[matrix].clone();
        for (i, segment) in segments.iter().enumerate() {
            let (rows, units) = (segment.geometry.rows as u32, segment.geometry.units() as u32);
            let [_, part1, part2] = segment.part_rows;
            let weight = Bind::Weight(matrix, i);
            let row0 = segment.row0;
            let decode_norm = self.decode_norm();
            let op = Op::MatvecGlu(kernel::MatvecGlu {
                rows,
                units,
                row0,
                part1,
                part2,
                square_vectors: decode_norm.square_vectors,
                inv_cols: decode_norm.inv_cols,
                eps: decode_norm.eps,
                has_bias,
                bias_up: bias_up as u32,
                gelu,
                y_stride: Self::vectors_of(width),
            });
            let bindings = vec![
                weight,
                Bind::Buffer(self.decode.x),
                Bind::Buffer(self.decode.squares),
                bias,
                Bind::Buffer(self.decode.act),
            ];
            let from = self.at(Mode::Decode);
            self.push(Mode::Decode, &name("gate_up"), op, Some(planes), bindings);
            self.narrow(from, neurons, Side::Rows)?;
            let op = Op::MatmulGlu(kernel::MatmulGlu {
                rows,
                units,
                row0,
                part1,
                part2,
                y_stride: Self::vectors_of(width),
                has_bias,
                bias_up: bias_up as u32,
                gelu,
            });
            let bindings = vec![
                weight,
                Bind::Buffer(self.prefill.ctl),
                Bind::Buffer(self.prefill.x),
                bias,
                Bind::Buffer(self.prefill.act),
            ];
            let from = self.at(Mode::Prefill);
            self.push(Mode::Prefill, &name("gate_up"), op, Some(planes), bindings);
            self.narrow_chunk(from, neurons, Side::Rows)?;
        }
        let y = [self.decode.act, self.prefill.act];
        self.silence(&[Mode::Prefill], &name("neurons"), y, neurons, width)?;
        self.down(&name, layer, ffn, neurons, next_norm)
    }

    fn down(
        &mut self,
        name: &dyn Fn(&str) -> String,
        layer: &Layer,
        ffn: &Ffn,
        neurons: Option<Masked>,
        next_norm: VectorId,
    ) -> Result<()> {
        let x = [self.decode.act, self.prefill.act];
        let from = [Mode::Decode, Mode::Prefill].map(|mode| self.at(mode));
        self.residual(&name("down"), &ffn.down, x, layer.ffn_post_norm, next_norm)?;
        self.narrow(from[0], neurons, Side::Cols)?;
        self.narrow_chunk(from[1], neurons, Side::Cols)
    }

    /// Gate and up projections of different device layouts: a product each, then the gate.
    fn gate_up_apart(
        &mut self,
        name: &dyn Fn(&str) -> String,
        both: [&Linear; 2],
        norm: VectorId,
        neurons: Option<Masked>,
    ) -> Result<()> {
        self.norm(norm, &name("norm"));
        let vectors = Self::vectors_of(both[0].rows);
        let (decode, prefill) = (self.decode, self.prefill);
        let to = [("gate", [decode.act, prefill.act]), ("up", [decode.up, prefill.up])];
        for (linear, (part, y)) in both.into_iter().zip(to) {
            let label = name(part);
            let matrix = self.b.matrix(label.clone(), &[linear.weight], Stacking::Rows)?;
            let bias = self.b.biases(format!("{label}.bias"), &[linear])?;
            let from = Source { matrix, bias, row0: 0 };
            let decode_norm = self.decode_norm();
            let begin = [Mode::Decode, Mode::Prefill].map(|mode| self.at(mode));
            self.matvec(from, decode.x, decode_norm, (y[0], vectors), &label);
            self.narrow(begin[0], neurons, Side::Rows)?;
            self.matmul(from, prefill.x, y[1], vectors, &label);
            self.narrow_chunk(begin[1], neurons, Side::Rows)?;
        }
        let gelu = u32::from(self.model.activation == Activation::GeluTanh);
        for (mode, scratch) in [(Mode::Decode, decode), (Mode::Prefill, prefill)] {
            let bindings = [scratch.ctl, scratch.up, scratch.act].map(Bind::Buffer).to_vec();
            self.push(
                mode,
                &name("glu"),
                Op::Glu(kernel::Glu { vectors, gelu }),
                None,
                bindings,
            );
        }
        let y = [decode.act, prefill.act];
        self.silence(
            &[Mode::Decode, Mode::Prefill],
            &name("neurons"),
            y,
            neurons,
            both[0].rows,
        )
    }
}

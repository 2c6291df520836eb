//! Gated feed-forward networks as steps: gate and up in one step if they have the same layout, down with the residual.

use super::context::{LayerPath, Lowering, Phase, Product, Streams, vectors_of};
use super::masking::{MaskUse, MaskedUnits};
use crate::error::{Result, bail};
use crate::graph::{Piece, Stacking};
use crate::lm::masks::{Axis, Content, MaskAxis};
use crate::model::{Activation, FeedForward, Ffn, GateUp, Layer, Linear};
use crate::op::{self, Bind, MatrixId, VectorId};

impl Lowering<'_> {
    /// h += ffn(norm(h)).
    pub fn ffn(
        &mut self,
        path: LayerPath,
        layer: &Layer,
        [norm, next_norm]: [VectorId; 2],
        streams: Streams,
    ) -> Result<Streams> {
        match &layer.ffn {
            FeedForward::Dense(ffn) => self.dense(path, layer, ffn, [norm, next_norm], streams),
            FeedForward::Moe(moe) => self.mixture(path, layer, moe, [norm, next_norm], streams),
        }
    }

    fn dense(
        &mut self,
        path: LayerPath,
        layer: &Layer,
        ffn: &Ffn,
        [norm, next_norm]: [VectorId; 2],
        streams: Streams,
    ) -> Result<Streams> {
        let name = |role: &str| format!("{path}.ffn.{role}");
        let neurons = self.masked_units(path, MaskAxis::Neurons, ffn.down.cols, 1);
        self.prefill_norm(&streams, norm, &name("norm"));
        match &ffn.gate_up {
            GateUp::Split(gate, up) if self.b.gate_up_unfused(layer)? => {
                self.unfused(&name, [gate, up], neurons, &streams)?;
            }
            GateUp::Split(gate, up) => {
                let tensors = [gate.weight, up.weight];
                let matrix = self.b.matrix(&name("gate_up"), &tensors, Stacking::Pair)?;
                let bias = self.pair_bias(name("gate_up.bias"), ffn.down.cols, [gate, up]);
                self.fused(&name, matrix, bias, ffn.down.cols, neurons, &streams)?;
            }
            GateUp::Fused(both) => {
                if both.bias.is_some() {
                    bail!(
                        UnsupportedModel,
                        "{path}: a fused gate and up projection has a bias, expected none"
                    );
                }
                let matrix = self.b.matrix(&name("gate_up"), &[both.weight; 2], Stacking::Halves)?;
                self.fused(&name, matrix, None, ffn.down.cols, neurons, &streams)?;
            }
        }
        let x = self.scratch.map(|scratch| scratch.act);
        let norms = (layer.ffn_post_norm, next_norm);
        self.residual(&name("down"), &ffn.down, x, norms, streams, neurons.map(MaskUse::Cols))
    }

    /// The biases of gate and up. Those of up begin at a whole vector.
    fn pair_bias(&mut self, label: String, width: usize, [gate, up]: [&Linear; 2]) -> Option<Bind> {
        if gate.bias.is_none() && up.bias.is_none() {
            return None;
        }
        let padding = width.next_multiple_of(4) - width;
        let pieces = [(gate.bias, width), (None, padding), (up.bias, width)];
        let pieces = pieces.map(|(tensor, len)| Piece { tensor, len }).to_vec();
        Some(Bind::Vector(self.b.vector(label, pieces, 0.0)))
    }

    /// Gate and up projections in one matrix.
    fn fused(
        &mut self,
        name: &dyn Fn(&str) -> String,
        matrix: MatrixId,
        bias: Option<Bind>,
        width: usize,
        neurons: Option<MaskedUnits>,
        streams: &Streams,
    ) -> Result<()> {
        let label = name("gate_up");
        let gelu = self.gelu();
        let has_bias = u32::from(bias.is_some());
        let (bias, bias_up) = (self.bias(bias), width.next_multiple_of(4) as u32);
        let norm = self.decode_norm(streams);
        let [decode, prefill] = self.scratch;
        for (i, segment) in self.segments(matrix).into_iter().enumerate() {
            let outputs = segment.second_row;
            let (mut by_output, mut by_block) = (None, None);
            if let Some(units) = &neurons {
                let axis = units.elements(segment.row0, outputs);
                by_output = Some(self.mask_list(format!("{label}.{i}.list"), units, Content::Outputs(axis))?);
                let content = Content::Listed {
                    rows: axis,
                    cols: Axis::whole(segment.groups as usize * 32),
                };
                by_block = Some(self.mask_list(format!("{label}.{i}.chunk.list"), units, content)?);
            }
            let params = op::matvec_glu::Params {
                rows: segment.rows,
                groups: segment.groups,
                row0: segment.row0,
                outputs,
                square_vectors: norm.square_vectors,
                inv_cols: norm.inv_cols,
                eps: norm.eps,
                has_bias,
                bias_up,
                gelu,
                y_stride: vectors_of(width),
            };
            let bindings = op::matvec_glu::Bindings {
                w: segment.weight,
                x: Bind::Buffer(decode.x),
                squares: Bind::Buffer(decode.squares),
                list: self.list(by_output),
                bias,
                y: Bind::Buffer(decode.act),
            };
            self.emit_masked(Phase::Decode, &label, params, bindings, by_output);
            let params = op::matmul_glu::Params {
                rows: segment.rows,
                groups: segment.groups,
                row0: segment.row0,
                outputs,
                y_stride: vectors_of(width),
                has_bias,
                bias_up,
                gelu,
            };
            let bindings = op::matmul_glu::Bindings {
                w: segment.weight,
                batch: Bind::Buffer(prefill.batch),
                x: Bind::Buffer(prefill.x),
                list: self.list(by_block),
                bias,
                y: Bind::Buffer(prefill.act),
            };
            self.emit_masked(Phase::Prefill, &label, params, bindings, by_block);
        }
        // Prefill computes blocks of 4 neurons, and skips blocks without active ones. The neurons that are left out
        // are set to zero.
        let y = self.scratch.map(|scratch| scratch.act);
        self.zero_masked(&[Phase::Prefill], &name("neurons"), y, neurons, width)
    }

    /// Gate and up projections of different layouts: one product each, then their gated product.
    fn unfused(
        &mut self,
        name: &dyn Fn(&str) -> String,
        [gate, up]: [&Linear; 2],
        neurons: Option<MaskedUnits>,
        streams: &Streams,
    ) -> Result<()> {
        let vectors = vectors_of(gate.rows);
        let [decode, prefill] = self.scratch;
        let norm = self.decode_norm(streams);
        let to = [
            ("gate", gate, [decode.act, prefill.act]),
            ("up", up, [decode.up, prefill.up]),
        ];
        for (role, linear, y) in to {
            let label = name(role);
            let matrix = self.b.matrix(&label, &[linear.weight], Stacking::Rows)?;
            let bias = self.b.biases(format!("{label}.bias"), &[linear]);
            let from = Product { matrix, bias, row0: 0 };
            let mask = neurons.map(MaskUse::Rows);
            self.product(&label, from, [decode.x, prefill.x], norm, (y, vectors), mask)?;
        }
        self.glu(&Phase::BOTH, &name("glu"), vectors);
        let y = [decode.act, prefill.act];
        self.zero_masked(&Phase::BOTH, &name("neurons"), y, neurons, gate.rows)
    }

    /// `act = activation(act) * up`.
    pub fn glu(&mut self, phases: &[Phase], label: &str, vectors: u32) {
        let gelu = self.gelu();
        for &phase in phases {
            let scratch = self.scratch[phase as usize];
            let bindings = op::glu::Bindings {
                batch: Bind::Buffer(scratch.batch),
                up: Bind::Buffer(scratch.up),
                y: Bind::Buffer(scratch.act),
            };
            self.emit(phase, label, op::glu::Params { vectors, gelu }, bindings);
        }
    }

    /// 1 for gelu_tanh, 0 for silu.
    pub fn gelu(&self) -> u32 {
        u32::from(self.model.activation == Activation::GeluTanh)
    }
}

//! Gated feed-forward networks as steps: gate and up in one step if they have the same layout, down with the residual.

use super::context::{DECODE, Half, Lowering, PREFILL, Phase, SegmentShape, Streams, vectors_of};
use super::masking::{MaskUse, MaskedUnits};
use crate::error::{Result, bail};
use crate::graph::Stacking;
use crate::lm::masks::{Axis, Content, MaskAxis};
use crate::model::{Activation, Ffn, GateUp, Linear};
use crate::op::{self, Bind, BufferId, MatrixId};

impl Lowering<'_> {
    /// h += ffn(norm(h)).
    pub fn dense(&mut self, half: &Half, ffn: &Ffn) -> Result<Streams> {
        let path = half.path;
        let neurons = self.masked_units(path, MaskAxis::Neurons, ffn.down.cols, 1);
        self.prefill_norm(&half.streams, half.norm, &half.name("ffn.norm"));
        let x = self.gate_up_inputs(half, &ffn.gate_up)?;
        match &ffn.gate_up {
            GateUp::Split(gate, up) if self.b.is_unfused(ffn)? => {
                self.unfused(half, x, [gate, up], neurons)?;
            }
            GateUp::Split(gate, up) => {
                let tensors = [gate.weight, up.weight];
                let matrix = self.b.matrix(&half.name("ffn.gate_up"), &tensors, Stacking::Pair)?;
                let bias = self.pair_bias(half.name("ffn.gate_up.bias"), ffn.down.cols, [gate, up]);
                self.fused(half, x, (matrix, bias), ffn.down.cols, neurons)?;
            }
            GateUp::Fused(both) => {
                if both.bias.is_some() {
                    bail!(
                        UnsupportedModel,
                        "{path}: a fused gate and up projection has a bias, expected none"
                    );
                }
                let matrix = self
                    .b
                    .matrix(&half.name("ffn.gate_up"), &[both.weight; 2], Stacking::Halves)?;
                self.fused(half, x, (matrix, None), ffn.down.cols, neurons)?;
            }
        }
        let x = self.scratch.map(|scratch| scratch.act);
        self.residual(&half.name("ffn.down"), &ffn.down, x, half, neurons.map(MaskUse::Cols))
    }

    /// The inputs of gate and up projections.
    fn gate_up_inputs(&mut self, half: &Half, gate_up: &GateUp) -> Result<[BufferId; 2]> {
        let (gate, up) = match gate_up {
            GateUp::Split(gate, up) => (gate, up),
            GateUp::Fused(both) => (both, both),
        };
        if self.is_rotated(gate.weight) != self.is_rotated(up.weight) {
            bail!(
                UnsupportedModel,
                "{}: of gate and up projections only one is rotated",
                half.path
            );
        }
        let x = self.scratch.map(|scratch| scratch.x);
        self.inputs(&half.name("ffn.gate_up"), (gate.weight, gate.cols), x)
    }

    /// The biases of gate and up. Those of up begin at a whole vector.
    fn pair_bias(&mut self, label: String, width: usize, [gate, up]: [&Linear; 2]) -> Option<Bind> {
        if gate.bias.is_none() && up.bias.is_none() {
            return None;
        }
        let padding = width.next_multiple_of(4) - width;
        let pieces = [(gate.bias, width), (None, padding), (up.bias, width)];
        Some(Bind::Vector(self.b.vector(label, &pieces, 0.0)))
    }

    /// Gate and up projections in one matrix.
    fn fused(
        &mut self,
        half: &Half,
        x: [BufferId; 2],
        (matrix, bias): (MatrixId, Option<Bind>),
        width: usize,
        neurons: Option<MaskedUnits>,
    ) -> Result<()> {
        let label = half.name("ffn.gate_up");
        let bias_up = width.next_multiple_of(4) as u32;
        let norm = self.decode_norm(&half.streams);
        let decode = self.scratch[DECODE];
        for (i, mut segment) in self.segments(matrix).into_iter().enumerate() {
            let outputs = segment.second_row;
            let mut by_output = None;
            if let Some(units) = &neurons {
                let axis = units.part(segment.row0, outputs);
                by_output = Some(self.mask_list(format!("{label}.{i}.list"), units, Content::Outputs(axis))?);
                let content = Content::Listed([axis, Axis::whole(segment.groups * 32)]);
                segment.masked = Some(self.mask_list(format!("{label}.{i}.chunk.list"), units, content)?);
            }
            let params = op::matvec_glu::Params {
                rows: segment.rows,
                groups: segment.groups,
                row0: segment.row0,
                outputs,
                square_vectors: norm.square_vectors,
                inv_cols: norm.inv_cols,
                eps: norm.eps,
                has_bias: u32::from(bias.is_some()),
                bias_up,
                gelu: self.gelu(),
                y_stride: vectors_of(width),
            };
            let bindings = op::matvec_glu::Bindings {
                w: segment.weight,
                x: Bind::Buffer(x[DECODE]),
                squares: Bind::Buffer(decode.squares),
                list: self.list(by_output),
                bias: self.bias(bias),
                y: Bind::Buffer(decode.act),
            };
            self.emit_masked(Phase::Decode, &label, params, bindings, by_output);
            self.matmul_glu(&label, x[PREFILL], segment, (outputs, width), (bias, bias_up));
        }
        // Prefill computes blocks of 4 neurons, and skips blocks without active ones. The neurons that are left out
        // are set to zero.
        let y = self.scratch.map(|scratch| scratch.act);
        self.zero_masked(&[Phase::Prefill], &half.name("ffn.neurons"), y, neurons, width)
    }

    /// `act = activation(gate(x)) * up(x)` for a chunk. `outputs`: those of the segment, which has the rows of both, and
    /// of all segments. `bias_up`: where the bias of up begins.
    pub fn matmul_glu(
        &mut self,
        label: &str,
        x: BufferId,
        segment: SegmentShape,
        (outputs, width): (u32, usize),
        (bias, bias_up): (Option<Bind>, u32),
    ) {
        let prefill = self.scratch[PREFILL];
        let params = op::matmul_glu::Params {
            rows: segment.rows,
            groups: segment.groups,
            row0: segment.row0,
            outputs,
            y_stride: vectors_of(width),
            has_bias: u32::from(bias.is_some()),
            bias_up,
            gelu: self.gelu(),
        };
        let bindings = op::matmul_glu::Bindings {
            w: segment.weight,
            batch: Bind::Buffer(prefill.batch),
            x: Bind::Buffer(x),
            list: self.list(segment.masked),
            bias: self.bias(bias),
            y: Bind::Buffer(prefill.act),
        };
        self.emit_masked(Phase::Prefill, label, params, bindings, segment.masked);
    }

    /// Gate and up projections of different layouts: one product each, then their gated product.
    fn unfused(
        &mut self,
        half: &Half,
        x: [BufferId; 2],
        [gate, up]: [&Linear; 2],
        neurons: Option<MaskedUnits>,
    ) -> Result<()> {
        let vectors = vectors_of(gate.rows);
        let [decode, prefill] = self.scratch;
        let norm = self.decode_norm(&half.streams);
        let to = [
            ("ffn.gate", gate, [decode.act, prefill.act]),
            ("ffn.up", up, [decode.up, prefill.up]),
        ];
        for (role, linear, y) in to {
            let label = half.name(role);
            let from = self.linear(&label, linear, neurons.map(MaskUse::Rows))?;
            self.product(&label, &from, x, norm, (y, vectors));
        }
        self.glu(&Phase::BOTH, &half.name("ffn.glu"), vectors);
        let y = [decode.act, prefill.act];
        self.zero_masked(&Phase::BOTH, &half.name("ffn.neurons"), y, neurons, gate.rows)
    }

    /// `act = activation(act) * up`.
    pub fn glu(&mut self, phases: &[Phase], label: &str, vectors: u32) {
        let gelu = self.gelu();
        for &phase in phases {
            let scratch = self.scratch[phase as usize];
            let [batch, up, y] = [scratch.batch, scratch.up, scratch.act].map(Bind::Buffer);
            let bindings = op::glu::Bindings { batch, up, y };
            self.emit(phase, label, op::glu::Params { vectors, gelu }, bindings);
        }
    }

    /// 1 for gelu_tanh, 0 for silu.
    pub fn gelu(&self) -> u32 {
        u32::from(self.model.activation == Activation::GeluTanh)
    }
}

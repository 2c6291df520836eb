//! Gated DeltaNet layers as steps: projections, the recurrence, output.

use super::context::{LayerPath, Lowering, Phase, Streams, vectors_of};
use crate::error::{Result, bail};
use crate::graph::{Fill, Piece};
use crate::model::{DeltaGates, DeltaInputs, DeltaNet, Layer, Linear};
use crate::op::{self, Bind, VectorId};

/// Added to the squares of q and k before the root that divides them. Networks are trained with this value.
const LENGTH_EPS: f32 = 1e-6;

/// Offsets of the projections of one token, in elements. Strides are distances from one key head to the next.
struct Layout {
    key_stride: usize,
    k_at: usize,
    v_at: usize,
    z_at: usize,
    value_stride: usize,
    b_at: usize,
    a_at: usize,
    gate_stride: usize,
}

impl Layout {
    fn of(net: &DeltaNet) -> Layout {
        let group = net.value_heads / net.key_heads;
        let (keys, values) = (net.key_heads * net.key_dim, net.value_heads * net.value_dim);
        let [key_stride, k_at, v_at, z_at, value_stride] = match net.inputs {
            DeltaInputs::Split { .. } => [net.key_dim, keys, 2 * keys, net.channels(), group * net.value_dim],
            DeltaInputs::Fused(_) => {
                let stride = 2 * net.key_dim + 2 * group * net.value_dim;
                let v_at = 2 * net.key_dim;
                [stride, net.key_dim, v_at, v_at + group * net.value_dim, stride]
            }
        };
        let b_at = net.channels() + values;
        let [a_at, gate_stride] = match net.gates {
            DeltaGates::Split(_) => [b_at + net.value_heads, group],
            DeltaGates::Fused(_) => [b_at + group, 2 * group],
        };
        Layout {
            key_stride,
            k_at,
            v_at,
            z_at,
            value_stride,
            b_at,
            a_at,
            gate_stride,
        }
    }
}

/// The projections, in the order of their outputs.
fn siblings(net: &DeltaNet) -> Vec<&Linear> {
    let mut all = match &net.inputs {
        DeltaInputs::Split { qkv, z } => vec![qkv, z],
        DeltaInputs::Fused(qkvz) => vec![qkvz],
    };
    match &net.gates {
        DeltaGates::Split([b, a]) => all.extend([b, a]),
        DeltaGates::Fused(ba) => all.push(ba),
    }
    all
}

/// Elements of one token's projections.
pub(super) fn projected(net: &DeltaNet) -> usize {
    siblings(net).iter().map(|linear| linear.rows).sum()
}

impl Lowering<'_> {
    /// h += delta_net(norm(h)).
    pub fn delta_net(
        &mut self,
        path: LayerPath,
        layer: &Layer,
        net: &DeltaNet,
        [norm, next_norm]: [VectorId; 2],
        streams: Streams,
    ) -> Result<Streams> {
        let name = |role: &str| format!("{path}.gdn.{role}");
        if net.key_heads == 0 || !net.value_heads.is_multiple_of(net.key_heads) {
            bail!(
                UnsupportedModel,
                "{path}: {} value heads, expected a multiple of {} key heads",
                net.value_heads,
                net.key_heads
            );
        }
        self.prefill_norm(&streams, norm, &name("norm"));
        let stride = self.projections(&name("proj"), &siblings(net), &streams, None)?;
        self.recurrence(&name, net, stride)?;
        let x = self.scratch.map(|scratch| scratch.attn);
        self.residual(
            &name("out"),
            &net.o,
            x,
            (layer.attn_post_norm, next_norm),
            streams,
            None,
        )
    }

    fn recurrence(&mut self, name: &dyn Fn(&str) -> String, net: &DeltaNet, stride: u32) -> Result<()> {
        let states = self.b.kept_states();
        // A run has at most as many tokens as there are states, and any of them may be the last that is accepted.
        let ring_len = net.taps as u64 + u64::from(states);
        let head_inputs = (2 * net.key_dim + net.value_dim) as u64;
        let heads = net.value_heads as u64;
        let state_bytes = u64::from(states) * heads * (net.key_dim * net.value_dim) as u64 * 4;
        let ring_bytes = heads * ring_len * head_inputs * 4;
        let ring = self.b.buffer(name("ring"), ring_bytes, Fill::Zero)?;
        let state = self.b.buffer(name("state"), state_bytes, Fill::Zero)?;

        let whole = |tensor, len| Piece {
            tensor: Some(tensor),
            len,
        };
        let conv = vec![whole(net.conv, net.channels() * net.taps)];
        let conv = self.b.vector(name("conv"), conv, 0.0);
        let gates = vec![whole(net.a_log, net.value_heads), whole(net.dt_bias, net.value_heads)];
        let gates = self.b.vector(name("gates"), gates, 0.0);
        // This norm multiplies by its weight, also in networks whose other norms multiply by 1 + weight.
        let norm = self
            .b
            .vector(name("out_norm"), vec![whole(net.norm, net.value_dim)], 0.0);
        let layout = Layout::of(net);
        let vectors = |elements: usize| (elements / 4) as u32;
        let params = op::delta_net::Params {
            value_heads: net.value_heads as u32,
            heads_per_key: (net.value_heads / net.key_heads) as u32,
            key_vectors: vectors(net.key_dim),
            value_vectors: vectors(net.value_dim),
            taps: net.taps as u32,
            ring: net.taps as u32 + states,
            states,
            stride,
            key_stride: vectors(layout.key_stride),
            k_at: vectors(layout.k_at),
            v_at: vectors(layout.v_at),
            z_at: vectors(layout.z_at),
            value_stride: vectors(layout.value_stride),
            b_at: layout.b_at as u32,
            a_at: layout.a_at as u32,
            gate_stride: layout.gate_stride as u32,
            q_scale: (1.0 / (net.key_dim as f64).sqrt()) as f32,
            length_eps: LENGTH_EPS,
            eps: self.model.eps,
            y_stride: vectors_of(net.value_heads * net.value_dim),
            y_tiled: u32::from(net.o_tiled),
        };
        for phase in Phase::BOTH {
            let scratch = self.scratch[phase as usize];
            let bindings = op::delta_net::Bindings {
                batch: Bind::Buffer(scratch.batch),
                proj: Bind::Buffer(scratch.qkv),
                conv: Bind::Vector(conv),
                gates: Bind::Vector(gates),
                norm: Bind::Vector(norm),
                ring: Bind::Buffer(ring),
                state: Bind::Buffer(state),
                y: Bind::Buffer(scratch.attn),
            };
            self.emit(phase, &name("step"), params, bindings);
        }
        Ok(())
    }
}

//! Gated DeltaNet layers as steps: projections, the recurrence, output.

use super::context::{Half, Lowering, Phase, Streams, vectors_of};
use crate::error::{Result, bail};
use crate::graph::Fill;
use crate::model::{DeltaGates, DeltaInputs, DeltaNet};
use crate::op::{self, Bind};

/// Added to the squares of q and k before the root that divides them. Networks are trained with this value.
const LENGTH_EPS: f32 = 1e-6;

/// The parameters that locate the projections of one token.
fn locations(net: &DeltaNet) -> op::delta_net::Params {
    let group = net.value_heads / net.key_heads;
    let (keys, values) = (net.key_heads * net.key_dim, net.value_heads * net.value_dim);
    let [key_stride, k_at, v_at, z_at, value_stride] = match net.inputs {
        DeltaInputs::Split { .. } => [net.key_dim, keys, 2 * keys, net.channels(), group * net.value_dim],
        DeltaInputs::Fused(_) => {
            let v_at = 2 * net.key_dim;
            let z_at = v_at + group * net.value_dim;
            let stride = z_at + group * net.value_dim;
            [stride, net.key_dim, v_at, z_at, stride]
        }
    }
    .map(|elements| (elements / 4) as u32);
    let b_at = net.channels() + values;
    let [a_at, gate_stride] = match net.gates {
        DeltaGates::Split(_) => [b_at + net.value_heads, group],
        DeltaGates::Fused(_) => [b_at + group, 2 * group],
    };
    op::delta_net::Params {
        key_stride,
        k_at,
        v_at,
        z_at,
        value_stride,
        b_at: b_at as u32,
        a_at: a_at as u32,
        gate_stride: gate_stride as u32,
        ..op::delta_net::Params::default()
    }
}

/// Elements of one token's projections.
pub(super) fn projected(net: &DeltaNet) -> usize {
    net.linears().iter().map(|linear| linear.rows).sum()
}

impl Lowering<'_> {
    /// h += delta_net(norm(h)).
    pub fn delta_net(&mut self, half: &Half, net: &DeltaNet) -> Result<Streams> {
        let path = half.path;
        if net.key_heads == 0 || !net.value_heads.is_multiple_of(net.key_heads) {
            bail!(
                UnsupportedModel,
                "{path}: {} value heads, expected a multiple of {} key heads",
                net.value_heads,
                net.key_heads
            );
        }
        self.prefill_norm(&half.streams, half.norm, &half.name("gdn.norm"));
        let stride = self.projections(&half.name("gdn.proj"), &net.linears(), &half.streams, None)?;
        self.recurrence(half, net, stride)?;
        let x = self.scratch.map(|scratch| scratch.attn);
        self.residual(&half.name("gdn.out"), &net.o, x, half, None)
    }

    fn recurrence(&mut self, half: &Half, net: &DeltaNet, stride: u32) -> Result<()> {
        let states = self.b.kept_states();
        // A run has at most as many tokens as there are states, and any of them may be the last that is accepted.
        let ring_len = net.taps as u64 + u64::from(states);
        let head_inputs = (2 * net.key_dim + net.value_dim) as u64;
        let heads = net.value_heads as u64;
        let state_bytes = u64::from(states) * heads * (net.key_dim * net.value_dim) as u64 * 4;
        let ring_bytes = heads * ring_len * head_inputs * 4;
        let ring = self.b.buffer(half.name("gdn.ring"), ring_bytes, Fill::Zero)?;
        let state = self.b.buffer(half.name("gdn.state"), state_bytes, Fill::Zero)?;

        let conv = [(Some(net.conv), net.channels() * net.taps)];
        let conv = self.b.vector(half.name("gdn.conv"), &conv, 0.0);
        let gates = [net.a_log, net.dt_bias].map(|tensor| (Some(tensor), net.value_heads));
        let gates = self.b.vector(half.name("gdn.gates"), &gates, 0.0);
        // This norm multiplies by its weight, also in networks whose other norms multiply by 1 + weight.
        let norm = [(Some(net.norm), net.value_dim)];
        let norm = self.b.vector(half.name("gdn.out_norm"), &norm, 0.0);
        let params = op::delta_net::Params {
            value_heads: net.value_heads as u32,
            heads_per_key: (net.value_heads / net.key_heads) as u32,
            key_vectors: (net.key_dim / 4) as u32,
            value_vectors: (net.value_dim / 4) as u32,
            taps: net.taps as u32,
            ring: net.taps as u32 + states,
            states,
            stride,
            q_scale: (1.0 / (net.key_dim as f64).sqrt()) as f32,
            length_eps: LENGTH_EPS,
            eps: self.model.eps,
            y_stride: vectors_of(net.value_heads * net.value_dim),
            y_tiled: u32::from(net.o_tiled),
            ..locations(net)
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
            self.emit(phase, &half.name("gdn.step"), params, bindings);
        }
        Ok(())
    }
}

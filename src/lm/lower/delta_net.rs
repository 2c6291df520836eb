//! Gated DeltaNet layers as steps: projections, the recurrence, output.

use super::context::{Half, Lowering, Phase, Streams, vectors_of};
use crate::error::{Result, bail};
use crate::graph::Fill;
use crate::model::{DeltaNet, DeltaProjections, Linear};
use crate::op::{self, Bind};

/// Added to the squares of q and k before the root that divides them. Networks are trained with this value.
const LENGTH_EPS: f32 = 1e-6;

/// The parameters that locate the projections of one token.
fn locations(net: &DeltaNet) -> op::delta_net::Params {
    let group = net.value_heads / net.key_heads;
    let (keys, values) = (net.key_heads * net.key_dim, net.value_heads * net.value_dim);
    let vectors = |elements: usize| (elements / 4) as u32;
    match net.projections {
        DeltaProjections::Split { .. } => op::delta_net::Params {
            key_stride: vectors(net.key_dim),
            k_at: vectors(keys),
            v_at: vectors(2 * keys),
            z_at: vectors(net.channels()),
            value_stride: vectors(group * net.value_dim),
            b_at: (net.channels() + values) as u32,
            a_at: (net.channels() + values + net.value_heads) as u32,
            gate_stride: group as u32,
            ..op::delta_net::Params::default()
        },
        DeltaProjections::Fused { .. } => {
            let stride = 2 * net.key_dim + 2 * group * net.value_dim;
            let gates = net.key_heads * stride;
            op::delta_net::Params {
                key_stride: vectors(stride),
                k_at: vectors(net.key_dim),
                v_at: vectors(2 * net.key_dim),
                z_at: vectors(2 * net.key_dim + group * net.value_dim),
                value_stride: vectors(stride),
                b_at: gates as u32,
                a_at: (gates + group) as u32,
                gate_stride: 2 * group as u32,
                ..op::delta_net::Params::default()
            }
        }
    }
}

/// The projections, in the order of their outputs.
fn siblings(projections: &DeltaProjections) -> Vec<&Linear> {
    match projections {
        DeltaProjections::Split { qkv, z, b, a } => vec![qkv, z, b, a],
        DeltaProjections::Fused { qkvz, ba } => vec![qkvz, ba],
    }
}

/// Elements of one token's projections.
pub(super) fn projected(net: &DeltaNet) -> usize {
    siblings(&net.projections).iter().map(|linear| linear.rows).sum()
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
        let stride = self.projections(&half.name("gdn.proj"), &siblings(&net.projections), &half.streams, None)?;
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

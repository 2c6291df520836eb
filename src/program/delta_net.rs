//! Gated DeltaNet layers as steps: projections, the recurrence, output.

use super::place::Place;
use super::walk::{Mode, Walk};
use super::{Bind, Fill, Piece, VectorId};
use crate::error::{Result, bail};
use crate::kernel::{self, Op};
use crate::model::{DeltaNet, DeltaProjections, Layer, Linear};

/// Added to the squares of q and k before they are divided by their length, as the networks are trained.
const LENGTH_EPS: f32 = 1e-6;

/// Where the projections of one column lie, in elements; strides go from one key head to the next.
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
        match net.projections {
            DeltaProjections::Split { .. } => Layout {
                key_stride: net.key_dim,
                k_at: keys,
                v_at: 2 * keys,
                z_at: net.channels(),
                value_stride: group * net.value_dim,
                b_at: net.channels() + values,
                a_at: net.channels() + values + net.value_heads,
                gate_stride: group,
            },
            DeltaProjections::Fused { .. } => {
                let stride = 2 * net.key_dim + 2 * group * net.value_dim;
                let gates = net.key_heads * stride;
                Layout {
                    key_stride: stride,
                    k_at: net.key_dim,
                    v_at: 2 * net.key_dim,
                    z_at: 2 * net.key_dim + group * net.value_dim,
                    value_stride: stride,
                    b_at: gates,
                    a_at: gates + group,
                    gate_stride: 2 * group,
                }
            }
        }
    }
}

/// The maps whose outputs lie one behind the other.
fn siblings(projections: &DeltaProjections) -> Vec<&Linear> {
    match projections {
        DeltaProjections::Split { qkv, z, b, a } => vec![qkv, z, b, a],
        DeltaProjections::Fused { qkvz, ba } => vec![qkvz, ba],
    }
}

/// Elements of a column of projections.
pub(super) fn projected(net: &DeltaNet) -> usize {
    siblings(&net.projections).iter().map(|linear| linear.rows).sum()
}

impl Walk<'_> {
    /// Both modes of h += delta_net(norm(h)).
    pub(super) fn delta_net(
        &mut self,
        place: Place,
        layer: &Layer,
        net: &DeltaNet,
        [norm, next_norm]: [VectorId; 2],
    ) -> Result<()> {
        let name = |part: &str| format!("{place}.gdn.{part}");
        if net.key_heads == 0 || !net.value_heads.is_multiple_of(net.key_heads) {
            bail!(
                UnsupportedModel,
                "{place}: {} value heads for {} key heads",
                net.value_heads,
                net.key_heads
            );
        }
        let slots = self.b.kept_states();
        // After a run of as many columns as there are slots any of them may turn out to be the last.
        let ring = net.taps as u64 + u64::from(slots);
        let head_inputs = (2 * net.key_dim + net.value_dim) as u64;
        let heads = net.value_heads as u64;
        let state_bytes = u64::from(slots) * heads * (net.key_dim * net.value_dim) as u64 * 4;
        let ring = self
            .b
            .buffer(name("ring"), heads * ring * head_inputs * 4, Fill::Zero)?;
        let state = self.b.buffer(name("state"), state_bytes, Fill::Zero)?;

        self.norm(norm, &name("norm"));
        let stride = self.projections(&name("proj"), &siblings(&net.projections))?;

        let taken = |tensor, len| Piece {
            tensor: Some(tensor),
            len,
        };
        let conv = vec![taken(net.conv, net.channels() * net.taps)];
        let conv = self.b.vector(name("conv"), conv, 0.0);
        let gates = vec![taken(net.a_log, net.value_heads), taken(net.dt_bias, net.value_heads)];
        let gates = self.b.vector(name("gates"), gates, 0.0);
        // This norm multiplies by its weight whatever the others do.
        let out_norm = self
            .b
            .vector(name("out_norm"), vec![taken(net.norm, net.value_dim)], 0.0);
        let layout = Layout::of(net);
        let vectors = |elements: usize| (elements / 4) as u32;
        let op = Op::DeltaNet(kernel::DeltaNet {
            value_heads: net.value_heads as u32,
            group: (net.value_heads / net.key_heads) as u32,
            key_vectors: vectors(net.key_dim),
            value_vectors: vectors(net.value_dim),
            taps: net.taps as u32,
            ring: net.taps as u32 + slots,
            slots,
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
            y_stride: Self::vectors_of(net.value_heads * net.value_dim),
        });
        for (mode, scratch) in [(Mode::Decode, self.decode), (Mode::Prefill, self.prefill)] {
            let bindings = vec![
                Bind::Buffer(scratch.ctl),
                Bind::Buffer(scratch.qkv),
                Bind::Vector(conv),
                Bind::Vector(gates),
                Bind::Vector(out_norm),
                Bind::Buffer(ring),
                Bind::Buffer(state),
                Bind::Buffer(scratch.attn),
            ];
            self.push(mode, &name("step"), op, None, bindings);
        }
        let x = [self.decode.attn, self.prefill.attn];
        self.residual(&name("out"), &net.o, x, layer.attn_post_norm, next_norm)
    }
}

//! Rigs of the Gated DeltaNet recurrence. Rings and states hold numbers everywhere, so that a wrong slot shows.

use super::{CTL, Maker};
use crate::container::Tensors;
use crate::error::Result;
use crate::kernel::{self, Op};
use crate::parity::cases::DeltaNet;
use crate::program::Bind;
use std::sync::Arc;

impl Maker {
    pub(super) fn delta_net(&mut self, spec: &DeltaNet) -> Result<Arc<dyn Tensors>> {
        let DeltaNet {
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            taps,
            slots,
            fused,
        } = *spec;
        let group = value_heads / key_heads;
        let (keys, values) = (key_heads * key_dim, value_heads * value_dim);
        let (channels, all) = (2 * keys + values, 2 * keys + 2 * values);
        let runs = [(0, 1), (1, 1), (2, 5), (7, 1), (0, 17), (200, 1), (101, 64)];
        let most = 64;
        // One vector more than a column needs.
        let stride = (all + 2 * value_heads).div_ceil(4) + 1;
        let y_stride = values / 4 + 1;
        // As few positions as going back needs.
        let ring_positions = taps.max(taps + slots - 2);
        let op = kernel::DeltaNet {
            value_heads,
            group,
            key_vectors: key_dim / 4,
            value_vectors: value_dim / 4,
            taps,
            ring: ring_positions,
            slots,
            stride,
            key_stride: key_dim / 4,
            k_at: keys / 4,
            v_at: keys / 2,
            z_at: channels / 4,
            value_stride: group * value_dim / 4,
            b_at: all,
            a_at: all + value_heads,
            gate_stride: group,
            q_scale: 1.0 / (key_dim as f32).sqrt(),
            length_eps: 1e-2,
            eps: 1e-2,
            y_stride,
        };
        let together = (2 * key_dim + 2 * group * value_dim) / 4;
        let op = match fused {
            false => op,
            true => kernel::DeltaNet {
                key_stride: together,
                k_at: key_dim / 4,
                v_at: key_dim / 2,
                z_at: (2 * key_dim + group * value_dim) / 4,
                value_stride: together,
                a_at: all + group,
                gate_stride: 2 * group,
                ..op
            },
        };
        let proj = self.buffer("proj", (4 * stride * most) as usize);
        let conv = self.vector("conv", (channels * taps) as usize)?;
        let gates = self.vector("gates", (2 * value_heads) as usize)?;
        let norm = self.vector("norm", value_dim as usize)?;
        let ring_words = (value_heads * ring_positions * (2 * key_dim + value_dim)) as usize;
        let state_words = (slots * value_heads * key_dim * value_dim) as usize;
        let ring = self.buffer("ring", ring_words);
        let state = self.buffer("state", state_words);
        let y = self.buffer("y", (4 * y_stride * most) as usize);
        let [ctl, proj_bind] = [CTL, proj].map(Bind::Buffer);
        let written = [ring, state, y].map(Bind::Buffer);
        let bindings = [&[ctl, proj_bind, conv, gates, norm][..], &written].concat();
        self.step(Op::DeltaNet(op), bindings);
        for (pos, columns) in runs {
            let inputs = vec![
                (proj, self.random.words((4 * stride * columns) as usize, 3.0)),
                (ring, self.random.words(ring_words, 3.0)),
                (state, self.random.words(state_words, 1.0)),
            ];
            self.round(pos, columns, inputs);
        }
        self.tensors()
    }
}

//! The recurrence of Gated DeltaNet layers, column by column.

use super::{Bound, part};
use crate::error::{Result, bail};
use crate::kernel;
use cmf_kernels_ref::op::delta_net::{causal_conv, decay, gated_norm, scale_to_length, sigmoid, step};
use cmf_kernels_ref::op::glu::silu;

/// Sizes of one value head.
struct Shape {
    key: usize,
    value: usize,
    taps: usize,
    ring: usize,
    slots: usize,
    key_heads: usize,
    /// Inputs of q, k and v together.
    inputs: usize,
}

impl Bound<'_> {
    pub(super) fn delta_net(&mut self, p: &kernel::DeltaNet) -> Result<()> {
        let ctl = self.ctl(0)?;
        let shape = Shape {
            key: p.key_vectors as usize * 4,
            value: p.value_vectors as usize * 4,
            taps: p.taps as usize,
            ring: p.ring as usize,
            slots: p.slots as usize,
            key_heads: p.value_heads.checked_div(p.group).unwrap_or(0) as usize,
            inputs: p.key_vectors as usize * 8 + p.value_vectors as usize * 4,
        };
        if shape.slots == 0 || shape.key_heads * p.group as usize != p.value_heads as usize || shape.taps > shape.ring {
            bail!(
                Usage,
                "{} value heads in groups of {}, {} states, {} taps in a ring of {}",
                p.value_heads,
                p.group,
                p.slots,
                p.taps,
                p.ring
            );
        }
        for head in 0..p.value_heads as usize {
            let before = (ctl.pos as usize + shape.slots - 1) % shape.slots;
            let size = shape.key * shape.value;
            let at = |slot: usize| (slot * p.value_heads as usize + head) * size;
            let mut state: Vec<f64> = match ctl.pos {
                0 => vec![0.0; size],
                _ => {
                    let state = part(self.floats(6)?, at(before), size, "state")?;
                    state.iter().map(|&v| f64::from(v)).collect()
                }
            };
            for c in 0..ctl.columns as usize {
                let pos = ctl.pos as usize + c;
                let y = self.delta_column(p, &shape, head, pos, c, &mut state)?;
                // A state is stored after every position, whatever the chunks.
                state.iter_mut().for_each(|v| *v = f64::from(*v as f32));
                self.store(7, c * p.y_stride as usize * 4 + head * shape.value, &y)?;
                if c + shape.slots >= ctl.columns as usize {
                    self.store(6, at(pos % shape.slots), &state)?;
                }
            }
        }
        Ok(())
    }

    /// One head at one position: its output; keeps the position's inputs in the ring.
    fn delta_column(
        &mut self,
        p: &kernel::DeltaNet,
        shape: &Shape,
        head: usize,
        pos: usize,
        c: usize,
        state: &mut [f64],
    ) -> Result<Vec<f64>> {
        let Shape { key, value, taps, .. } = *shape;
        let (key_head, within) = (head / p.group as usize, head % p.group as usize);
        let key_at = key_head * p.key_stride as usize * 4;
        let value_at = key_head * p.value_stride as usize * 4 + within * value;
        // For q, k and v: where the inputs are in a column, the first channel, and the elements.
        let keys = shape.key_heads * key;
        let mixed = [
            (key_at, key_head * key, key),
            (p.k_at as usize * 4 + key_at, keys + key_head * key, key),
            (p.v_at as usize * 4 + value_at, 2 * keys + head * value, value),
        ];
        let stride = p.stride as usize * 4;
        let ring = |pos: usize| (head * shape.ring + pos % shape.ring) * shape.inputs;
        let mut heads: [Vec<f64>; 3] = Default::default();
        let mut inputs = Vec::with_capacity(shape.inputs);
        for (out, &(from, channel, len)) in heads.iter_mut().zip(&mixed) {
            for e in 0..len {
                let lagged = |lag: usize| match (lag <= c, lag <= pos) {
                    (true, _) => Ok(part(self.floats(1)?, (c - lag) * stride + from + e, 1, "proj")?[0]),
                    (false, true) => Ok(part(self.floats(5)?, ring(pos - lag) + inputs.len(), 1, "ring")?[0]),
                    (false, false) => Ok(0.0),
                };
                let newest_first = (0..taps).map(lagged).collect::<Result<Vec<f32>>>()?;
                let weights = part(self.floats(2)?, (channel + e) * taps, taps, "conv")?;
                out.push(silu(causal_conv(&newest_first, weights)));
                inputs.push(f64::from(newest_first.first().copied().unwrap_or(0.0)));
            }
        }
        self.store(5, ring(pos), &inputs)?;
        let [mut q, mut k, v] = heads;
        scale_to_length(&mut q, f64::from(p.q_scale), f64::from(p.length_eps));
        scale_to_length(&mut k, 1.0, f64::from(p.length_eps));
        let one = |i: usize, at: usize, what: &str| Ok(f64::from(part(self.floats(i)?, at, 1, what)?[0]));
        let gate = c * stride + key_head * p.gate_stride as usize + within;
        let (b, a) = (
            one(1, gate + p.b_at as usize, "b")?,
            one(1, gate + p.a_at as usize, "a")?,
        );
        let a_log = one(3, head, "a_log")?;
        let dt_bias = one(3, p.value_heads as usize + head, "dt_bias")?;
        let mut o = vec![0.0; value];
        step(state, [&q, &k, &v], decay(a, dt_bias, a_log), sigmoid(b), &mut o);
        let z = part(self.floats(1)?, c * stride + p.z_at as usize * 4 + value_at, value, "z")?;
        let mut y = vec![0.0; value];
        gated_norm(
            &o,
            part(self.floats(4)?, 0, value, "norm")?,
            z,
            f64::from(p.eps),
            &mut y,
        );
        Ok(y)
    }
}

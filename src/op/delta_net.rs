//! The recurrence of Gated DeltaNet layers, token by token.

use super::define::*;
use super::tokens::Token;
use cmf_kernels_ref::op::delta_net::{causal_conv, decay, gated_norm, scale_to_length, sigmoid, step};
use cmf_kernels_ref::op::glu::silu;

operator! {
    delta_net
    params {
        value_heads: u32 = "Value heads.",
        heads_per_key: u32 = "Consecutive value heads that share a key head.",
        key_vectors: u32 = "Vectors of 4 in a key head, at most 64.",
        value_vectors: u32 = "Vectors of 4 in a value head, at most 64.",
        taps: u32 = "Positions that the convolution covers.",
        ring: u32 = "Positions whose inputs `ring` keeps.",
        states: u32 = "Recurrent states that `state` keeps for each slot.",
        stride: u32 = "Vectors of 4 from one token's projections to the next.",
        key_stride: u32 = "Vectors from the q of one key head to that of the next; k likewise.",
        k_at: u32 = "Vector at which the k of the first key head begins.",
        v_at: u32 = "Vector at which the v of the first value head begins.",
        z_at: u32 = "Vector at which the z of the first value head begins.",
        value_stride: u32 =
            "Vectors from the v of a key head's value heads to the v of the next key head's; z likewise.",
        b_at: u32 = "Element at which the b of the first value head is.",
        a_at: u32 = "Element at which the a of the first value head is.",
        gate_stride: u32 =
            "Elements from the b of a key head's value heads to the b of the next key head's; a likewise.",
        q_scale: f32 = "Factor of q after it is divided by its length.",
        length_eps: f32 = "Added to the squares of q and k before the root.",
        eps: f32 = "Added to the mean of squares of a head's output.",
        y_stride: u32,
        y_tiled: u32 =
            "1: the outputs are in tiled order, those of the first value head of every key head first; 0: in order.",
    }
    bindings {
        read batch: Batch, proj: array<vec4<f32>>, conv: array<f32>, gates: array<f32>, norm: array<vec4<f32>>;
        write ring: array<vec4<f32>>, state: array<vec4<f32>>, y: array<vec4<f32>>;
    }
    threads Some(256),
    grid |p| Grid::Workgroups(p.value_heads, 0),
    tolerance |_| Tolerance::Exponential,
}

/// Sizes of one value head.
struct Shape {
    key: usize,
    value: usize,
    key_heads: usize,
    value_heads: usize,
    /// Inputs of q, k and v together.
    inputs: usize,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let shape = Shape {
        key: p.key_vectors as usize * 4,
        value: p.value_vectors as usize * 4,
        key_heads: p.value_heads.checked_div(p.heads_per_key).unwrap_or(0) as usize,
        value_heads: p.value_heads as usize,
        inputs: p.key_vectors as usize * 8 + p.value_vectors as usize * 4,
    };
    let paired = shape.key_heads * p.heads_per_key as usize == shape.value_heads;
    if p.states == 0 || !paired || p.taps > p.ring {
        bail!(
            Internal,
            "{} value heads, expected a multiple of {}; {} states, expected at least 1; {} taps, expected at most {}",
            p.value_heads,
            p.heads_per_key,
            p.states,
            p.taps,
            p.ring
        );
    }
    let tokens = o.tokens("batch")?;
    let size = shape.key * shape.value;
    for head in 0..shape.value_heads {
        for (t, token) in tokens.iter().enumerate() {
            let state_at = |position: u32| {
                let state = (token.slot * p.states + position % p.states) as usize;
                (state * shape.value_heads + head) * size
            };
            let mut state: Vec<f64> = match token.position {
                0 => vec![0.0; size],
                position => o.values("state", state_at(position - 1), size)?,
            };
            let y = p.token(o, &shape, head, &tokens, t, &mut state)?;
            let (key_head, within) = (head / p.heads_per_key as usize, head % p.heads_per_key as usize);
            let place = match p.y_tiled {
                0 => head,
                _ => within * shape.key_heads + key_head,
            };
            o.store("y", t * p.y_stride as usize * 4 + place * shape.value, &y)?;
            o.store("state", state_at(token.position), &state)?;
        }
    }
    Ok(())
}

/// How many tokens before number `t` of a batch are its direct predecessors in the sequence.
fn predecessors(tokens: &[Token], t: usize) -> usize {
    let is_next = |pair: &&[Token]| pair[0].slot == pair[1].slot && pair[0].position + 1 == pair[1].position;
    tokens[..=t].windows(2).rev().take_while(is_next).count()
}

impl Params {
    /// The output of one head for one token; keeps the token's inputs in the ring.
    fn token(
        &self,
        o: &mut Operands,
        shape: &Shape,
        head: usize,
        tokens: &[Token],
        t: usize,
        state: &mut [f64],
    ) -> Result<Vec<f64>> {
        let (position, slot) = (tokens[t].position as usize, tokens[t].slot as usize);
        let (taps, before) = (self.taps as usize, predecessors(tokens, t));
        let Shape { key, value, .. } = *shape;
        let (key_head, within) = (head / self.heads_per_key as usize, head % self.heads_per_key as usize);
        let key_at = key_head * self.key_stride as usize * 4;
        let value_at = key_head * self.value_stride as usize * 4 + within * value;
        // For q, k and v: the first element in a token's projections, the first channel, and the number of elements.
        let keys = shape.key_heads * key;
        let mixed = [
            (key_at, key_head * key, key),
            (self.k_at as usize * 4 + key_at, keys + key_head * key, key),
            (self.v_at as usize * 4 + value_at, 2 * keys + head * value, value),
        ];
        let stride = self.stride as usize * 4;
        let ring = |position: usize| {
            let entry = (slot * shape.value_heads + head) * self.ring as usize + position % self.ring as usize;
            entry * shape.inputs
        };
        let mut heads: [Vec<f64>; 3] = Default::default();
        let mut inputs = Vec::with_capacity(shape.inputs);
        for (out, &(from, channel, len)) in heads.iter_mut().zip(&mixed) {
            for e in 0..len {
                let lagged = |lag: usize| match (lag <= before, lag <= position) {
                    (true, _) => Ok(o.floats("proj", (t - lag) * stride + from + e, 1)?[0]),
                    (false, true) => Ok(o.floats("ring", ring(position - lag) + inputs.len(), 1)?[0]),
                    (false, false) => Ok(0.0),
                };
                let newest_first = (0..taps).map(lagged).collect::<Result<Vec<f32>>>()?;
                let weights = o.floats("conv", (channel + e) * taps, taps)?;
                out.push(silu(causal_conv(&newest_first, weights)));
                inputs.push(f64::from(newest_first.first().copied().unwrap_or(0.0)));
            }
        }
        o.store("ring", ring(position), &inputs)?;
        let [mut q, mut k, v] = heads;
        scale_to_length(&mut q, f64::from(self.q_scale), f64::from(self.length_eps));
        scale_to_length(&mut k, 1.0, f64::from(self.length_eps));
        let one = |name: &str, at: usize| Ok(o.values(name, at, 1)?[0]);
        let gate = t * stride + key_head * self.gate_stride as usize + within;
        let b = one("proj", gate + self.b_at as usize)?;
        let a = one("proj", gate + self.a_at as usize)?;
        let (a_log, dt_bias) = (one("gates", head)?, one("gates", shape.value_heads + head)?);
        let mut out = vec![0.0; value];
        step(state, [&q, &k, &v], decay(a, dt_bias, a_log), sigmoid(b), &mut out);
        let z = o.floats("proj", t * stride + self.z_at as usize * 4 + value_at, value)?;
        let norm = o.floats("norm", 0, value)?;
        let mut y = vec![0.0; value];
        gated_norm(&out, norm, z, f64::from(self.eps), &mut y);
        Ok(y)
    }
}

//! Cases of `delta_net`. Rings and states hold numbers everywhere, so that a step that reads the wrong one differs.

use crate::error::Result;
use crate::op::{Token, delta_net};
use crate::parity::case::{Table, flags};
use crate::parity::maker::{MOST_TOKENS, Maker, sequences, tokens_at};

/// Key heads, value heads, elements of both, taps of the convolution, recurrent states that are kept for each sequence.
type Dims = [u32; 6];

pub fn add(table: &mut Table) {
    let shapes: [Dims; 7] = [
        [2, 4, 32, 32, 4, 1],
        [1, 1, 4, 4, 2, 1],
        [2, 6, 20, 12, 4, 2],
        [1, 3, 256, 64, 3, 4],
        [1, 2, 8, 256, 1, 3],
        [2, 2, 128, 128, 4, 1],
        [1, 1, 12, 36, 16, 5],
    ];
    for dims in shapes {
        let [keys, values, key_dim, value_dim, taps, states] = dims;
        let name = format!("delta_net {keys}/{values} heads of {key_dim}x{value_dim} taps {taps} states {states}");
        for fused in [false, true] {
            for slots in [1, 2] {
                let flags = flags([(fused, " fused"), (slots == 2, " two slots")]);
                table.add(name.clone() + &flags, move |maker| build(maker, dims, fused, slots));
            }
        }
    }
}

/// Two sequences in turns, of which one begins, one goes back, and one skips positions.
fn two_slots() -> Vec<Vec<Token>> {
    vec![
        tokens_at(&[(1, 9)]),
        tokens_at(&[(0, 3), (1, 0), (0, 4), (1, 1), (0, 5), (0, 6), (1, 2), (1, 3)]),
        tokens_at(&[(1, 20), (1, 21), (0, 100), (1, 7), (1, 8), (0, 101), (0, 200), (1, 9)]),
    ]
}

/// `fused`: q, k, v, z of a key head are next to each other. Outputs are tiled then, so that both orders occur.
fn params([key_heads, value_heads, key_dim, value_dim, taps, states]: Dims, fused: bool) -> delta_net::Params {
    let heads_per_key = value_heads / key_heads;
    let (keys, values) = (key_heads * key_dim, value_heads * value_dim);
    let (channels, all) = (2 * keys + values, 2 * keys + 2 * values);
    let params = delta_net::Params {
        value_heads,
        heads_per_key,
        key_vectors: key_dim / 4,
        value_vectors: value_dim / 4,
        taps,
        // As few positions as going back needs.
        ring: taps.max(taps + states - 2),
        states,
        // One vector more than a token needs, here and in `y_stride`.
        stride: (all + 2 * value_heads).div_ceil(4) + 1,
        key_stride: key_dim / 4,
        k_at: keys / 4,
        v_at: keys / 2,
        z_at: channels / 4,
        value_stride: heads_per_key * value_dim / 4,
        b_at: all,
        a_at: all + value_heads,
        gate_stride: heads_per_key,
        q_scale: 1.0 / (key_dim as f32).sqrt(),
        length_eps: 1e-2,
        eps: 1e-2,
        y_stride: values / 4 + 1,
        y_tiled: u32::from(fused),
    };
    if !fused {
        return params;
    }
    let together = (2 * key_dim + 2 * heads_per_key * value_dim) / 4;
    delta_net::Params {
        key_stride: together,
        k_at: key_dim / 4,
        v_at: key_dim / 2,
        z_at: (2 * key_dim + heads_per_key * value_dim) / 4,
        value_stride: together,
        a_at: all + heads_per_key,
        gate_stride: 2 * heads_per_key,
        ..params
    }
}

fn build(maker: &mut Maker, dims: Dims, fused: bool, slots: u32) -> Result<()> {
    let [key_heads, value_heads, key_dim, value_dim, taps, states] = dims;
    let params = params(dims, fused);
    let channels = 2 * key_heads * key_dim + value_heads * value_dim;
    let (most, stride) = (MOST_TOKENS as usize, params.stride as usize * 4);
    maker.rows("proj", stride, most);
    maker.vector("conv", (channels * taps) as usize)?;
    maker.vector("gates", (2 * value_heads) as usize)?;
    maker.vector("norm", value_dim as usize)?;
    let of_slots = slots * value_heads;
    let ring_words = (of_slots * params.ring * (2 * key_dim + value_dim)) as usize;
    let state_words = (of_slots * states * key_dim * value_dim) as usize;
    maker.buffer("ring", ring_words);
    maker.buffer("state", state_words);
    maker.rows("y", params.y_stride as usize * 4, most);
    maker.step(params)?;
    let runs = [(0, 1), (1, 1), (2, 5), (7, 1), (0, 17), (200, 1), (101, MOST_TOKENS)];
    let rounds = if slots == 1 { sequences(&runs) } else { two_slots() };
    for tokens in rounds {
        let inputs = vec![
            ("proj", maker.random.words(stride * tokens.len(), 3.0)),
            ("ring", maker.random.words(ring_words, 3.0)),
            ("state", maker.random.words(state_words, 1.0)),
        ];
        maker.round(tokens, inputs)?;
    }
    Ok(())
}

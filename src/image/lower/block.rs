//! One block of the denoiser as steps.

use super::builder::{Builder, Rows, vectors_of};
use crate::error::Result;
use crate::graph::Stacking;
use crate::image::config::DitConfig;
use crate::image::network::Block;
use crate::model::Linear;
use crate::op::{self, Bind, BufferId};

/// Added to the mean of squares of query and key heads.
const HEAD_EPS: f32 = 1e-5;

/// Buffers that the blocks share.
#[derive(Clone, Copy)]
pub(super) struct Scratch {
    /// The normalised stream.
    pub x: BufferId,
    pub qkv: BufferId,
    pub attn: BufferId,
    /// The result of a branch, before its norm.
    pub y: BufferId,
    pub act: BufferId,
    /// The result of the up projection, if it is a step of its own.
    pub up: BufferId,
    /// Scales and gates of all blocks.
    pub mods: BufferId,
    /// Most tokens of a run.
    pub tokens: usize,
}

/// The tokens that a block computes.
#[derive(Clone, Copy)]
pub(super) struct Stream {
    pub batch: BufferId,
    pub h: BufferId,
    /// Cosines and sines of each token.
    pub table: BufferId,
}

/// The norm before a branch.
#[derive(Clone, Copy)]
pub(super) struct Before {
    pub weight: Bind,
    /// Vector of the modulations at which its scales begin; `None`: they are 0.
    pub scale_at: Option<u32>,
}

/// A block with its place in the modulations.
pub(super) struct Placed<'a> {
    pub block: &'a Block,
    pub label: String,
    /// Vector of the modulations at which the block's begin; `None`: it has none.
    pub mods_at: Option<u32>,
}

impl<'a> Placed<'a> {
    /// The norm before attention.
    pub fn before(&self, b: &mut Builder) -> Before {
        Before {
            weight: b.norm(&format!("{}.attn.norm", self.label), self.block.attn_norm),
            scale_at: self.mods_at,
        }
    }
}

/// The blocks over one stream, whose first norm is a step of its own. Errors: those of making matrices.
pub(super) fn blocks(
    b: &mut Builder,
    config: &DitConfig,
    blocks: &[Placed],
    stream: Stream,
    scratch: &Scratch,
) -> Result<()> {
    let Some(first) = blocks.first() else {
        return Ok(());
    };
    let before = first.before(b);
    norm(
        b,
        config,
        &format!("{}.attn.norm", first.label),
        before,
        stream,
        scratch,
    );
    for (i, placed) in blocks.iter().enumerate() {
        // The last block has no norm to prepare, and prepares its own.
        let next = blocks.get(i + 1).unwrap_or(placed).before(b);
        block(b, config, placed, next, stream, scratch)?;
        b.tap(stream.h);
    }
    Ok(())
}

/// `x = norm(h)`.
fn norm(b: &mut Builder, config: &DitConfig, label: &str, before: Before, stream: Stream, scratch: &Scratch) {
    let vectors = vectors_of(config.hidden);
    let [batch, x, y, mods] = [stream.batch, stream.h, scratch.x, scratch.mods].map(Bind::Buffer);
    let g = before.weight;
    match before.scale_at {
        Some(scale_at) => {
            let params = op::norm_mod::Params {
                vectors,
                cols: config.hidden as u32,
                eps: config.norm_eps,
                centred: 0,
                scale_at,
            };
            b.emit(label, params, op::norm_mod::Bindings { batch, x, g, mods, y });
        }
        None => {
            let params = op::norm::Params {
                vectors,
                inv_cols: 1.0 / config.hidden as f32,
                eps: config.norm_eps,
                y_stride: vectors,
                y_first: 0,
            };
            b.emit(label, params, op::norm::Bindings { batch, x, g, y });
        }
    }
}

/// One block; `x` holds its normalised stream, and then that of the `next` norm.
fn block(
    b: &mut Builder,
    config: &DitConfig,
    placed: &Placed,
    next: Before,
    stream: Stream,
    scratch: &Scratch,
) -> Result<()> {
    let Placed { block, label, mods_at } = placed;
    let name = |part: &str| format!("{label}.{part}");
    // The modulations are scale and gate of attention, then those of the feed-forward network.
    let part = |i: u32| mods_at.map(|at| at + i * config.hidden as u32 / 4);
    attention(b, config, placed, stream, scratch)?;
    let ffn_norm = Before {
        weight: b.norm(&name("ffn.norm"), block.ffn_norm),
        scale_at: part(2),
    };
    let post = b.norm(&name("attn.post_norm"), block.attn_post_norm);
    add(b, config, &name("attn.add"), (post, part(1)), ffn_norm, stream, scratch);
    feed_forward(b, placed, stream, scratch)?;
    let post = b.norm(&name("ffn.post_norm"), block.ffn_post_norm);
    add(b, config, &name("ffn.add"), (post, part(3)), next, stream, scratch);
    Ok(())
}

/// `h += gate · norm(y)`, then `x = norm(h)`.
fn add(
    b: &mut Builder,
    config: &DitConfig,
    label: &str,
    (post, gate_at): (Bind, Option<u32>),
    next: Before,
    stream: Stream,
    scratch: &Scratch,
) {
    let vectors = vectors_of(config.hidden);
    let (inv_cols, eps, g) = (1.0 / config.hidden as f32, config.norm_eps, next.weight);
    let [batch, h, x, y, mods] = [stream.batch, stream.h, scratch.x, scratch.y, scratch.mods].map(Bind::Buffer);
    match (gate_at, next.scale_at) {
        (Some(gate_at), Some(scale_at)) => {
            let params = op::add_norm_mod::Params {
                vectors,
                inv_cols,
                eps,
                gate_at,
                scale_at,
            };
            let bindings = op::add_norm_mod::Bindings {
                batch,
                y,
                post,
                g,
                mods,
                h,
                x,
            };
            b.emit(label, params, bindings);
        }
        _ => {
            let params = op::add_norm::Params { vectors, inv_cols, eps };
            let bindings = op::add_norm::Bindings {
                batch,
                y,
                post,
                g,
                h,
                x,
            };
            b.emit(label, params, bindings);
        }
    }
}

fn attention(b: &mut Builder, config: &DitConfig, placed: &Placed, stream: Stream, scratch: &Scratch) -> Result<()> {
    let Placed { block, label, .. } = placed;
    let name = |part: &str| format!("{label}.{part}");
    let rows = |x| Rows { batch: stream.batch, x };
    let [q, k, v] = &block.qkv;
    b.products(&name("attn.qkv"), &[q, k, v], rows(scratch.x), scratch.qkv)?;
    let (heads, kv_heads) = (config.heads as u32, config.kv_heads as u32);
    let head_vectors = config.head() as u32 / 4;
    let qkv_stride = vectors_of(q.rows + k.rows + v.rows);
    let [batch, table, qkv, y] = [stream.batch, stream.table, scratch.qkv, scratch.attn].map(Bind::Buffer);
    let params = op::rope_pairs::Params {
        heads,
        kv_heads,
        head_vectors,
        qkv_stride,
        eps: HEAD_EPS,
    };
    let bindings = op::rope_pairs::Bindings {
        batch,
        table,
        q_norm: b.norm(&name("attn.q_norm"), block.q_norm),
        k_norm: b.norm(&name("attn.k_norm"), block.k_norm),
        qkv,
    };
    b.emit(&name("attn.rope"), params, bindings);
    let params = op::attn_full::Params {
        heads,
        kv_heads,
        head_vectors,
        qkv_stride,
        y_stride: vectors_of(config.hidden),
        scale: 1.0 / (config.head() as f32).sqrt(),
        most: scratch.tokens as u32,
    };
    b.emit(&name("attn.attend"), params, op::attn_full::Bindings { batch, qkv, y });
    b.linear(&name("attn.o"), &block.o, rows(scratch.attn), scratch.y)
}

/// `y = down(silu(gate(x)) · up(x))`.
fn feed_forward(b: &mut Builder, placed: &Placed, stream: Stream, scratch: &Scratch) -> Result<()> {
    let Placed { block, label, .. } = placed;
    let Block { gate, up, down, .. } = block;
    let name = |part: &str| format!("{label}.{part}");
    let rows = |x| Rows { batch: stream.batch, x };
    match b.alike(gate, up)? {
        true => gated(b, &name("ffn.gate_up"), [gate, up], rows(scratch.x), scratch.act)?,
        false => {
            b.linear(&name("ffn.gate"), gate, rows(scratch.x), scratch.act)?;
            b.linear(&name("ffn.up"), up, rows(scratch.x), scratch.up)?;
            let [batch, up, y] = [stream.batch, scratch.up, scratch.act].map(Bind::Buffer);
            let params = op::glu::Params {
                vectors: vectors_of(gate.rows),
                gelu: 0,
            };
            b.emit(&name("ffn.glu"), params, op::glu::Bindings { batch, up, y });
        }
    }
    b.linear(&name("ffn.down"), down, rows(scratch.act), scratch.y)
}

/// Gate and up projections in one matrix.
fn gated(b: &mut Builder, label: &str, [gate, up]: [&Linear; 2], rows: Rows, y: BufferId) -> Result<()> {
    let matrix = b.matrix(label, &[gate.weight, up.weight], Stacking::Pair)?;
    for (w, segment) in b.segments(matrix) {
        let params = op::matmul_glu::Params {
            rows: segment.rows,
            groups: segment.groups,
            row0: segment.row0,
            outputs: segment.second_row,
            y_stride: vectors_of(gate.rows),
            has_bias: 0,
            bias_up: 0,
            gelu: 0,
        };
        let [batch, x, y] = [rows.batch, rows.x, y].map(Bind::Buffer);
        let bindings = op::matmul_glu::Bindings {
            w,
            batch,
            x,
            list: batch,
            bias: b.bias(None),
            y,
        };
        b.emit(label, params, bindings);
    }
    Ok(())
}

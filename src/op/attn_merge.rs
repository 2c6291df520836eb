//! The blocks of `attn_block` joined, for decoding.

use super::attention::shape;
use super::constants::KV_PAGE;
use super::define::*;
use cmf_kernels_ref::op::attention::{Block, join};

operator! {
    attn_merge
    params {
        heads: u32, kv_heads: u32, head_vectors: u32, blocks: u32,
        scale: f32 = "As in `attn_block`.",
        softcap: f32 = "As in `attn_block`.",
        window: u32, y_stride: u32,
        query_vectors: u32 = "Vectors of 4 from one query head to the next; if more than a head has, its gate follows.",
    }
    bindings {
        read batch: Batch, partial: array<vec4<f32>>, qkv: array<vec4<f32>>, list: array<u32>;
        write y: array<vec4<f32>>;
    }
    threads Some(64),
    grid |p| Grid::Threads(p.heads * p.head_vectors, 1),
    tolerance |_| Tolerance::Exponential,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let shape = shape!(p);
    let (heads, others) = o.heads(p.heads)?;
    let size = KV_PAGE as usize;
    for (t, token) in o.tokens("batch")?.into_iter().enumerate() {
        let visible = shape.visible(token.position as usize);
        let y_at = |head: usize| t * p.y_stride as usize * 4 + head * shape.head;
        for &head in &heads {
            let base = (t * shape.heads + head) * p.blocks as usize;
            let length = 4 + shape.head;
            let read = |number: usize| {
                let record = o.values("partial", (base + number) * length, length)?;
                Ok(Block {
                    largest: record[0],
                    total: record[1],
                    sum: record[4..].to_vec(),
                })
            };
            let numbers = visible.start / size..visible.end.div_ceil(size);
            let blocks = numbers.map(read).collect::<Result<Vec<_>>>()?;
            let mut y = vec![0.0; shape.head];
            join(&blocks, &mut y);
            shape.gate(o.all_floats("qkv")?, t, head, &mut y)?;
            o.store("y", y_at(head), &y)?;
        }
        for &head in &others {
            o.store("y", y_at(head), &vec![0.0; shape.head])?;
        }
    }
    Ok(())
}

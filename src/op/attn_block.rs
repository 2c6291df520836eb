//! One block of 64 positions of attention, for decoding.

use super::attention::{KvCache, shape};
use super::constants::KV_PAGE;
use super::define::*;
use cmf_kernels_ref::op::attention::block;

operator! {
    attn_block
    params {
        heads: u32, kv_heads: u32, head_vectors: u32, slot_pages: u32, blocks: u32, scale: f32, softcap: f32,
        window: u32, query_vectors: u32,
    }
    bindings {
        read batch: Batch, qkv: array<vec4<f32>>, k_cache: array<Kv4>, v_cache: array<Kv4>, pages: array<u32>,
            list: array<u32>;
        write partial: array<vec4<f32>>;
    }
    threads Some(64),
    shares true,
    grid |p| Grid::Blocks(p.kv_heads),
    tolerance |_| Tolerance::Exponential,
    masked_grid |_, [_, kv_heads]| Grid::Blocks(kv_heads.max(1)),
    masked_share |p, [_, kv_heads]| [kv_heads.into(), p.kv_heads.into()],
    kv_read |p| Some(shape!(p).kv_read(1)),
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let shape = shape!(p);
    let (heads, _) = o.heads(p.heads)?;
    let tokens = o.tokens("batch")?;
    let size = KV_PAGE as usize;
    for (t, token) in tokens.iter().enumerate() {
        let visible = shape.visible(token.position as usize);
        let caches = KvCache::read_all(o, &shape, p.slot_pages, token)?;
        for &head in &heads {
            let q = shape.query(o.all_floats("qkv")?, t, head)?;
            let cached = &caches[shape.kv_head(head)];
            for number in visible.start / size..visible.end.div_ceil(size) {
                let here = visible.start.max(number * size)..visible.end.min((number + 1) * size);
                let part = block(&q, here, |p| cached.k(p), |p| cached.v(p), shape.scale, shape.softcap);
                let mut record = vec![part.largest, part.total, 0.0, 0.0];
                record.extend(part.sum);
                let at = (t * shape.heads + head) * p.blocks as usize + number;
                o.store("partial", at * record.len(), &record)?;
            }
        }
    }
    Ok(())
}

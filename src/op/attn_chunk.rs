//! Attention of many tokens, for prefill.

use super::attention::{KvCache, shape};
use super::constants::{CHUNK_TOKENS, KV_PAGE};
use super::define::*;
use cmf_kernels_ref::op::attention::attend;
use rayon::prelude::*;
use std::collections::HashMap;

operator! {
    attn_chunk
    params {
        heads: u32, kv_heads: u32, head_vectors: u32, slot_pages: u32, scale: f32, softcap: f32, window: u32,
        y_stride: u32,
        query_vectors: u32 = "Vectors of 4 from one query head to the next; if more than a head has, its gate follows.",
    }
    bindings {
        read batch: Batch, qkv: array<vec4<f32>>, k_cache: array<Kv4>, v_cache: array<Kv4>, pages: array<u32>,
            list: array<u32>;
        write y: array<vec4<f32>>;
    }
    threads Some(256),
    shares true,
    grid |p| Grid::Workgroups(p.heads, CHUNK_TOKENS),
    tolerance |_| Tolerance::Exponential,
    masked_grid |_, [heads, _]| Grid::Workgroups(heads.max(1), CHUNK_TOKENS),
    masked_share |p, [_, kv_heads]| [kv_heads.into(), p.kv_heads.into()],
    kv_read |p| Some(shape!(p).kv_read(CHUNK_TOKENS)),
    loop_steps |p| {
        let positions = p.slot_pages.saturating_mul(KV_PAGE);
        let seen = match p.window {
            0 => positions,
            window => positions.min(window.saturating_add(CHUNK_TOKENS + KV_PAGE)),
        };
        // The loops in a block, with the iteration that finds the end of each: 4 vectors of the keys take 7, a vector of
        // the values 9, and a thread has every 32nd.
        let vectors = u64::from(p.head_vectors);
        u64::from(seen.div_ceil(KV_PAGE)) * (vectors.div_ceil(4) * 7 + vectors.div_ceil(32) * 10 + 4)
    },
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let shape = shape!(p);
    let (heads, _) = o.heads(p.heads)?;
    let tokens = o.tokens("batch")?;
    // Tokens of one sequence read the same cache, up to their last position.
    let mut last = HashMap::new();
    for token in &tokens {
        let known = last.entry(token.slot).or_insert(*token);
        known.position = known.position.max(token.position);
    }
    let mut caches = HashMap::new();
    for (&slot, token) in &last {
        caches.insert(slot, KvCache::read_all(o, &shape, p.slot_pages, token)?);
    }
    let place = |i: usize| (i / heads.len(), heads[i % heads.len()]);
    let floats = o.all_floats("qkv")?;
    let results = (0..tokens.len() * heads.len()).into_par_iter().map(|i| {
        let (t, head) = place(i);
        let q = shape.query(floats, t, head)?;
        let cached = &caches[&tokens[t].slot][shape.kv_head(head)];
        let visible = shape.visible(tokens[t].position as usize);
        let mut y = vec![0.0; shape.head];
        attend(
            &q,
            visible,
            |p| cached.k(p),
            |p| cached.v(p),
            shape.scale,
            shape.softcap,
            &mut y,
        );
        shape.gate(floats, t, head, &mut y)?;
        Ok(y)
    });
    let results: Vec<Vec<f64>> = results.collect::<Result<_>>()?;
    for (i, y) in results.iter().enumerate() {
        let (t, head) = place(i);
        o.store("y", t * p.y_stride as usize * 4 + head * shape.head, y)?;
    }
    Ok(())
}

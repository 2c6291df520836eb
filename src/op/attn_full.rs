//! Attention of every token of a run to every token of it.

use super::constants::{FULL_QUERIES, FULL_VECTORS, KV_PAGE};
use super::define::*;
use super::host::slice;
use cmf_kernels_ref::op::attention::attend;
use rayon::prelude::*;

operator! {
    attn_full
    params {
        heads: u32, kv_heads: u32, head_vectors: u32,
        qkv_stride: u32 = "Vectors of 4 from one token of `qkv` to the next.",
        y_stride: u32, scale: f32,
        most: u32 = "Most tokens of a run.",
    }
    bindings {
        read batch: Batch, qkv: array<vec4<f32>>;
        write y: array<vec4<f32>>;
    }
    threads Some(64),
    grid |p| Grid::Workgroups(p.heads * p.head_vectors.div_ceil(FULL_VECTORS), FULL_QUERIES),
    tolerance |_| Tolerance::Exponential,
    loop_steps |p| {
        // For each block: the vectors of a head, the weights of a quarter of a row twice, and the block's values.
        u64::from(p.most.div_ceil(KV_PAGE)) * (u64::from(p.head_vectors) + 2 * 16 + u64::from(KV_PAGE) + 4)
    },
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let n = o.count("batch")?;
    let (heads, kv_heads, head_dim) = (p.heads as usize, p.kv_heads as usize, p.head_vectors as usize * 4);
    let stride = p.qkv_stride as usize * 4;
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) || (heads + 2 * kv_heads) * head_dim > stride {
        bail!(
            Internal,
            "{heads} query heads and {kv_heads} key-value heads of {head_dim} elements in {stride}"
        );
    }
    let qkv = slice(o.all_floats("qkv")?, 0, n * stride, "qkv")?;
    let row = |t: usize, head: usize| &qkv[t * stride + head * head_dim..][..head_dim];
    let results = (0..n * heads).into_par_iter().map(|i| {
        let (t, head) = (i / heads, i % heads);
        let kv_head = head / (heads / kv_heads);
        let q: Vec<f64> = row(t, head).iter().map(|&v| f64::from(v)).collect();
        let mut y = vec![0.0; head_dim];
        let k = |p: usize| row(p, heads + kv_head);
        let v = |p: usize| row(p, heads + kv_heads + kv_head);
        attend(&q, 0..n, k, v, f64::from(p.scale), None, &mut y);
        y
    });
    let results: Vec<Vec<f64>> = results.collect();
    for (i, y) in results.iter().enumerate() {
        o.store("y", i / heads * p.y_stride as usize * 4 + i % heads * head_dim, y)?;
    }
    Ok(())
}

//! Norm and rotation of query and key heads, by a table with a row for each token of the run.

use super::define::*;
use cmf_kernels_ref::op::rms_norm::rms_norm;
use cmf_kernels_ref::op::rope::rotate_pairs;

operator! {
    rope_pairs
    params {
        heads: u32, kv_heads: u32, head_vectors: u32,
        qkv_stride: u32 = "Vectors of 4 from one token of `qkv` to the next.",
        eps: f32 = "Added to the mean of squares of a head.",
    }
    bindings {
        read batch: Batch, table: array<vec4<f32>>, q_norm: array<vec4<f32>>, k_norm: array<vec4<f32>>;
        write qkv: array<vec4<f32>>;
    }
    threads Some(32),
    grid |p| Grid::Workgroups(p.heads + p.kv_heads, 1),
    tolerance |_| Tolerance::Summed,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let (stride, head_dim) = (p.qkv_stride as usize * 4, p.head_vectors as usize * 4);
    for t in 0..o.count("batch")? {
        for head in 0..p.heads + p.kv_heads {
            let at = t * stride + head as usize * head_dim;
            let norm = if head < p.heads { "q_norm" } else { "k_norm" };
            let mut values = vec![0.0; head_dim];
            let x = o.floats("qkv", at, head_dim)?;
            rms_norm(x, o.floats(norm, 0, head_dim)?, f64::from(p.eps), &mut values);
            rotate_pairs(&mut values, o.floats("table", t * head_dim, head_dim)?);
            o.store("qkv", at, &values)?;
        }
    }
    Ok(())
}

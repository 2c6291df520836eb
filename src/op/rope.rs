//! Norm and rotation of query and key heads, and appending keys and values to the cache.

use super::attention::{KvRows, append};
use super::define::*;
use cmf_kernels_ref::op::rms_norm::rms_norm;
use cmf_kernels_ref::op::rope::rotate_half;

operator! {
    rope
    params {
        heads: u32, kv_heads: u32, head_vectors: u32,
        rot_vectors: u32 = "Vectors of 4 in half of the rotated elements.",
        slot_pages: u32,
        positions: u32 = "Positions of the rotation table.",
        eps: f32 = "Added to the mean of squares of a head.",
        qk_norm: u32 = "Norm of query and key heads: 0 = none, 1 = before the rotation, 2 = after it.",
        v_norm: u32 = "1 = value heads are normalised.",
        query_vectors: u32,
    }
    bindings {
        read batch: Batch, table: array<vec4<f32>>, q_norm: array<vec4<f32>>, k_norm: array<vec4<f32>>;
        write qkv: array<vec4<f32>>, k_cache: array<Kv4>, v_cache: array<Kv4>;
        read pages: array<u32>;
    }
    threads Some(32),
    grid |p| Grid::Workgroups(p.heads + 2 * p.kv_heads, 1),
    tolerance |_| Tolerance::Summed,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let (heads, kv_heads) = (p.heads as usize, p.kv_heads as usize);
    let (head_dim, query) = (p.head_vectors as usize * 4, p.query_vectors as usize * 4);
    let rows = KvRows::new(o, kv_heads, p.slot_pages)?;
    for (t, token) in o.tokens("batch")?.into_iter().enumerate() {
        if token.position >= p.positions {
            bail!(Internal, "position {} of {}", token.position, p.positions);
        }
        let position = token.position as usize;
        for head in 0..heads + 2 * kv_heads {
            let in_token = match head < heads {
                true => head * query,
                false => heads * query + (head - heads) * head_dim,
            };
            let at = t * (heads * query + 2 * kv_heads * head_dim) + in_token;
            let x = o.floats("qkv", at, head_dim)?.to_vec();
            if head >= heads + kv_heads {
                let mut values = o.values("qkv", at, head_dim)?;
                if p.v_norm != 0 {
                    rms_norm(&x, &vec![1.0; head_dim], f64::from(p.eps), &mut values);
                }
                let row = rows.row(token.slot, head - heads - kv_heads, position)?;
                append(o, "v_cache", row * head_dim, &values)?;
                continue;
            }
            if head < heads {
                let values = p.rotated(o, &x, "q_norm", position)?;
                o.store("qkv", at, &values)?;
            } else {
                let values = p.rotated(o, &x, "k_norm", position)?;
                let row = rows.row(token.slot, head - heads, position)?;
                append(o, "k_cache", row * head_dim, &values)?;
            }
        }
    }
    Ok(())
}

impl Params {
    /// One query or key head, normalised and rotated.
    fn rotated(&self, o: &Operands, x: &[f32], norm: &str, position: usize) -> Result<Vec<f64>> {
        let (pairs, eps) = (self.rot_vectors as usize * 4, f64::from(self.eps));
        let len = x.len();
        if 2 * pairs > len {
            bail!(
                Internal,
                "{pairs} rotated pairs, expected at most half of {len} elements"
            );
        }
        let table = o.floats("table", position * pairs * 2, pairs * 2)?;
        let cos: Vec<f32> = table.iter().step_by(2).copied().collect();
        let sin: Vec<f32> = table.iter().skip(1).step_by(2).copied().collect();
        let mut values: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
        if self.qk_norm == 1 {
            rms_norm(x, o.floats(norm, 0, len)?, eps, &mut values);
        }
        rotate_half(&mut values, &cos, &sin);
        if self.qk_norm == 2 {
            let mean = values.iter().map(|v| v * v).sum::<f64>() / len as f64;
            let factor = 1.0 / (mean + eps).sqrt();
            let weighted = values.iter_mut().zip(o.values(norm, 0, len)?);
            weighted.for_each(|(v, weight)| *v *= factor * weight);
        }
        Ok(values)
    }
}

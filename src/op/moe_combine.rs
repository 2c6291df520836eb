//! The weighted sum of the experts' outputs, added to the stream, for prefill.

use super::define::*;

operator! {
    moe_combine
    params {
        vectors: u32, top_k: u32,
    }
    bindings {
        read batch: Batch, routes: array<u32>, expert_y: array<vec4<f32>>, shared_y: array<vec4<f32>>;
        write h: array<vec4<f32>>;
    }
    threads Some(64),
    grid |p| Grid::Threads(p.vectors, 1),
    tolerance |_| Tolerance::Summed,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let (len, top_k) = (p.vectors as usize * 4, p.top_k as usize);
    for t in 0..o.count("batch")? {
        let routes = o.words("routes", t * (top_k + 1) * 2, (top_k + 1) * 2)?;
        let weights = routes.chunks_exact(2).map(|route| f64::from(f32::from_bits(route[1])));
        let mut sum = vec![0.0; len];
        for (rank, weight) in weights.enumerate() {
            let y = match rank {
                // In a layer without a shared expert the weight is 0, and `shared_y` is not set.
                rank if rank == top_k && weight == 0.0 => continue,
                rank if rank == top_k => o.values("shared_y", t * len, len)?,
                rank => o.values("expert_y", (t * top_k + rank) * len, len)?,
            };
            sum.iter_mut().zip(y).for_each(|(sum, y)| *sum += weight * y);
        }
        o.add("h", t * len, &sum)?;
    }
    Ok(())
}

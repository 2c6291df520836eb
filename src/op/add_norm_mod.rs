//! Adds a normalised and gated branch to the residual stream, and normalises and scales the sum.

use super::define::*;
use super::modulation::{modulated, scales};

operator! {
    add_norm_mod
    params {
        vectors: u32,
        inv_cols: f32 = "1 / number of elements under the norms.",
        eps: f32, gate_at: u32, scale_at: u32,
    }
    bindings {
        read batch: Batch, y: array<vec4<f32>>, post: array<vec4<f32>>, g: array<vec4<f32>>, mods: array<vec4<f32>>;
        write h: array<vec4<f32>>, x: array<vec4<f32>>;
    }
    threads Some(64),
    grid |_| Grid::Tokens,
    tolerance |_| Tolerance::Exponential,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let stride = p.vectors as usize * 4;
    let cols = (1.0 / p.inv_cols).round() as usize;
    let gates = o.values("mods", p.gate_at as usize * 4, cols)?;
    let gates: Vec<f64> = gates.iter().map(|gate| gate.tanh()).collect();
    let scales = scales(o, p.scale_at, cols)?;
    for t in 0..o.count("batch")? {
        let y = o.floats("y", t * stride, cols)?;
        let h = o.floats("h", t * stride, cols)?;
        let mut sum = vec![0.0; cols.max(stride)];
        modulated(y, o.floats("post", 0, cols)?, p.eps, &gates, &mut sum[..cols]);
        sum.iter_mut().zip(h).for_each(|(sum, &h)| *sum += f64::from(h));
        o.store("h", t * stride, &sum)?;
        // The second norm reads the rounded sums.
        let h = o.floats("h", t * stride, cols)?;
        let mut x = vec![0.0; cols.max(stride)];
        modulated(h, o.floats("g", 0, cols)?, p.eps, &scales, &mut x[..cols]);
        o.store("x", t * stride, &x)?;
    }
    Ok(())
}

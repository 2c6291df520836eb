//! RMSNorm or LayerNorm, times 1 + a scale that is computed at run time.

use super::define::*;
use super::modulation::{modulated, scales};
use cmf_kernels_ref::op::layer_norm::layer_norm;

operator! {
    norm_mod
    params {
        vectors: u32,
        cols: u32 = "Elements under the norm.",
        eps: f32 = "Added to the mean of squares, or to the variance.",
        centred: u32 = "1 = LayerNorm without a weight, 0 = RMSNorm.",
        scale_at: u32,
    }
    bindings {
        read batch: Batch, x: array<vec4<f32>>, g: array<vec4<f32>>, mods: array<vec4<f32>>;
        write y: array<vec4<f32>>;
    }
    threads Some(64),
    grid |_| Grid::Tokens,
    tolerance |_| Tolerance::Summed,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let (stride, cols) = (p.vectors as usize * 4, p.cols as usize);
    let scales = scales(o, p.scale_at, cols)?;
    for t in 0..o.count("batch")? {
        let x = o.floats("x", t * stride, cols)?;
        let mut y = vec![0.0; cols.max(stride)];
        if p.centred == 1 {
            layer_norm(x, f64::from(p.eps), &mut y[..cols]);
            y.iter_mut().zip(&scales).for_each(|(y, scale)| *y *= scale);
        } else {
            modulated(x, o.floats("g", 0, cols)?, p.eps, &scales, &mut y[..cols]);
        }
        o.store("y", t * stride, &y)?;
    }
    Ok(())
}

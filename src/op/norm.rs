//! RMSNorm.

use super::define::*;
use cmf_kernels_ref::op::rms_norm::rms_norm;

operator! {
    norm
    params {
        vectors: u32, inv_cols: f32, eps: f32, y_stride: u32,
        y_first: u32 = "Vector of a token's outputs at which the result begins.",
    }
    bindings {
        read batch: Batch, x: array<vec4<f32>>, g: array<vec4<f32>>;
        write y: array<vec4<f32>>;
    }
    threads Some(64),
    grid |_| Grid::Tokens,
    tolerance |_| Tolerance::Summed,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let stride = p.vectors as usize * 4;
    let cols = (1.0 / p.inv_cols).round() as usize;
    for t in 0..o.count("batch")? {
        let x = o.floats("x", t * stride, cols)?;
        let g = o.floats("g", 0, cols)?;
        let mut y = vec![0.0; cols.max(stride)];
        rms_norm(x, g, f64::from(p.eps), &mut y[..cols]);
        o.store("y", (t * p.y_stride as usize + p.y_first as usize) * 4, &y)?;
    }
    Ok(())
}

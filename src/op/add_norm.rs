//! Adds a normalised branch to the residual stream, and normalises the sum.

use super::define::*;
use cmf_kernels_ref::op::rms_norm::rms_norm;

operator! {
    add_norm
    params {
        vectors: u32,
        inv_cols: f32 = "1 / number of elements under the norms.",
        eps: f32,
    }
    bindings {
        read batch: Batch, y: array<vec4<f32>>, post: array<vec4<f32>>, g: array<vec4<f32>>;
        write h: array<vec4<f32>>, x: array<vec4<f32>>;
    }
    threads Some(64),
    grid |_| Grid::Tokens,
    tolerance |_| Tolerance::Summed,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let stride = p.vectors as usize * 4;
    let cols = (1.0 / p.inv_cols).round() as usize;
    let eps = f64::from(p.eps);
    for t in 0..o.count("batch")? {
        let y = o.floats("y", t * stride, cols)?;
        let post = o.floats("post", 0, cols)?;
        let h = o.floats("h", t * stride, cols)?;
        let mut sum = vec![0.0; cols.max(stride)];
        rms_norm(y, post, eps, &mut sum[..cols]);
        sum.iter_mut().zip(h).for_each(|(sum, &h)| *sum += f64::from(h));
        o.store("h", t * stride, &sum)?;
        // The second norm reads the rounded sums.
        let h = o.floats("h", t * stride, cols)?;
        let g = o.floats("g", 0, cols)?;
        let mut x = vec![0.0; cols.max(stride)];
        rms_norm(h, g, eps, &mut x[..cols]);
        o.store("x", t * stride, &x)?;
    }
    Ok(())
}

//! Adds a normalised branch to the residual stream, and normalises the sum.

use super::define::operator;
use super::grid::Grid;
use super::host::{Operands, slice};
use super::tolerance::Tolerance;
use crate::error::Result;
use cmf_kernels_ref::op::rms_norm::rms_norm;

operator! {
    add_norm
    params {
        vectors: u32 = "Vectors of 4 in a token's row.",
        inv_cols: f32 = "1 / number of elements under the norms.",
        eps: f32 = "Added to the mean of squares.",
    }
    bindings {
        batch: read Batch,
        y: read array<vec4<f32>>,
        post: read array<vec4<f32>>,
        g: read array<vec4<f32>>,
        h: write array<vec4<f32>>,
        x: write array<vec4<f32>>,
    }
    threads Some(64),
    grid |_| Grid::Tokens,
    tolerance |_| Tolerance::Summed,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let stride = p.vectors as usize * 4;
    let cols = (1.0 / p.inv_cols).round() as usize;
    let eps = f64::from(p.eps);
    for t in 0..o.tokens("batch")?.len() {
        let y = slice(o.floats("y")?, t * stride, cols, "y")?;
        let post = slice(o.floats("post")?, 0, cols, "post")?;
        let h = slice(o.floats("h")?, t * stride, cols, "h")?;
        let mut sum = vec![0.0; cols.max(stride)];
        rms_norm(y, post, eps, &mut sum[..cols]);
        sum.iter_mut().zip(h).for_each(|(sum, &h)| *sum += f64::from(h));
        o.store("h", t * stride, &sum)?;
        // The second norm reads the rounded sums.
        let h = slice(o.floats("h")?, t * stride, cols, "h")?;
        let g = slice(o.floats("g")?, 0, cols, "g")?;
        let mut x = vec![0.0; cols.max(stride)];
        rms_norm(h, g, eps, &mut x[..cols]);
        o.store("x", t * stride, &x)?;
    }
    Ok(())
}

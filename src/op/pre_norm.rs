//! The first half of a norm: the residual stream times the weight of the norm, and sums of squares.

use super::define::operator;
use super::grid::Grid;
use super::host::{Operands, scaled, slice};
use super::tolerance::Tolerance;
use crate::error::Result;

operator! {
    pre_norm
    params {
        vectors: u32 = "Vectors of 4 in a token's row.",
    }
    bindings {
        batch: read Batch,
        source: read array<vec4<f32>>,
        g: read array<vec4<f32>>,
        x_scaled: write array<vec4<f32>>,
        squares: write array<f32>,
    }
    threads Some(64),
    grid |p| Grid::Threads(p.vectors, 1),
    tolerance |_| Tolerance::Rounded,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let len = p.vectors as usize * 4;
    for t in 0..o.tokens("batch")?.len() {
        let h = slice(o.floats("source")?, t * len, len, "source")?;
        let (x_scaled, squares) = scaled(h, slice(o.floats("g")?, 0, len, "g")?);
        o.store("x_scaled", t * len, &x_scaled)?;
        o.store("squares", t * (len / 4).next_multiple_of(32), &squares)?;
    }
    Ok(())
}

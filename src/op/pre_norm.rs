//! The first half of a norm: the residual stream times the weight of the norm, and sums of squares.

use super::define::*;

operator! {
    pre_norm
    params {
        vectors: u32,
    }
    bindings {
        read batch: Batch, source: array<vec4<f32>>, g: array<vec4<f32>>;
        write x_scaled: array<vec4<f32>>, squares: array<f32>;
    }
    threads Some(64),
    grid |p| Grid::Threads(p.vectors, 1),
    tolerance |_| Tolerance::Rounded,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let len = p.vectors as usize * 4;
    for t in 0..o.count("batch")? {
        let h = o.floats("source", t * len, len)?;
        let (x_scaled, squares) = scaled(h, o.floats("g", 0, len)?);
        o.store("x_scaled", t * len, &x_scaled)?;
        o.store("squares", t * (len / 4).next_multiple_of(32), &squares)?;
    }
    Ok(())
}

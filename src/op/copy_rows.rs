//! Copies rows behind other rows.

use super::define::*;

operator! {
    copy_rows
    params {
        vectors: u32,
        first: u32 = "Row of the result at which the copy begins.",
    }
    bindings {
        read batch: Batch, x: array<vec4<f32>>;
        write y: array<vec4<f32>>;
    }
    threads Some(64),
    grid |p| Grid::Threads(p.vectors, 1),
    tolerance |_| Tolerance::Exact,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let stride = p.vectors as usize * 4;
    let x = o.values("x", 0, o.count("batch")? * stride)?;
    o.store("y", p.first as usize * stride, &x)
}

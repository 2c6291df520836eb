//! The activation of a gate times the up projection, where separate steps computed the two.

use super::define::operator;
use super::grid::Grid;
use super::host::{Operands, activation, slice};
use super::tolerance::Tolerance;
use crate::error::Result;

operator! {
    glu
    params {
        vectors: u32 = "Vectors of 4 in a token's row.",
        gelu: u32 = "1 = gelu_tanh, 0 = silu.",
    }
    bindings {
        batch: read Batch,
        up: read array<vec4<f32>>,
        y: write array<vec4<f32>>,
    }
    threads Some(64),
    grid |p| Grid::Threads(p.vectors, 1),
    tolerance |_| Tolerance::Exponential,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let stride = p.vectors as usize * 4;
    for t in 0..o.tokens("batch")?.len() {
        let up = slice(o.floats("up")?, t * stride, stride, "up")?;
        let gate = slice(o.floats("y")?, t * stride, stride, "gate")?;
        let product = |(&gate, &up): (&f32, &f32)| activation(p.gelu, f64::from(gate)) * f64::from(up);
        let y: Vec<f64> = gate.iter().zip(up).map(product).collect();
        o.store("y", t * stride, &y)?;
    }
    Ok(())
}

//! The activation of a gate times the up projection, where separate steps computed the two.

use super::define::*;

operator! {
    glu
    params {
        vectors: u32, gelu: u32,
    }
    bindings {
        read batch: Batch, up: array<vec4<f32>>;
        write y: array<vec4<f32>>;
    }
    threads Some(64),
    grid |p| Grid::Threads(p.vectors, 1),
    tolerance |_| Tolerance::Exponential,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let stride = p.vectors as usize * 4;
    for t in 0..o.count("batch")? {
        let up = o.floats("up", t * stride, stride)?;
        let gate = o.floats("y", t * stride, stride)?;
        let product = |(&gate, &up): (&f32, &f32)| activation(p.gelu, f64::from(gate)) * f64::from(up);
        let y: Vec<f64> = gate.iter().zip(up).map(product).collect();
        o.store("y", t * stride, &y)?;
    }
    Ok(())
}

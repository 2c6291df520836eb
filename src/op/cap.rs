//! Multiplier and soft cap of logits.

use super::define::*;

operator! {
    cap
    params {
        vectors: u32,
        multiplier: f32 = "Factor of every element.",
        cap: f32 = "Soft cap; 0 = none.",
    }
    bindings {
        read batch: Batch;
        write y: array<vec4<f32>>;
    }
    threads Some(64),
    grid |p| Grid::Threads(p.vectors, 1),
    tolerance |_| Tolerance::Exponential,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let stride = p.vectors as usize * 4;
    let (multiplier, cap) = (f64::from(p.multiplier), f64::from(p.cap));
    for t in 0..o.count("batch")? {
        let y = o.floats("y", t * stride, stride)?;
        let capped = |value: &f32| match f64::from(*value) * multiplier {
            v if cap == 0.0 => v,
            v => cap * (v / cap).tanh(),
        };
        let capped: Vec<f64> = y.iter().map(capped).collect();
        o.store("y", t * stride, &capped)?;
    }
    Ok(())
}

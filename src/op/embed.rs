//! Rows of the embedding table.

use super::define::*;
use crate::dtype::RowDecoder;

operator! {
    embed
    weight w
    params {
        rows: u32, groups: u32,
        row0: u32 = "First token of this segment.",
        multiplier: f32 = "Factor of every embedding.",
    }
    bindings {
        read batch: Batch;
        write h: array<vec4<f32>>;
    }
    threads Some(64),
    grid |p| Grid::Threads(p.groups * 4, 1),
    tolerance |_| Tolerance::Rounded,
    weight_read |_| WeightRead::Rows(1),
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let stride = p.groups as usize * 32;
    for (t, token) in o.tokens("batch")?.into_iter().enumerate() {
        // The token may be in another segment.
        let Some(row) = token.id.checked_sub(p.row0).filter(|&row| row < p.rows) else {
            continue;
        };
        let mut h = vec![0.0; stride];
        let weights = o.weight(p.rows)?;
        let mut values = vec![0f32; weights.cols];
        weights.row(row as usize, &mut values);
        for (h, &value) in h.iter_mut().zip(&values) {
            *h = f64::from(value) * f64::from(p.multiplier);
        }
        drop(weights);
        o.store("h", t * stride, &h)?;
    }
    Ok(())
}

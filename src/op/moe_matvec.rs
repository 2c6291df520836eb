//! One projection of the chosen experts or of the shared one, for decoding.

use super::define::*;
use super::experts::{Table, row_products, write_routes};

operator! {
    moe_matvec
    weight w
    params {
        rows: u32, groups: u32, outputs: u32,
        top_k: u32 = "Experts that a token takes; 0 = the weight is the shared expert's.",
        row0: u32 = "First row of each expert in this segment, a multiple of 4.",
        y_at: u32 = "Vector of `y` at which the outputs of the chosen experts begin.",
        y_stride: u32 = "Vectors of 4 from one expert's outputs to the next.",
        stride: u32, routes_at: u32,
        square_vectors: u32 = "Vectors of 4 sums of squares; 0, with eps 1 = no norm.",
        inv_cols: f32, eps: f32,
        gated: u32 = "1 = `y` holds gates, and the step replaces them by act(gate) * product.",
        gelu: u32,
    }
    bindings {
        read x: array<vec4<f32>>, squares: array<vec4<f32>>, experts: Experts;
        write router: array<u32>, y: array<vec4<f32>>;
    }
    threads None,
    grid |p| Grid::Experts(p.outputs.div_ceil(4), p.top_k.max(1)),
    tolerance |p| match p.gated {
        0 => Tolerance::Summed,
        _ => Tolerance::Exponential,
    },
    experts Repeatable,
    weight_read |p| WeightRead::ExpertsEachToken(p.top_k.max(1), p.outputs),
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let table = Table::read(o)?;
    let outputs = p.outputs as usize;
    for t in 0..o.own {
        let scale = o.norm_scale(t, p.square_vectors, p.inv_cols, p.eps)?;
        let logits = o.floats("router", t * p.stride as usize, p.stride as usize)?.to_vec();
        let (slots, factor) = match p.top_k {
            0 => (vec![(t, 0)], table.shared_weight(&logits)?),
            _ => (write_routes(o, &table, &logits, p.routes_at, t)?, 1.0),
        };
        for (slot, place) in slots {
            let (first, x) = (place * outputs, t * p.groups as usize * 32);
            let mut y = row_products(o, first..first + outputs, p.rows, p.groups, &[x])?;
            let at = (p.y_at as usize + slot * p.y_stride as usize) * 4 + p.row0 as usize;
            for (y, gate) in y.iter_mut().zip(o.values("y", at, outputs)?) {
                *y *= scale;
                if p.gated != 0 {
                    *y *= activation(p.gelu, gate) * factor;
                }
            }
            o.store_vectors("y", at, y)?;
        }
    }
    Ok(())
}

//! Chooses experts, and computes the gated products of the chosen experts and the shared one, for decoding.

use super::define::*;
use super::experts::{Table, row_products, write_routes};

operator! {
    moe_glu
    weight w
    params {
        rows: u32, groups: u32,
        outputs: u32 = "Outputs of each expert in this segment.",
        placed: u32, shared_outputs: u32,
        first_shared: u32 =
            "Experts that a token takes, before the shared expert; 0 = the weight is only the shared expert's.",
        row0: u32 = "First output of each expert in this segment.",
        y_at: u32 = "Element of `y` at which the outputs of the chosen experts begin.",
        y_stride: u32 = "Elements from one expert's outputs to the next.",
        shared_stride: u32 = "Elements from one token's outputs of the shared expert to the next.",
        stride: u32, routes_at: u32,
        square_vectors: u32 = "Vectors of 4 sums of squares; 0, with eps 1 = no norm.",
        inv_cols: f32, eps: f32, gelu: u32,
    }
    bindings {
        read x: array<vec4<f32>>, squares: array<vec4<f32>>, experts: Experts;
        write router: array<u32>, y: array<f32>;
    }
    threads None,
    grid |p| {
        let pairs = p.outputs.div_ceil(2);
        let shared = p.shared_outputs.div_ceil(2 * pairs.max(1));
        Grid::Experts(pairs, p.first_shared + shared)
    },
    tolerance |_| Tolerance::Exponential,
    experts Repeatable,
    weight_read |p| {
        let rows = p.shared_outputs + p.first_shared.min(p.placed) * p.outputs;
        WeightRead::RowsEachToken(2 * u64::from(rows))
    },
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let table = Table::read(o)?;
    let (outputs, shared, row0) = (p.outputs as usize, p.shared_outputs as usize, p.row0 as usize);
    for t in 0..o.own {
        let scale = o.norm_scale(t, p.square_vectors, p.inv_cols, p.eps)?;
        let logits = o.floats("router", t * p.stride as usize, p.stride as usize)?.to_vec();
        let x = [t * p.groups as usize * 32];
        let glu = |o: &Operands, gate: usize, up: usize, outputs: usize, factor: f64| -> Result<Vec<f64>> {
            let gate = row_products(o, gate..gate + outputs, p.rows, p.groups, &x)?;
            let up = row_products(o, up..up + outputs, p.rows, p.groups, &x)?;
            let product = |(g, u): (&f64, &f64)| activation(p.gelu, g * scale) * u * scale * factor;
            Ok(gate.iter().zip(&up).map(product).collect())
        };
        if p.first_shared != 0 {
            for (slot, place) in write_routes(o, &table, &logits, p.routes_at, t)? {
                let gate = 2 * shared + place * outputs;
                let y = glu(o, gate, gate + p.placed as usize * outputs, outputs, 1.0)?;
                o.store("y", p.y_at as usize + slot * p.y_stride as usize + row0, &y)?;
            }
        }
        if shared != 0 {
            let y = glu(o, 0, shared, shared, table.shared_weight(&logits)?)?;
            o.store("y", t * p.shared_stride as usize + row0, &y)?;
        }
    }
    Ok(())
}

//! Up projections of experts times the gates in `y`, for tokens grouped by expert, for prefill.

use super::define::*;
use super::experts::{store_entries, tiled};

operator! {
    moe_matmul_up
    weight w
    params {
        rows: u32, groups: u32, outputs: u32,
        row0: u32 = "First row of this segment in y, a multiple of 4.",
        y_stride: u32 = "Vectors of 4 from one entry of y to the next.",
        x_entries: u32, tiles: u32, gelu: u32,
    }
    bindings {
        read batch: Batch, experts: Experts, lists: array<u32>, x: array<vec4<f32>>;
        write y: array<vec4<f32>>;
    }
    threads Some(32),
    shares true,
    grid |p| Grid::Tiles { threads: p.outputs.div_ceil(4), entries: p.x_entries, most: p.tiles },
    tolerance |_| Tolerance::Exponential,
    experts Repeatable,
    weight_read |p| WeightRead::Experts(p.x_entries, p.outputs),
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let outputs = p.outputs as usize;
    let value = |[up]: [f64; 1], gate: f64| activation(p.gelu, gate) * up;
    store_entries(o, &tiled!(p), |place| [place * outputs], value)
}

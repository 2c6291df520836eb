//! The gated products of experts for tokens grouped by expert, for prefill.

use super::define::*;
use super::experts::{store_entries, tiled};

operator! {
    moe_matmul_glu
    weight w
    params {
        rows: u32, groups: u32,
        outputs: u32 = "Outputs of each expert in this segment.",
        placed: u32, shared_outputs: u32,
        row0: u32 = "First output of each expert in this segment, a multiple of 4.",
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
    weight_read |p| WeightRead::Rows(u64::from(2 * p.x_entries.min(p.placed) * p.outputs)),
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let first_rows = |place: usize| {
        let gate = 2 * p.shared_outputs as usize + place * p.outputs as usize;
        [gate, gate + p.placed as usize * p.outputs as usize]
    };
    store_entries(o, &tiled!(p), first_rows, |[gate, up], _| activation(p.gelu, gate) * up)
}

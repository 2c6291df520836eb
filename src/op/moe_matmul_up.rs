//! Up projections of experts times the gates in `y`, for tokens grouped by expert, for prefill.

use super::define::operator;
use super::experts::{Tiled, store_entries};
use super::grid::Grid;
use super::host::{Operands, activation};
use super::operator::WeightRead;
use super::tolerance::Tolerance;
use crate::error::Result;

operator! {
    moe_matmul_up
    weight w
    params {
        rows: u32 = "Rows stored in this segment.",
        groups: u32 = "Groups of 32 columns in a row.",
        outputs: u32 = "Rows of each expert in this segment.",
        row0: u32 = "First row of this segment in y, a multiple of 4.",
        y_stride: u32 = "Vectors of 4 from one entry of y to the next.",
        x_entries: u32 = "Entries that share a row of x: the experts that a token takes.",
        tiles: u32 = "Tiles that the lists can hold.",
        gelu: u32 = "1 = gelu_tanh, 0 = silu.",
    }
    bindings {
        batch: read Batch,
        experts: read Experts,
        lists: read array<u32>,
        x: read array<vec4<f32>>,
        y: write array<vec4<f32>>,
    }
    threads Some(32),
    grid |p| Grid::Tiles {
        threads: p.outputs.div_ceil(4),
        entries: p.x_entries,
        most: p.tiles,
    },
    tolerance |_| Tolerance::Exponential,
    experts Repeatable,
    weight_read |p| WeightRead::Experts {
        count: p.x_entries.into(),
        rows: p.outputs.into(),
        each_token: false,
    },
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let tiled = Tiled {
        rows: p.rows,
        groups: p.groups,
        outputs: p.outputs,
        row0: p.row0,
        y_stride: p.y_stride,
        x_entries: p.x_entries,
        tiles: p.tiles,
    };
    store_entries(o, &tiled, |up, gate| activation(p.gelu, f64::from(gate)) * up)
}

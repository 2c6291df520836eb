//! The gated product of two projections of many tokens, for prefill.

use super::define::*;

operator! {
    matmul_glu
    weight w
    params {
        rows: u32 = "Rows stored in this segment, gate and up together.",
        groups: u32,
        row0: u32 = "First output of this segment.",
        outputs: u32 = "Outputs of this segment.",
        y_stride: u32,
        has_bias: u32 = "1 = add the biases.",
        bias_up: u32, gelu: u32,
    }
    bindings {
        read batch: Batch, x: array<vec4<f32>>, list: array<u32>, bias: array<vec4<f32>>;
        write y: array<vec4<f32>>;
    }
    threads Some(32),
    shares true,
    grid |p| Grid::Threads(p.outputs.div_ceil(4), 4),
    tolerance |_| Tolerance::Exponential,
    weight_read |p| WeightRead::Rows(u64::from((2 * p.outputs).min(p.rows))),
    masked_grid |_, [blocks, _]| Grid::Threads(blocks.max(1), 4),
    masked_share |p, [blocks, groups]| block_share([blocks, groups], p.outputs, p.groups),
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let n = o.count("batch")?;
    let gate_bias = o.bias("bias", p.has_bias, p.row0, p.outputs)?;
    let up_bias = o.bias("bias", p.has_bias, p.bias_up + p.row0, p.outputs)?;
    // The rows of the other experts of a bank may follow.
    let (rows, stored) = (p.outputs.saturating_mul(2), p.rows);
    if rows > stored {
        bail!(Internal, "{stored} rows of gate and up, expected at least {rows}");
    }
    let active = o.active_rows(p.outputs)?;
    let products = o.masked_products(rows, p.groups, n)?;
    for (t, products) in products.chunks(rows.max(1) as usize).enumerate() {
        let (gate, up) = halves(products, p.outputs)?;
        let value = |r: usize| activation(p.gelu, gate[r] + gate_bias[r]) * (up[r] + up_bias[r]);
        // Blocks that a mask leaves out stay as they are.
        for first in (0..gate.len()).step_by(4).filter(|&first| active[first]) {
            let y = (first..gate.len().min(first + 4)).map(value).collect();
            o.store_vectors("y", t * p.y_stride as usize * 4 + p.row0 as usize + first, y)?;
        }
    }
    Ok(())
}

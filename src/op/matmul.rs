//! Products of a weight with the activations of many tokens, for prefill.

use super::define::*;

operator! {
    matmul
    weight w
    params {
        rows: u32, groups: u32, row0: u32, second_row: u32, third_row: u32, y_stride: u32, has_bias: u32,
    }
    bindings {
        read batch: Batch, x: array<vec4<f32>>, list: array<u32>, bias: array<vec4<f32>>;
        write y: array<vec4<f32>>;
    }
    threads Some(32),
    shares true,
    grid |p| Grid::Threads(p.rows.div_ceil(4), 8),
    tolerance |_| Tolerance::Summed,
    masked_share |p, [blocks, groups]| block_share([blocks, groups], p.rows, p.groups),
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let n = o.count("batch")?;
    let bias = o.bias("bias", p.has_bias, p.row0, p.rows)?;
    let active = o.active_rows(p.rows)?;
    let products = o.masked_products(p.rows, p.groups, n)?;
    for (t, products) in products.chunks(p.rows.max(1) as usize).enumerate() {
        let value = |r: usize| if active[r] { products[r] + bias[r] } else { 0.0 };
        let y = (0..products.len()).map(value).collect();
        o.store_vectors("y", t * p.y_stride as usize * 4 + p.row0 as usize, y)?;
    }
    Ok(())
}

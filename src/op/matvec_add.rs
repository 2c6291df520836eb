//! Products of a weight with the activations of a few tokens, added to the stream, for decoding.

use super::define::*;

operator! {
    matvec_add
    weight w
    params {
        rows: u32, groups: u32, row0: u32, second_row: u32, third_row: u32, has_bias: u32, y_stride: u32,
    }
    bindings {
        read x: array<vec4<f32>>, list: array<u32>, g: array<vec4<f32>>;
        write h: array<vec4<f32>>, x_scaled: array<vec4<f32>>, squares: array<f32>;
    }
    threads None,
    grid |p| Grid::Teams(p.rows.div_ceil(4)),
    tolerance |_| Tolerance::Summed,
    masked_share |p, [_, groups]| [groups.into(), p.groups.into()],
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    // `list` holds the biases of a step without a mask, and a masked step has no biases.
    let bias = o.bias("list", p.has_bias, p.row0, p.rows)?;
    let products = o.masked_products(p.rows, p.groups, o.width)?;
    for (t, products) in products.chunks(p.rows.max(1) as usize).enumerate() {
        let y = products.iter().zip(&bias).map(|(y, bias)| y + bias).collect();
        o.add_to_stream(t, p.y_stride as usize * 4, p.row0 as usize, y)?;
    }
    Ok(())
}

//! Down projections of the chosen experts, weighted and added to the stream, for decoding.

use super::constants::ABSENT;
use super::define::*;
use super::experts::row_products;

operator! {
    moe_down
    weight w
    params {
        rows: u32, groups: u32,
        inv_groups: f32 = "1 / groups.",
        outputs: u32,
        row0: u32 = "First row of this segment in the output, a multiple of 4.",
        top_k: u32,
        x_at: u32 = "Group of `x` at which the activations of the chosen experts begin.",
        routes_at: u32, y_stride: u32,
    }
    bindings {
        read router: array<u32>, x: array<vec4<f32>>, g: array<vec4<f32>>;
        write h: array<vec4<f32>>, x_scaled: array<vec4<f32>>, squares: array<f32>;
    }
    threads None,
    grid |p| Grid::TeamsEachToken(p.outputs.div_ceil(4)),
    tolerance |_| Tolerance::Summed,
    experts Once,
    weight_read |p| WeightRead::ExpertsEachToken(p.top_k, p.outputs),
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let (outputs, top_k) = (p.outputs as usize, p.top_k as usize);
    for t in 0..o.own {
        let mut y = vec![0.0; outputs];
        for slot in t * top_k..(t + 1) * top_k {
            let route = o.words("router", p.routes_at as usize + 2 * slot, 2)?;
            let (place, weight) = (route[0], f64::from(f32::from_bits(route[1])));
            if place == ABSENT {
                continue;
            }
            let start = (p.x_at as usize + slot * p.groups as usize) * 32;
            let first = place as usize * outputs;
            let products = row_products(o, first..first + outputs, p.rows, p.groups, &[start])?;
            let weighted = products.into_iter().map(|product| weight * product);
            y.iter_mut().zip(weighted).for_each(|(y, product)| *y += product);
        }
        o.add_to_stream(t, p.y_stride as usize * 4, p.row0 as usize, y)?;
    }
    Ok(())
}

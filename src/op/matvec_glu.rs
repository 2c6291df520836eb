//! The gated product of two projections of a few tokens, for decoding.

use super::constants::LIST_HEADER;
use super::define::*;

operator! {
    matvec_glu
    weight w
    params {
        rows: u32 = "Rows stored in this segment, gate and up together.",
        groups: u32,
        row0: u32 = "First output of this segment.",
        outputs: u32 = "Outputs of this segment.",
        square_vectors: u32, inv_cols: f32, eps: f32,
        has_bias: u32 = "1 = add the biases.",
        bias_up: u32, gelu: u32, y_stride: u32,
    }
    bindings {
        read x: array<vec4<f32>>, squares: array<vec4<f32>>, list: array<u32>, bias: array<f32>;
        write y: array<f32>;
    }
    threads None,
    grid |p| Grid::Teams(p.outputs.div_ceil(2)),
    tolerance |_| Tolerance::Exponential,
    masked_grid |_, [outputs, _]| Grid::Teams(outputs.div_ceil(2).max(1)),
    masked_share |p, [outputs, _]| [outputs.into(), p.outputs.into()],
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let active = p.active(o)?;
    let products = o.products(p.rows, p.groups, o.width)?;
    let gate_bias = o.bias("bias", p.has_bias, p.row0, p.outputs)?;
    let up_bias = o.bias("bias", p.has_bias, p.bias_up + p.row0, p.outputs)?;
    for (t, products) in products.chunks(p.rows.max(1) as usize).enumerate() {
        let scale = o.norm_scale(t, p.square_vectors, p.inv_cols, p.eps)?;
        let (gate, up) = halves(products, p.outputs)?;
        let value = |r: usize| match active[r] {
            true => activation(p.gelu, gate[r] * scale + gate_bias[r]) * (up[r] * scale + up_bias[r]),
            false => 0.0,
        };
        let y: Vec<f64> = (0..gate.len()).map(value).collect();
        o.store("y", t * p.y_stride as usize * 4 + p.row0 as usize, &y)?;
    }
    Ok(())
}

impl Params {
    /// Which outputs are computed. The mask list of this operator names single outputs, not blocks of rows.
    fn active(&self, o: &Operands) -> Result<Vec<bool>> {
        if !o.masked {
            return Ok(vec![true; self.outputs as usize]);
        }
        let mut active = vec![false; self.outputs as usize];
        for output in o.list_entries("output", LIST_HEADER, o.list_header()?[0], self.outputs)? {
            active[output] = true;
        }
        Ok(active)
    }
}

//! The gated product of two projections of a few tokens, for decoding.

use super::constants::LIST_HEADER;
use super::define::operator;
use super::grid::Grid;
use super::host::{Operands, activation, halves, slice};
use super::tolerance::Tolerance;
use crate::error::{Result, bail};

operator! {
    matvec_glu
    weight w
    params {
        rows: u32 = "Rows stored in this segment, gate and up together.",
        groups: u32 = "Groups of 32 columns in a row.",
        row0: u32 = "First output of this segment.",
        outputs: u32 = "Outputs of this segment.",
        square_vectors: u32 = "Vectors of 4 sums of squares; 0 = no norm.",
        inv_cols: f32 = "1 / number of elements under the norm.",
        eps: f32 = "Added to the mean of squares.",
        has_bias: u32 = "1 = add the biases.",
        bias_up: u32 = "Element of `bias` at which the up biases begin.",
        gelu: u32 = "1 = gelu_tanh, 0 = silu.",
        y_stride: u32 = "Vectors of 4 from one token's outputs to the next.",
    }
    bindings {
        x: read array<vec4<f32>>,
        squares: read array<vec4<f32>>,
        list: read array<u32>,
        bias: read array<f32>,
        y: write array<f32>,
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
        let words = o.words("list")?;
        let count = slice(words, 0, LIST_HEADER as usize, "list")?[0] as usize;
        let mut active = vec![false; self.outputs as usize];
        for &output in slice(words, LIST_HEADER as usize, count, "outputs")? {
            match active.get_mut(output as usize) {
                Some(active) => *active = true,
                None => bail!(
                    Internal,
                    "'list' names output {output}, expected less than {}",
                    self.outputs
                ),
            }
        }
        Ok(active)
    }
}

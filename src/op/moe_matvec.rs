//! One projection of the chosen experts or of the shared one, for decoding.

use super::define::*;
use super::experts::{Table, row_products, write_routes};

operator! {
    moe_matvec
    weight w
    params {
        rows: u32 = "Rows stored in this segment.",
        groups: u32 = "Groups of 32 columns in a row.",
        outputs: u32 = "Rows of each expert in this segment.",
        top_k: u32 = "Experts that a token takes; 0 = the weight is the shared expert's.",
        row0: u32 = "First row of each expert in this segment, a multiple of 4.",
        y_at: u32 = "Vector of `y` at which the outputs of the chosen experts begin.",
        y_stride: u32 = "Vectors of 4 from one expert's outputs to the next.",
        stride: u32 = "Elements from one token's logits to the next.",
        routes_at: u32 = "Word of `router` at which the places and weights of the chosen experts begin.",
        square_vectors: u32 = "Vectors of 4 sums of squares; 0, with eps 1 = no norm.",
        inv_cols: f32 = "1 / number of elements under the norm.",
        eps: f32 = "Added to the mean of squares.",
        gated: u32 = "1 = `y` holds gates, and the step replaces them by act(gate) * product.",
        gelu: u32 = "1 = gelu_tanh, 0 = silu.",
    }
    bindings {
        read x: array<vec4<f32>>, squares: array<vec4<f32>>, experts: Experts;
        write router: array<u32>, y: array<vec4<f32>>;
    }
    threads None,
    grid |p| Grid::Experts(p.outputs.div_ceil(4), p.top_k.max(1)),
    tolerance |p| match p.gated {
        0 => Tolerance::Summed,
        _ => Tolerance::Exponential,
    },
    experts Repeatable,
    weight_read |p| WeightRead::ExpertsEachToken(p.top_k.max(1), p.outputs),
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    (0..o.own).try_for_each(|t| p.token(o, t))
}

impl Params {
    fn token(&self, o: &mut Operands, t: usize) -> Result<()> {
        let scale = o.norm_scale(t, self.square_vectors, self.inv_cols, self.eps)?;
        let table = Table::read(o)?;
        let logits = o
            .floats("router", t * self.stride as usize, self.stride as usize)?
            .to_vec();
        let (slots, factor) = match self.top_k {
            0 => (vec![(t, 0)], table.shared_weight(&logits)?),
            _ => (write_routes(o, &table, &logits, self.routes_at, t)?, 1.0),
        };
        let (outputs, x) = (self.outputs as usize, t * self.groups as usize * 32);
        for (slot, place) in slots {
            let first = place * outputs;
            let mut y = row_products(o, first..first + outputs, self.rows, self.groups, &[x])?;
            let at = (self.y_at as usize + slot * self.y_stride as usize) * 4 + self.row0 as usize;
            let gates = o.floats("y", at, outputs)?;
            for (y, &gate) in y.iter_mut().zip(gates) {
                *y *= scale;
                if self.gated != 0 {
                    *y *= activation(self.gelu, f64::from(gate)) * factor;
                }
            }
            whole_vectors(&mut y);
            o.store("y", at, &y)?;
        }
        Ok(())
    }
}

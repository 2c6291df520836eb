//! The blockwise Walsh-Hadamard transform with signs, for weights that are stored in a rotated basis.

use super::constants::HADAMARD_TILE;
use super::define::*;
use cmf_kernels_ref::op::hadamard::{rotate, rotate_back};

operator! {
    hadamard
    params {
        vectors: u32,
        block: u32 = "Elements of a block: a power of two of at most HADAMARD_TILE that divides the row.",
        inverse: u32 = "0 = signs before the transform, 1 = after it.",
        x_stride: u32 = "Vectors of 4 from one token's inputs to the next.",
        y_stride: u32,
        factor: f32 = "1 / sqrt(block).",
    }
    bindings {
        read batch: Batch, x: array<vec4<f32>>, signs: array<vec4<f32>>;
        write y: array<vec4<f32>>;
    }
    threads Some(256),
    grid |p| Grid::Workgroups((4 * p.vectors).div_ceil(HADAMARD_TILE), 1),
    tolerance |_| Tolerance::Summed,
}

impl Params {
    /// Rows of `vectors` vectors in blocks of `block` elements, from and to rows without padding.
    pub fn new(vectors: u32, block: u32, inverse: bool) -> Params {
        Params {
            vectors,
            block,
            inverse: inverse.into(),
            x_stride: vectors,
            y_stride: vectors,
            factor: (1.0 / f64::from(block).sqrt()) as f32,
        }
    }
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let cols = p.vectors as usize * 4;
    for t in 0..o.count("batch")? {
        let x = o.values("x", t * p.x_stride as usize * 4, cols)?;
        let signs = o.floats("signs", 0, cols)?;
        let transform = if p.inverse == 0 { rotate } else { rotate_back };
        let y = transform(&x, signs, p.block as usize);
        o.store("y", t * p.y_stride as usize * 4, &y)?;
    }
    Ok(())
}

//! Makes the last token of a batch the only one.

use super::define::operator;
use super::grid::Grid;
use super::host::{Operands, slice};
use super::tolerance::Tolerance;
use crate::error::Result;

operator! {
    last_token
    params {
        vectors: u32 = "Vectors of 4 in a token's row.",
    }
    bindings {
        source: read array<vec4<f32>>,
        to: write array<vec4<f32>>,
        batch: write Batch,
    }
    threads Some(256),
    grid |_| Grid::One,
    tolerance |_| Tolerance::Exact,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let tokens = o.tokens("batch")?;
    let Some(last) = tokens.last() else {
        return Ok(());
    };
    let len = p.vectors as usize * 4;
    let row = slice(o.words("source")?, (tokens.len() - 1) * len, len, "source")?.to_vec();
    o.words_mut("to", 0, len)?.copy_from_slice(&row);
    o.store_tokens("batch", &[*last])
}

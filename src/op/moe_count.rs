//! Counts how often each expert is chosen.

use super::define::operator;
use super::experts::Table;
use super::grid::Grid;
use super::host::{Operands, slice};
use super::tolerance::Tolerance;
use crate::error::Result;

operator! {
    moe_count
    params {
        stride: u32 = "Elements from one token's logits to the next.",
    }
    bindings {
        batch: read Batch,
        experts: read Experts,
        router: read array<u32>,
        counts: write array<atomic<u32>>,
    }
    threads Some(64),
    grid |_| Grid::Tokens,
    tolerance |_| Tolerance::Exact,
    experts Counts,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let table = Table::read(o)?;
    for t in 0..o.tokens("batch")?.len() {
        let logits = slice(o.floats("router")?, t * p.stride as usize, p.stride as usize, "router")?;
        for (expert, _) in table.route(logits)? {
            let count = &mut o.words_mut("counts", expert, 1)?[0];
            *count = count.wrapping_add(1);
        }
    }
    Ok(())
}

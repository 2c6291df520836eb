//! Chooses the experts of many tokens, for prefill.

use super::define::operator;
use super::experts::Table;
use super::grid::Grid;
use super::host::{Operands, slice};
use super::tolerance::Tolerance;
use crate::error::Result;

operator! {
    moe_route
    params {
        stride: u32 = "Elements from one token's logits to the next.",
        shared_expert: u32 = "1 = there is a shared expert, 0 = its weight is 0.",
    }
    bindings {
        batch: read Batch,
        experts: read Experts,
        router: read array<u32>,
        routes: write array<u32>,
    }
    threads Some(64),
    grid |_| Grid::Tokens,
    tolerance |_| Tolerance::Exponential,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let table = Table::read(o)?;
    for t in 0..o.tokens("batch")?.len() {
        let logits = slice(o.floats("router")?, t * p.stride as usize, p.stride as usize, "router")?;
        let routes = table.route(logits)?;
        let shared = match p.shared_expert {
            0 => 0.0,
            _ => table.shared_weight(logits)?,
        };
        let words: Vec<u32> = routes
            .iter()
            .chain(&[(0, shared)])
            .flat_map(|&(expert, weight)| [expert as u32, (weight as f32).to_bits()])
            .collect();
        o.words_mut("routes", t * words.len(), words.len())?
            .copy_from_slice(&words);
    }
    Ok(())
}

//! Chooses the experts of many tokens, for prefill.

use super::define::*;
use super::experts::Table;

operator! {
    moe_route
    params {
        stride: u32,
        shared_expert: u32 = "1 = there is a shared expert, 0 = its weight is 0.",
    }
    bindings {
        read batch: Batch, experts: Experts, router: array<u32>;
        write routes: array<u32>;
    }
    threads Some(64),
    grid |_| Grid::Tokens,
    tolerance |_| Tolerance::Exponential,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let table = Table::read(o)?;
    for t in 0..o.count("batch")? {
        let logits = o.floats("router", t * p.stride as usize, p.stride as usize)?;
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

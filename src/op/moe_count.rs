//! Counts how often each expert is chosen.

use super::define::*;
use super::experts::Table;

operator! {
    moe_count
    params {
        stride: u32,
    }
    bindings {
        read batch: Batch, experts: Experts, router: array<u32>;
        write counts: array<atomic<u32>>;
    }
    threads Some(64),
    grid |_| Grid::Tokens,
    tolerance |_| Tolerance::Exact,
    experts Counts,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let table = Table::read(o)?;
    for t in 0..o.count("batch")? {
        let logits = o.floats("router", t * p.stride as usize, p.stride as usize)?;
        for (expert, _) in table.route(logits)? {
            let count = &mut o.words_mut("counts", expert, 1)?[0];
            *count = count.wrapping_add(1);
        }
    }
    Ok(())
}

//! Begins a speculative step: the tokens that the draft head reads first, and the batch that verifies the drafts.

use super::define::*;
use super::tokens::Token;

operator! {
    speculate_begin
    params {
        depth: u32 = "Largest number of drafts in one speculative step.",
    }
    bindings {
        read slots: array<Slot>;
        write batch: Batch, draft_batch: Batch;
    }
    threads Some(32),
    grid |_| Grid::One,
    tolerance |_| Tolerance::Exact,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let first = o.first_token("batch")?;
    let state = o.slot_state("slots", first.slot)?;
    let over = state.stop != 0 || first.position >= state.last;
    let at = |id: u32, position: u32| Token { id, position, ..first };
    let start = first.position.saturating_sub(state.count);
    let caught_up = state.sampled().iter().zip(start..);
    let caught_up: Vec<Token> = caught_up.map(|(&id, position)| at(id, position)).collect();
    o.store_tokens("draft_batch", if over { &[] } else { &caught_up })?;
    // The drafts replace these tokens one by one.
    let count = (p.depth + 1).min(state.last.saturating_sub(first.position));
    let verified: Vec<Token> = (0..count).map(|i| at(first.id, first.position + i)).collect();
    o.store_tokens("batch", if over { &[] } else { &verified })
}

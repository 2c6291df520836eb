//! Drafts one token from the logits of the draft head.

use super::constants::MAX_WIDTH;
use super::define::*;
use super::tokens::{BATCH_HEADER, Token};

operator! {
    draft
    params {
        vocab: u32,
        number: u32 = "Number of this draft in the step, from 1.",
    }
    bindings {
        read logits: array<f32>, slots: array<Slot>;
        write batch: Batch, draft_batch: Batch;
    }
    threads Some(256),
    grid |_| Grid::One,
    tolerance |_| Tolerance::Exact,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let logits = o.floats("logits", 0, p.vocab as usize)?;
    let mut best = (0, -3.4e38);
    for (token, &logit) in logits.iter().enumerate() {
        if logit > best.1 {
            best = (token as u32, logit);
        }
    }
    let Some(&previous) = o.tokens("draft_batch")?.first() else {
        return Ok(());
    };
    let number = p.number;
    if number >= MAX_WIDTH {
        bail!(Internal, "draft number {number}, expected less than {MAX_WIDTH}");
    }
    let record = BATCH_HEADER + number as usize * size_of::<Token>() / 4;
    o.words_mut("batch", record, 1)?[0] = best.0;
    let next = Token {
        id: best.0,
        position: previous.position + 1,
        ..previous
    };
    let last = o.slot_state("slots", previous.slot)?.last;
    o.store_tokens("draft_batch", &[next])?;
    o.words_mut("draft_batch", 0, 1)?[0] = u32::from(next.position < last);
    Ok(())
}

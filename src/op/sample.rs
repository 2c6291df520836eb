//! Chooses the tokens that follow those of a sequence, and prepares its next run.

use super::define::*;
use super::tokens::Token;
use crate::sampling::{self, Choice, SETTINGS_WORDS, choose};

operator! {
    sample
    params {
        vocab: u32, stride: u32,
    }
    bindings {
        read settings: Settings, logits: array<f32>;
        write batch: Batch, slots: array<Slot>, seen: array<u32>;
    }
    threads Some(256),
    grid |_| Grid::One,
    tolerance |_| Tolerance::Exact,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let slot = o.first_token("batch")?.slot;
    let mut state = o.slot_state("slots", slot)?;
    let tokens = o.tokens("batch")?;
    if state.stop != 0 {
        return Ok(());
    }
    let (count, most) = (tokens.len(), state.sampled.len());
    if count > most {
        bail!(Internal, "{count} tokens to sample after, expected at most {most}");
    }
    (state.count, state.drafted) = (0, count.saturating_sub(1) as u32);
    for (t, token) in tokens.iter().enumerate() {
        let settings = o.words("settings", 0, SETTINGS_WORDS)?;
        let logits = o.floats("logits", t * p.stride as usize, p.vocab as usize)?;
        let seen = o.words("seen", 0, p.vocab as usize)?;
        let (counts, stops) = (sampling::counts_tokens(settings), sampling::stops(settings).to_vec());
        let Choice::Token(chosen) = choose(logits, settings, seen, token.position + 1) else {
            state.stop = 2;
            break;
        };
        state.sampled[t] = chosen;
        state.count += 1;
        state.step += 1;
        if stops.contains(&chosen) {
            state.stop = 1;
        }
        if counts {
            let seen = o.words_mut("seen", chosen as usize, 1)?;
            seen[0] = seen[0].wrapping_add(1);
        }
        let is_drafted = tokens.get(t + 1).is_some_and(|draft| draft.id == chosen);
        if state.stop != 0 || !is_drafted {
            break;
        }
    }
    if let (Some(&id), Some(first)) = (state.sampled().last(), tokens.first()) {
        let next = Token {
            id,
            position: first.position + state.count,
            ..*first
        };
        o.store_tokens("batch", &[next])?;
    }
    o.store_slot_state("slots", slot, &state)
}

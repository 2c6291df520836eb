//! A token's results do not depend on the tokens that run with it.

use super::judge::UNSET;
use super::rig::{BATCH, Rig, Round};
use crate::error::Result;
use crate::gpu::Device;
use crate::op::BufferId;
use std::sync::Arc;

/// Runs the tokens of a round together, and one after another as runs of one token each, on a device or on the host: every
/// row and every shared buffer must be the same bit by bit. Returns the first difference.
///
/// Only rigs that declare rows can be checked: see [`Rig::rows`]. Errors: those of the executors.
pub fn alone(device: Option<&Arc<Device>>, rig: &Rig, round: &Round) -> Result<Result<(), String>> {
    let mut together = rig.executor(device)?;
    rig.run(round, &mut *together)?;
    let mut narrow = rig.clone();
    let steps = narrow.graph.programs[0].steps.iter_mut();
    steps.for_each(|step| step.width = 1);
    let mut single = narrow.executor(device)?;
    narrow.load(round, &mut *single)?;
    let outputs = rig.outputs();
    for (t, token) in round.tokens.iter().enumerate() {
        let one = Round::new(vec![*token], Vec::new());
        single.write(BATCH, &rig.contents(&one, BATCH))?;
        for buffer in 0..rig.graph.buffers.len() {
            if let Some(words) = row_alone(rig, round, buffer, t) {
                single.write(buffer, &words)?;
            }
        }
        narrow.run_steps(&one, &mut *single)?;
        for rows in rig.rows.iter().filter(|rows| outputs.contains_key(&rows.buffer)) {
            let expected = together.read(rows.buffer, rows.first + t * rows.words, rows.words)?;
            if single.read(rows.buffer, rows.first, rows.words)? != expected {
                let label = &rig.graph.buffers[rows.buffer].label;
                return Ok(Err(format!("{}: {label} of token {t} differs", round.name)));
            }
        }
    }
    for &buffer in outputs.keys().filter(|&&buffer| !rig.has_rows(buffer)) {
        let count = rig.words(buffer);
        if single.read(buffer, 0, count)? != together.read(buffer, 0, count)? {
            let label = &rig.graph.buffers[buffer].label;
            return Ok(Err(format!("{}: {label} differs", round.name)));
        }
    }
    Ok(Ok(()))
}

/// The contents of a buffer with rows before a run of token `t` alone: its rows take the place of the first token's.
fn row_alone(rig: &Rig, round: &Round, buffer: BufferId, t: usize) -> Option<Vec<u32>> {
    if !rig.has_rows(buffer) {
        return None;
    }
    let mut words = rig.contents(round, buffer);
    for rows in rig.rows.iter().filter(|rows| rows.buffer == buffer) {
        let all = &mut words[rows.first..][..round.tokens.len() * rows.words];
        let row = all[t * rows.words..][..rows.words].to_vec();
        all.fill(UNSET);
        all[..rows.words].copy_from_slice(&row);
    }
    Some(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parity::cases::cases;
    use std::collections::BTreeSet;

    #[test]
    fn each_token_is_the_same_alone_on_the_host() {
        let mut operators = BTreeSet::new();
        for case in cases() {
            let operator = case.kind().split('.').next().unwrap_or_default().to_string();
            let two_slots = case.name().contains("two slots");
            if operators.contains(&operator) && !two_slots {
                continue;
            }
            let rig = case.rig(u64::MAX).unwrap();
            let rounds = rig.rounds.iter().filter(|round| (2..=17).contains(&round.tokens.len()));
            for round in rounds.filter(|_| !rig.rows.is_empty()) {
                assert_eq!(alone(None, &rig, round).unwrap(), Ok(()), "{}", case.name());
                operators.insert(operator.clone());
            }
        }
        // The sampler, lists of experts and products with them do not compute rows of tokens.
        assert!(operators.len() >= 24, "{operators:?}");
    }
}

//! Pauses: where a program has to wait until the paged banks hold the experts that were chosen.

use super::paged::Paged;
use super::program::Program;
use crate::op::{Bind, BufferId, ExpertUse};
use std::ops::Range;

/// A bank that a program waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// Index into the graph's paged banks.
    pub bank: usize,
    /// Index into the bank's tables.
    pub table: usize,
}

/// A point in a program where the chosen experts have to be present.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pause {
    /// Banks of one layer.
    pub banks: Vec<Waiting>,
    /// How often each expert was chosen.
    pub counts: BufferId,
    /// The steps that read the banks' experts. If the chosen experts do not fit into the slots at once, these steps
    /// run several times. They leave the outputs of absent experts unchanged.
    pub steps: Range<usize>,
    /// Whether the steps can run only once, because one of them adds to its output.
    pub once: bool,
}

impl Program {
    /// Where the program has to wait for experts, in order.
    pub fn pauses(&self, paged: &[Paged]) -> Vec<Pause> {
        let mut pauses: Vec<Pause> = Vec::new();
        // The last buffer of counts, and the pause that belongs to it.
        let mut counted: Option<(BufferId, Option<usize>)> = None;
        for (i, step) in self.steps.iter().enumerate() {
            let once = match (step.op.experts(), step.buffer("counts")) {
                (Some(ExpertUse::Counts), Some(counts)) => {
                    counted = Some((counts, None));
                    continue;
                }
                (Some(ExpertUse::Once), _) => true,
                (Some(ExpertUse::Repeatable), _) => false,
                _ => continue,
            };
            let Some(Bind::Weight(matrix, _)) = step.bind("w") else {
                continue;
            };
            let bank = paged
                .iter()
                .position(|bank| bank.gate_up.contains(&matrix) || bank.down == matrix);
            let (Some(bank), Some((counts, begun))) = (bank, &mut counted) else {
                continue;
            };
            let at = *begun.get_or_insert_with(|| {
                pauses.push(Pause {
                    banks: Vec::new(),
                    counts: *counts,
                    steps: i..i,
                    once: false,
                });
                pauses.len() - 1
            });
            let pause = &mut pauses[at];
            pause.steps.end = i + 1;
            pause.once |= once;
            // Down projections of decoding have no table. The gate projections before them have it.
            let table = step.buffer("experts");
            let table = table.and_then(|table| paged[bank].tables.iter().position(|known| *known == table));
            if let Some(table) = table
                && !pause.banks.iter().any(|waiting| waiting.bank == bank)
            {
                pause.banks.push(Waiting { bank, table });
            }
        }
        pauses
    }
}

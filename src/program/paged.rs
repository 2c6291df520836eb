//! Mixtures of experts whose choices are counted, and banks that hold some of their experts at a time: which steps such a
//! bank has to be ready for, and where a slot's weights lie. What is in which slot when is the executor's to know.

use super::{Bind, BufferId, MatrixId, Program, Slice};
use crate::kernel::Op;
use std::ops::Range;

/// A mixture whose choices are counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Routed {
    /// Its layer.
    pub layer: usize,
    /// Its experts.
    pub experts: usize,
    /// How often each was chosen, one word an expert.
    pub counts: BufferId,
}

/// An expert of a paged bank: its number in the layer, and its gate, up and down rows.
#[derive(Clone, Copy, Debug)]
pub struct Member {
    /// Its number in the layer.
    pub expert: usize,
    /// Gate, up and down projections.
    pub parts: [Slice; 3],
}

/// Where a bank's experts are, as one visit of its layer sees it.
#[derive(Clone, Debug)]
pub struct Table {
    /// The table of experts.
    pub buffer: BufferId,
    /// The experts of the layer that the mask in force lets be chosen there; empty: all.
    pub allowed: Vec<bool>,
}

impl Table {
    /// Whether an expert may be chosen.
    pub fn allows(&self, expert: usize) -> bool {
        self.allowed.get(expert) != Some(&false)
    }
}

/// A bank with fewer slots than experts. At first its slots hold its first members, in order.
#[derive(Clone, Debug)]
pub struct Paged {
    /// A table for each visit of the layer.
    pub tables: Vec<Table>,
    /// Gate projections and up projections: one matrix, or one each.
    pub gate_up: [MatrixId; 2],
    /// Down projections.
    pub down: MatrixId,
    /// Experts it holds at a time.
    pub slots: usize,
    /// All its experts.
    pub members: Vec<Member>,
}

impl Paged {
    /// The matrices and, of the `runs` of their segments, those of a slot, with the member's part that goes there.
    pub fn runs_of(&self, slot: usize, runs: impl Fn(MatrixId) -> usize) -> [(MatrixId, usize, usize); 3] {
        let [gate, up] = self.gate_up;
        let [gate_run, up_run] = match gate == up {
            true => {
                // The shared expert's rows may come first.
                let first = runs(gate).saturating_sub(2 * self.slots);
                [first + slot, first + self.slots + slot]
            }
            false => [slot; 2],
        };
        [(gate, gate_run, 0), (up, up_run, 1), (self.down, slot, 2)]
    }
}

/// A bank that a program waits for, as one visit of its layer sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// Index into the plan's paged banks.
    pub bank: usize,
    /// Index into the bank's tables.
    pub table: usize,
}

/// A place in a program where experts that were chosen have to be there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pause {
    /// Banks of one layer.
    pub banks: Vec<Waiting>,
    /// How often each expert was chosen.
    pub counts: BufferId,
    /// The steps that read the banks' experts. When these come in several groups, the steps run once for each: they leave
    /// alone what an absent expert would compute.
    pub steps: Range<usize>,
    /// Whether they can run only once, because they add to what was there.
    pub once: bool,
}

impl Program {
    /// Where the program has to wait for experts, in order. In decoding, all experts of a token have to be there at once.
    pub fn pauses(&self, paged: &[Paged]) -> Vec<Pause> {
        let mut pauses: Vec<Pause> = Vec::new();
        // What was counted last, and the pause that has begun since.
        let mut counted: Option<(BufferId, Option<usize>)> = None;
        for (i, step) in self.steps.iter().enumerate() {
            match (&step.op, step.bindings.last(), step.bindings.first()) {
                (Op::MoeCount(_), Some(&Bind::Buffer(counts)), _) => counted = Some((counts, None)),
                (
                    Op::MoeGlu(_)
                    | Op::MoeMatvec(_)
                    | Op::MoeDown(_)
                    | Op::MoeMatmulGlu(_)
                    | Op::MoeMatmulUp(_)
                    | Op::MoeMatmul(_),
                    _,
                    Some(&Bind::Weight(matrix, _)),
                ) => {
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
                    pause.once |= matches!(step.op, Op::MoeDown(_));
                    let tables = &paged[bank].tables;
                    let table = tables
                        .iter()
                        .position(|table| step.bindings.contains(&Bind::Buffer(table.buffer)));
                    // Down projections of a token have no table: the gates before them had it.
                    if let Some(table) = table
                        && !pause.banks.iter().any(|waiting| waiting.bank == bank)
                    {
                        pause.banks.push(Waiting { bank, table });
                    }
                }
                _ => {}
            }
        }
        pauses
    }
}

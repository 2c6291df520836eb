//! The programs of a language model, step by step.

use super::outcome::Outcome;
use super::programs::{Pair, Side};
use crate::error::{Result, bail};
use crate::gpu::Device;
use crate::lm::{Plan, ProgramKind};
use crate::op::{BatchShape, MAX_WIDTH, SlotState, Token, batch_words};
use crate::sampling::Sampling;
use crate::source::Tensors;
use std::sync::Arc;

/// Teacher-forced decode steps.
const STEPS: u32 = 32;
/// Speculative steps besides the one at the last position.
const SPECULATIVE_STEPS: usize = 3;

/// A lowered language model with its tensors.
#[derive(Clone)]
pub struct Subject {
    /// The plan.
    pub plan: Arc<Plan>,
    /// The tensors of its matrices and vectors.
    pub tensors: Arc<dyn Tensors>,
}

/// One run of a program over tokens at consecutive positions.
#[derive(Clone, Copy)]
struct Run {
    kind: ProgramKind,
    position: u32,
    tokens: u32,
}

/// Runs `tried` on the device and `reference` on the host, which are the same subject unless a test checks that a fault is
/// found: two prefill chunks, the first token, then 32 teacher-forced decode steps and, if the plan has a program for them, some
/// speculative steps; sampled greedily and at random in turns. Before each step both sides hold the same state, and after it
/// everything that the step changed is compared, so the first failure names the step with the fault. `progress` gets the number
/// of steps done, the number of all, and the label of the next.
///
/// A short context gets fewer steps. Errors: `Usage` for a context of fewer than 8 positions, and those of the executors. A wrong
/// result is not an error but a failure in the outcome, once for each step of a program.
pub fn programs(
    device: &Arc<Device>,
    tried: &Subject,
    reference: &Subject,
    progress: &mut dyn FnMut(usize, usize, &str) -> Result<()>,
) -> Result<Outcome> {
    let plan = &reference.plan;
    if plan.ctx < 8 {
        bail!(Usage, "a context of {} positions, expected at least 8", plan.ctx);
    }
    let mut pair = Pair::new(device, tried.side(), reference.side())?;
    let runs = runs(plan);
    let selected = |run: &Run| plan.program(run.kind).resolve(&plan.selection).len();
    let total = runs.iter().map(selected).sum();
    let mut done = 0;
    for (i, run) in runs.iter().enumerate() {
        let sampling = match i % 2 {
            0 => Sampling::greedy(),
            _ => Sampling {
                seed: i as u64,
                ..Sampling::default()
            },
        };
        pair.write(plan.buffers.settings, &sampling.words(&[])?)?;
        prepare(&mut pair, plan, *run)?;
        pair.run(run.kind as usize, shape(plan, *run), &mut |label| {
            progress(done, total, label)?;
            done += 1;
            Ok(())
        })?;
    }
    Ok(pair.outcome())
}

impl Subject {
    fn side(&self) -> Side {
        Side {
            graph: self.plan.graph.clone(),
            selection: self.plan.selection.clone(),
            tensors: self.tensors.clone(),
        }
    }
}

fn runs(plan: &Plan) -> Vec<Run> {
    let run = |kind, position, tokens| Run { kind, position, tokens };
    let prefill = match plan.has(ProgramKind::PrefillLogits) {
        true => ProgramKind::PrefillLogits,
        false => ProgramKind::Prefill,
    };
    // The second chunk is short and does not begin at position 0.
    let chunk = plan.chunk.min(plan.ctx / 3);
    let short = chunk.div_ceil(3);
    let start = chunk + short;
    let mut runs = vec![
        run(prefill, 0, chunk),
        run(prefill, chunk, short),
        run(ProgramKind::Head, chunk, short),
    ];
    let decoded = start..plan.ctx.min(start + STEPS);
    runs.extend(decoded.map(|position| run(ProgramKind::Decode, position, 1)));
    if plan.has(ProgramKind::Speculate) {
        // From the end of the prompt on, and at the last position.
        let width = plan.drafts + 1;
        let starts = (start..plan.ctx.saturating_sub(width)).step_by(width as usize);
        let starts = starts.take(SPECULATIVE_STEPS);
        runs.extend(starts.map(|position| run(ProgramKind::Speculate, position, width)));
        runs.push(run(ProgramKind::Speculate, plan.ctx - 1, 1));
    }
    runs
}

/// The token at a position of the made-up text: spread over the vocabulary, its last token included.
fn token(plan: &Plan, position: u32) -> u32 {
    match position {
        1 => plan.vocab - 1,
        position => (u64::from(position) * 7_919 % u64::from(plan.vocab)) as u32,
    }
}

/// Writes the tokens of a run, and the state of its sequence.
fn prepare(pair: &mut Pair, plan: &Plan, run: Run) -> Result<()> {
    let tokens = |ahead: u32| -> Vec<Token> {
        let token = |position| Token {
            id: token(plan, position + ahead),
            position,
            ..Token::default()
        };
        (run.position..run.position + run.tokens).map(token).collect()
    };
    pair.write(plan.buffers.batch, &batch_words(&tokens(0)))?;
    // A prefill of the draft head reads the token that follows each position; a speculative step writes its own batch.
    if let Some(draft_batch) = plan.buffers.draft_batch
        && matches!(run.kind, ProgramKind::Prefill | ProgramKind::PrefillLogits)
    {
        pair.write(draft_batch, &batch_words(&tokens(1)))?;
    }
    // As after a run that sampled the token at this position and the ones before it.
    let mut state = SlotState {
        count: plan.drafts.clamp(1, MAX_WIDTH).min(run.position),
        last: plan.ctx,
        ..SlotState::default()
    };
    for (sampled, position) in state
        .sampled
        .iter_mut()
        .zip(run.position - state.count + 1..=run.position)
    {
        *sampled = token(plan, position);
    }
    pair.write(plan.buffers.slots, state.words())
}

fn shape(plan: &Plan, run: Run) -> BatchShape {
    // The draft head may catch up with more tokens than are left to verify.
    let tokens = match run.kind {
        ProgramKind::Speculate => plan.drafts + 1,
        _ => run.tokens,
    };
    BatchShape {
        tokens,
        end: plan.ctx.min(run.position + tokens),
    }
}

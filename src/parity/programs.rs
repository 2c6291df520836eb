//! The programs of a language model, step by step: each step is judged on its own, from the state that the device's earlier
//! steps left.

use super::compare::{Outcome, executor};
use super::judge::{judge, outputs};
use super::maker;
use crate::error::{Result, bail};
use crate::gpu::Device;
use crate::graph::{Executor, Resolved};
use crate::lm::{Plan, ProgramKind};
use crate::op::{BatchShape, BufferId, MAX_WIDTH, SlotState, batch_words};
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
    let mut pair = Pair {
        plan,
        device: tried.executor(Some(device))?,
        host: reference.executor(None)?,
        outcome: Outcome::default(),
    };
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
        pair.prepare(*run)?;
        for step in plan.program(run.kind).resolve(&plan.selection) {
            progress(done, total, &plan.program(run.kind).steps[step.step].label)?;
            pair.step(*run, step)?;
            done += 1;
        }
    }
    Ok(pair.outcome)
}

impl Subject {
    /// The subject on a device, or on the host.
    fn executor(&self, device: Option<&Arc<Device>>) -> Result<Box<dyn Executor>> {
        let plan = &self.plan;
        executor(device, plan.graph.clone(), plan.selection.clone(), self.tensors.clone())
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

impl Run {
    fn shape(&self, plan: &Plan) -> BatchShape {
        // The draft head may catch up with more tokens than are left to verify.
        let tokens = match self.kind {
            ProgramKind::Speculate => plan.drafts + 1,
            _ => self.tokens,
        };
        BatchShape {
            tokens,
            end: plan.ctx.min(self.position + tokens),
        }
    }
}

/// A plan on a device and on the host, in the same state.
struct Pair<'a> {
    plan: &'a Plan,
    device: Box<dyn Executor>,
    host: Box<dyn Executor>,
    outcome: Outcome,
}

impl Pair<'_> {
    /// Writes words at the start of a buffer on both sides.
    fn write(&mut self, buffer: BufferId, words: &[u32]) -> Result<()> {
        self.device.write(buffer, words)?;
        self.host.write(buffer, words)
    }

    /// Writes the tokens of a run, and the state of its sequence.
    fn prepare(&mut self, run: Run) -> Result<()> {
        let plan = self.plan;
        let tokens = |ahead: u32| {
            let positions = run.position..run.position + run.tokens;
            let tokens = positions.map(|position| maker::token(token(plan, position + ahead), 0, position));
            batch_words(&tokens.collect::<Vec<_>>())
        };
        self.write(plan.buffers.batch, &tokens(0))?;
        // A prefill of the draft head reads the token that follows each position; a speculative step writes its own batch.
        if let Some(draft_batch) = plan.buffers.draft_batch
            && matches!(run.kind, ProgramKind::Prefill | ProgramKind::PrefillLogits)
        {
            self.write(draft_batch, &tokens(1))?;
        }
        // As after a run that sampled the token at this position and the ones before it.
        let mut state = SlotState {
            count: plan.drafts.clamp(1, MAX_WIDTH).min(run.position),
            last: plan.ctx,
            ..SlotState::default()
        };
        let positions = run.position - state.count + 1..=run.position;
        for (sampled, position) in state.sampled.iter_mut().zip(positions) {
            *sampled = token(plan, position);
        }
        self.write(plan.buffers.slots, state.words())
    }

    /// Runs a step on both sides and judges what it changed.
    fn step(&mut self, run: Run, resolved: Resolved) -> Result<()> {
        let (graph, at, shape) = (&self.plan.graph, resolved.step, run.shape(self.plan));
        let program = self.plan.program(run.kind);
        let step = &program.steps[at];
        let count = |buffer: BufferId| graph.buffers[buffer].bytes as usize / 4;
        let outputs = outputs(step, graph.kv);
        let mut before = Vec::new();
        for output in &outputs {
            before.push(self.host.read(output.buffer, 0, count(output.buffer))?);
        }
        self.device.run(run.kind as usize, at..at + 1, shape)?;
        self.host.run(run.kind as usize, at..at + 1, shape)?;
        let mut result: Result<f64, String> = Ok(0.0);
        for (output, before) in outputs.iter().zip(&before) {
            let buffer = output.buffer;
            let found = self.device.read(buffer, 0, count(buffer))?;
            let expected = self.host.read(buffer, 0, count(buffer))?;
            let verdict = judge(before, &found, &expected, output.elements, output.tolerance);
            result = match (result, verdict) {
                (Ok(worst), Ok(error)) => Ok(worst.max(error)),
                (Ok(_), Err(difference)) => Err(format!(
                    "{}: {difference}, in a run up to position {}",
                    graph.buffers[buffer].label,
                    shape.end.saturating_sub(1)
                )),
                (failed, _) => failed,
            };
            // On both sides the next step begins from the device's state.
            self.host.write(buffer, &found)?;
        }
        // Prefill has the same steps with and without logits.
        let program = program.name.trim_end_matches("_logits");
        let variant = if resolved.masked { ".masked" } else { "" };
        let kind = format!("{program} {}{variant}", step.op.kernel().spec().name);
        self.outcome.add(&kind, &format!("{program} {}", step.label), result);
        Ok(())
    }
}

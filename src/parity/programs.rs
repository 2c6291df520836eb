//! A model's programs, step by step: each step is judged alone, on the state that the device's own earlier steps left.

use super::{Elements, Outcome, Subject, Tally, Tolerance, elements, judge};
use crate::error::{Result, bail};
use crate::gpu::{Device, GpuExecutor};
use crate::host::HostExecutor;
use crate::kernel::Op;
use crate::program::{Ctl, Executor, Extent, Plan, Step, Which};
use crate::sampling::Sampling;
use std::sync::Arc;

/// Teacher-forced decode steps.
const STEPS: u32 = 32;

/// Runs `tried` on the device and `reference` on the host, which are one unless a test wants a mistake to be found: two
/// prefill chunks, the first token, then 32 teacher-forced decode steps and, where the plan has them, some speculative rounds,
/// sampled greedily and at random in turns. Before each step both sides hold the same state, and after it everything that
/// the step changed is compared; so the first failure names the step that is wrong. `progress` is told steps done, steps in
/// all and the label of the next.
///
/// A context of fewer positions gets fewer steps. Errors: those of the executors; a wrong result is no error but in the
/// outcome, once for each step of a program.
pub fn programs(
    device: &Arc<Device>,
    tried: &Subject,
    reference: &Subject,
    progress: &mut dyn FnMut(usize, usize, &str) -> Result<()>,
) -> Result<Outcome> {
    let plan = &reference.plan;
    if plan.ctx < 8 {
        bail!(Usage, "a context of {} positions, wanted at least 8", plan.ctx);
    }
    let gpu = GpuExecutor::new(device.clone(), tried.plan.clone(), &*tried.tensors, &mut |_, _| Ok(()))?;
    let host = HostExecutor::new(plan.clone(), reference.tensors.clone())?;
    let mut pair = Pair {
        plan: plan.clone(),
        gpu,
        host,
        tally: Tally::default(),
    };
    // Tokens spread over the vocabulary: a multiplicative walk, with the first and the last token among them.
    let token = |i: u32| match i {
        1 => plan.vocab - 1,
        i => (u64::from(i) * 7_919 % u64::from(plan.vocab)) as u32,
    };
    let chunk = plan.chunk.min(plan.ctx / 3);
    // The second chunk is short, and begins at a position that is not 0.
    let prefills = [(0, chunk), (chunk, chunk.div_ceil(3))];
    let start = chunk + chunk.div_ceil(3);
    let prefill = match plan.program(Which::PrefillLogits).steps.is_empty() {
        true => Which::Prefill,
        false => Which::PrefillLogits,
    };
    let mut runs = Vec::new();
    for (pos, columns) in prefills {
        runs.push((prefill, pos, columns));
    }
    runs.push((Which::Head, prefills[1].0, prefills[1].1));
    runs.extend((start..plan.ctx.min(start + STEPS)).map(|pos| (Which::Decode, pos, 1)));
    // Rounds begin where the prompt ended, and at the last position.
    let width = plan.drafts + 1;
    for which in [Which::Round, Which::OtherRound] {
        if !plan.program(which).steps.is_empty() {
            let starts = (start..plan.ctx.saturating_sub(width)).step_by(width as usize).take(3);
            runs.extend(starts.map(|pos| (which, pos, width)));
            runs.push((which, plan.ctx - 1, 1));
        }
    }
    let total: usize = runs.iter().map(|run| plan.program(run.0).steps.len()).sum();

    let mut done = 0;
    for (i, &(which, pos, columns)) in runs.iter().enumerate() {
        let tokens: Vec<u32> = (pos..pos + columns).map(token).collect();
        // As after a run that sampled the first token and all but one of those before it.
        let mut ctl = Ctl {
            pos,
            columns,
            count: plan.drafts.max(1).min(pos),
            last: plan.ctx,
            ..Ctl::default()
        };
        ctl.tokens.iter_mut().zip(&tokens).for_each(|(to, &token)| *to = token);
        let sampling = match i % 2 {
            0 => Sampling::greedy(),
            _ => Sampling {
                seed: i as u64,
                ..Sampling::default()
            },
        };
        pair.write(plan.fixed.settings, &sampling.words(&[])?)?;
        pair.write(plan.fixed.tokens, &tokens)?;
        pair.write(plan.fixed.ctl, bytemuck::cast_slice(&[ctl]))?;
        // A round of the draft head catches up with more columns than it may have left to judge.
        let extent = match which {
            Which::Round | Which::OtherRound => Extent {
                columns: width,
                end: plan.ctx.min(pos + width),
            },
            _ => Extent {
                columns,
                end: pos + columns,
            },
        };
        for at in 0..plan.program(which).steps.len() {
            progress(done, total, &plan.program(which).steps[at].label)?;
            pair.step(which, at, extent)?;
            done += 1;
        }
    }
    Ok(pair.tally.outcome())
}

/// Both executors of one plan, in the same state.
struct Pair {
    plan: Arc<Plan>,
    gpu: GpuExecutor,
    host: HostExecutor,
    tally: Tally,
}

impl Pair {
    fn write(&mut self, buffer: usize, words: &[u32]) -> Result<()> {
        self.gpu.write(buffer, words)?;
        self.host.write(buffer, words)
    }

    fn step(&mut self, which: Which, at: usize, extent: Extent) -> Result<()> {
        let plan = self.plan.clone();
        let step = &plan.program(which).steps[at];
        let count = |buffer: usize| plan.buffers[buffer].bytes as usize / 4;
        let writes = step.writes();
        let mut before = Vec::new();
        for &(_, buffer) in &writes {
            before.push(self.host.read(buffer, 0, count(buffer))?);
        }
        self.gpu.run(which, at..at + 1, extent)?;
        self.host.run(which, at..at + 1, extent)?;
        let mut result: Result<f64, String> = Ok(0.0);
        for (&(name, buffer), before) in writes.iter().zip(&before) {
            let found = self.gpu.read(buffer, 0, count(buffer))?;
            let wanted = self.host.read(buffer, 0, count(buffer))?;
            let kind = elements(name, plan.kv);
            let verdict = judge(before, &found, &wanted, kind, tolerance(step, kind));
            result = match (result, verdict) {
                (Ok(worst), Ok(error)) => Ok(worst.max(error)),
                (Ok(_), Err(what)) => Err(format!(
                    "{}: {what}, at position {}",
                    plan.buffers[buffer].label,
                    extent.end - 1
                )),
                (failed, _) => failed,
            };
            // The next step begins from the device's state on both sides.
            self.host.write(buffer, &found)?;
        }
        let program = match which {
            Which::Decode => "decode",
            Which::Prefill | Which::PrefillLogits | Which::OtherPrefill => "prefill",
            Which::Head => "head",
            Which::Round | Which::OtherRound => "round",
        };
        let name = format!("{program} {}", step.label);
        let kind = format!("{program} {}", step.op.kernel().stem());
        self.tally.add(&kind, &name, result);
        Ok(())
    }
}

fn tolerance(step: &Step, kind: Elements) -> Tolerance {
    match (&step.op, kind) {
        (_, Elements::Words) => Tolerance::Exact,
        (_, Elements::F16) => Tolerance::Half,
        (Op::LastColumn(_) | Op::RoundBegin(_) | Op::Draft(_), _) => Tolerance::Exact,
        (Op::Embed(_) | Op::Prep(_), _) => Tolerance::Rounded,
        (Op::Norm(_) | Op::AddNorm(_) | Op::Matvec(_) | Op::MatvecAdd(_), _) => Tolerance::Summed,
        (Op::MatvecSome(_) | Op::MatvecAddSome(_), _) => Tolerance::Summed,
        (Op::Silence(_), _) => Tolerance::Exact,
        (Op::Matmul(_) | Op::MatmulAdd(_) | Op::Rope(_) | Op::Sample(_), _) => Tolerance::Summed,
        (Op::MatmulSome(_) | Op::MatmulAddSome(_), _) => Tolerance::Summed,
        (Op::MatvecGluSome(_) | Op::MatmulGluSome(_), _) => Tolerance::Exponential,
        (Op::MatvecGlu(_) | Op::MatmulGlu(_) | Op::Glu(_) | Op::Cap(_), _) => Tolerance::Exponential,
        (Op::MoeMatvec(p), _) if p.gated == 0 => Tolerance::Summed,
        (Op::MoeGlu(_) | Op::MoeMatvec(_) | Op::MoeRoute(_), _) => Tolerance::Exponential,
        (Op::MoeMatmulGlu(_) | Op::MoeMatmulUp(_), _) => Tolerance::Exponential,
        (Op::MoeDown(_) | Op::MoeMatmul(_) | Op::MoeCombine(_), _) => Tolerance::Summed,
        (Op::MoeCount(_) | Op::MoeLists(_), _) => Tolerance::Exact,
        (Op::AttnBlock(_) | Op::AttnMerge(_) | Op::AttnChunk(_) | Op::DeltaNet(_), _) => Tolerance::Exponential,
        (Op::AttnBlockSome(_) | Op::AttnMergeSome(_) | Op::AttnChunkSome(_), _) => Tolerance::Exponential,
    }
}

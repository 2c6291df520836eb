//! Teacher-forced logits, and the hidden states of a prompt.

use super::answer::Cancel;
use super::session::{FIRST_STEPS, Session};
use crate::error::{Result, bail};
use crate::graph::{BatchShape, BufferId};
use crate::lm::ProgramKind;
use crate::op::SlotState;
use crate::sampling::Sampling;
use std::ops::Range;

/// Receives a position, its logits, and, if requested, the residual stream after each layer.
pub type LogitsSink<'a> = &'a mut dyn FnMut(usize, &[f32], &[Vec<f32>]) -> Result<()>;

/// The results of one token.
#[derive(Clone, Default)]
struct TokenOutput {
    logits: Vec<f32>,
    /// The residual stream after each layer.
    hidden: Vec<Vec<f32>>,
}

impl Session {
    /// Teacher-forced logits of every token: the first `prefill` tokens in prefill runs, the others one by one
    /// through the decode program. `sink` receives each position's logits and, if `hidden` is set, the residual
    /// stream after each layer: `hidden[layer]`. Starts with an empty cache.
    ///
    /// Errors: as [`Session::prefill`]; `Usage` if the plan cannot compute the logits of a prefill; those of `sink`.
    pub fn logits(&mut self, tokens: &[u32], prefill: usize, hidden: bool, sink: LogitsSink) -> Result<()> {
        self.check(tokens)?;
        self.clear();
        let (first, rest) = tokens.split_at(prefill.min(tokens.len()));
        if !first.is_empty() && !self.plan.has(ProgramKind::PrefillLogits) {
            bail!(Usage, "the plan has no program for the logits of a prompt");
        }
        let settings = Sampling::greedy().words(&[])?;
        self.executor.write(self.plan.buffers.settings, &settings)?;
        self.write_slot(SlotState::default())?;
        let prefilled = first.chunks(self.plan.chunk as usize);
        let prefilled = prefilled.map(|chunk| (ProgramKind::PrefillLogits, chunk));
        let decoded = rest.chunks(1).map(|chunk| (ProgramKind::Decode, chunk));
        for (kind, chunk) in prefilled.chain(decoded) {
            let start = self.cached.len();
            let shape = self.begin_chunk(chunk)?;
            let outputs = self.forward(kind, shape, hidden)?;
            self.end_chunk(chunk);
            for (i, output) in outputs.iter().enumerate() {
                sink(start + i, &output.logits, &output.hidden)?;
            }
        }
        self.last_chunk = 0;
        Ok(())
    }

    /// Runs a program and reads the results of every token.
    fn forward(&mut self, kind: ProgramKind, shape: BatchShape, hidden: bool) -> Result<Vec<TokenOutput>> {
        let plan = self.plan.clone();
        let program = plan.program(kind);
        let tokens = shape.tokens as usize;
        let mut outputs = vec![TokenOutput::default(); tokens];
        let mut done = 0;
        for &(end, stream) in program.taps.iter().filter(|_| hidden) {
            self.run_steps(kind, done..end, shape, &Cancel::new())?;
            done = end;
            let rows = self.token_rows(stream, plan.hidden as usize, tokens)?;
            outputs.iter_mut().zip(rows).for_each(|(of, row)| of.hidden.push(row));
        }
        self.run_steps(kind, done..program.steps.len(), shape, &Cancel::new())?;
        if let Some(buffer) = program.output {
            let rows = self.token_rows(buffer, plan.vocab as usize, tokens)?;
            outputs.iter_mut().zip(rows).for_each(|(of, row)| of.logits = row);
        }
        Ok(outputs)
    }

    /// Runs steps of a program in short submissions. Errors: `Interrupted` when it is cancelled; those of the executor.
    pub(super) fn run_steps(
        &mut self,
        kind: ProgramKind,
        steps: Range<usize>,
        shape: BatchShape,
        cancel: &Cancel,
    ) -> Result<()> {
        let end = steps.end;
        for start in steps.step_by(FIRST_STEPS) {
            if cancel.is_cancelled() {
                bail!(Interrupted, "cancelled");
            }
            let part = start..end.min(start + FIRST_STEPS);
            self.executor.run(kind as usize, part, shape)?;
        }
        Ok(())
    }

    /// The first `len` elements of each of the first `tokens` rows of a buffer. Its rows are padded to multiples of 32.
    pub(super) fn token_rows(&mut self, buffer: BufferId, len: usize, tokens: usize) -> Result<Vec<Vec<f32>>> {
        let stride = len.next_multiple_of(32);
        let words = self.executor.read(buffer, 0, stride * tokens)?;
        let floats: &[f32] = bytemuck::cast_slice(&words);
        Ok(floats.chunks_exact(stride).map(|row| row[..len].to_vec()).collect())
    }

    /// φ of a prompt: for each of `layers`, which is ascending, the mean over all tokens of the residual stream after
    /// that layer. Runs only the layers up to the last of them. Empties the cache.
    ///
    /// Errors: as [`Session::prefill`]; `Usage` for an unknown layer or another order; `Interrupted`; `NonFinite`.
    pub fn mean_hidden(&mut self, tokens: &[u32], layers: &[usize], cancel: &Cancel) -> Result<Vec<Vec<f64>>> {
        self.check(tokens)?;
        let plan = self.plan.clone();
        let taps = &plan.program(ProgramKind::Prefill).taps;
        if !layers.is_sorted() || layers.last().is_some_and(|&last| last >= taps.len()) {
            bail!(
                Usage,
                "layers {layers:?}: expected ascending numbers below {}",
                taps.len()
            );
        }
        self.clear();
        let mut sums = vec![vec![0f64; plan.hidden as usize]; layers.len()];
        for chunk in tokens.chunks(plan.chunk as usize) {
            let result = self.add_hidden(chunk, layers.iter().map(|&layer| taps[layer]), &mut sums, cancel);
            self.settle(result)?;
        }
        self.clear();
        for sum in &mut sums {
            sum.iter_mut().for_each(|value| *value /= tokens.len() as f64);
            if sum.iter().any(|value| !value.is_finite()) {
                bail!(NonFinite, "the hidden states of the prompt are not finite numbers");
            }
        }
        Ok(sums)
    }

    /// Runs a chunk up to each of `taps` and adds the rows of its tokens to the tap's sum.
    fn add_hidden(
        &mut self,
        chunk: &[u32],
        taps: impl Iterator<Item = (usize, usize)>,
        sums: &mut [Vec<f64>],
        cancel: &Cancel,
    ) -> Result<()> {
        let shape = self.begin_chunk(chunk)?;
        let mut done = 0;
        for ((end, stream), sum) in taps.zip(sums) {
            self.run_steps(ProgramKind::Prefill, done..end, shape, cancel)?;
            done = end;
            for row in self.token_rows(stream, sum.len(), chunk.len())? {
                let elements = sum.iter_mut().zip(&row);
                elements.for_each(|(sum, &value)| *sum += f64::from(value));
            }
        }
        self.end_chunk(chunk);
        Ok(())
    }
}

//! Prefill: runs prompts chunk by chunk, in submissions of limited time.

use super::cancel::Cancel;
use super::pace::Pace;
use super::session::Session;
use crate::error::Result;
use crate::graph::BatchShape;
use crate::lm::{ProgramKind, sequence_words};
use std::ops::ControlFlow;

impl Session {
    /// Caches a prompt. Cached tokens that the prompt begins with are used again; with recurrent layers only if their
    /// states at that position are kept. Returns how many tokens were run, and whether the prefill was cancelled.
    ///
    /// Errors: `ContextFull`, `Usage` for unknown tokens, and those of the executor.
    pub fn prefill(&mut self, tokens: &[u32], cancel: &Cancel) -> Result<(usize, ControlFlow<()>)> {
        self.check(tokens)?;
        let shared = self.cached.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        // The last token always runs: the answer begins with its hidden state.
        let shared = self.reusable(shared.min(tokens.len() - 1));
        self.cached.truncate(shared);
        self.run_end = shared;
        self.last_chunk = 0;
        if shared == 0 {
            self.drafting.begin_conversation();
        }
        let result = self.prefill_chunks(&tokens[shared..], cancel);
        let flow = self.settle(result)?;
        Ok((self.cached.len() - shared, flow))
    }

    /// How many of the first `shared` cached tokens a run can follow: all, or none if a recurrent layer no longer has
    /// the state after them.
    fn reusable(&self, shared: usize) -> usize {
        let moved_on = self.run_end - shared;
        match self.plan.kept_states {
            Some(kept) if moved_on >= kept as usize => 0,
            _ => shared,
        }
    }

    fn prefill_chunks(&mut self, tokens: &[u32], cancel: &Cancel) -> Result<ControlFlow<()>> {
        let mut flow = ControlFlow::Continue(());
        let mut pace = Pace::new();
        let mut rest = tokens;
        while !rest.is_empty() {
            let (chunk, later) = rest.split_at(rest.len().min(self.plan.chunk as usize));
            if let Some(draft_batch) = self.plan.buffers.draft_batch {
                // The token after the prompt is unknown. The first speculative step replaces the 0.
                let mut next = chunk[1..].to_vec();
                next.push(later.first().copied().unwrap_or(0));
                let words = sequence_words(&next, self.cached.len() as u32);
                self.executor.write(draft_batch, &words)?;
            }
            let shape = self.begin_chunk(chunk)?;
            flow = self.submit_chunk(shape, cancel, &mut pace)?;
            if flow.is_break() {
                // The chunk does not count: later runs overwrite its cache entries. The batch no longer belongs to the
                // cached tokens, so an answer needs another prefill.
                self.last_chunk = 0;
                break;
            }
            self.end_chunk(chunk);
            rest = later;
        }
        self.wait_all()?;
        Ok(flow)
    }

    /// Submits a chunk in several submissions, until it is cancelled. A chunk that overwrites the recurrent states
    /// with which it began is always finished.
    fn submit_chunk(&mut self, shape: BatchShape, cancel: &Cancel, pace: &mut Pace) -> Result<ControlFlow<()>> {
        let steps = self.plan.program(ProgramKind::Prefill).steps.len();
        let keeps_states = self.plan.kept_states.is_none_or(|kept| shape.tokens < kept);
        let mut done = 0;
        while done < steps {
            if (done == 0 || keeps_states) && cancel.is_cancelled() {
                return Ok(ControlFlow::Break(()));
            }
            let end = steps.min(done.saturating_add(self.submission_steps));
            self.submit_steps(ProgramKind::Prefill, done..end, shape)?;
            pace.submitted(end - done);
            done = end;
            // One submission is encoded while another runs. A longer queue would delay a cancel.
            if self.in_flight.len() > 1 {
                self.wait()?;
                self.submission_steps = pace.next(self.submission_steps);
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Writes the batch of a run that continues the cached tokens.
    pub(super) fn begin_chunk(&mut self, chunk: &[u32]) -> Result<BatchShape> {
        let start = self.cached.len();
        self.write_batch(chunk, start)?;
        Ok(BatchShape {
            tokens: chunk.len() as u32,
            end: (start + chunk.len()) as u32,
        })
    }

    /// Records that a chunk was run.
    pub(super) fn end_chunk(&mut self, chunk: &[u32]) {
        self.cached.extend_from_slice(chunk);
        self.run_end = self.cached.len();
        self.last_chunk = chunk.len();
    }
}

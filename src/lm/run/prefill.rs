//! Prefill: runs prompts chunk by chunk, in submissions of limited time.

use super::answer::Cancel;
use super::session::Session;
use crate::error::Result;
use crate::graph::BatchShape;
use crate::lm::{ProgramKind, sequence_words};
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// Target time of a submission. Drivers reset a device that does not respond for seconds, and a cancel waits for
/// submissions in flight.
const SUBMISSION: Duration = Duration::from_millis(100);
/// A submission has at most this many times the steps of the submission before it.
const GROWTH: usize = 4;

/// Times submissions, of which two are in flight.
pub(super) struct Pace {
    /// When the previous submission was done.
    since: Instant,
    /// Steps of each submission in flight.
    in_flight: VecDeque<usize>,
}

impl Pace {
    pub fn new() -> Pace {
        Pace {
            since: Instant::now(),
            in_flight: VecDeque::new(),
        }
    }

    /// Records that a submission of this number of steps was made.
    pub fn submitted(&mut self, steps: usize) {
        self.in_flight.push_back(steps);
    }

    /// Records that the oldest submission is done. Returns the number of steps for the next one, if the last one had
    /// `steps`.
    pub fn next(&mut self, steps: usize) -> usize {
        let took = self.since.elapsed();
        self.since = Instant::now();
        fit(self.in_flight.pop_front().unwrap_or(steps), took, steps)
    }
}

/// The steps that fit into a submission if `done` of them took this long: at most [`GROWTH`] times `before`.
fn fit(done: usize, took: Duration, before: usize) -> usize {
    let fit = done as f64 * SUBMISSION.as_secs_f64() / took.as_secs_f64().max(1e-9);
    (fit as usize).clamp(1, before.saturating_mul(GROWTH))
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn submissions_approach_the_wanted_time() {
        let ms = Duration::from_millis;
        assert_eq!(fit(16, ms(100), 16), 16);
        assert_eq!(fit(16, ms(400), 16), 4);
        assert_eq!(fit(16, ms(50), 16), 32);
        // The last submission of a program is short.
        assert_eq!(fit(4, ms(25), 16), 16);
        // On a fast device the size grows step by step; on a very slow one it is at least 1.
        assert_eq!(fit(16, Duration::ZERO, 16), 64);
        assert_eq!(fit(16, ms(60_000), 16), 1);
        assert_eq!(fit(1, Duration::ZERO, usize::MAX), 100_000_000);
    }
}

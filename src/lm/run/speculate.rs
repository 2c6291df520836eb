//! Speculative decoding: tokens are drafted, and the network verifies all drafts of a step in one run.
//!
//! A draft is accepted only if the network samples the same token at its position, with the random number and the
//! penalties of that position, from logits that are bit-identical to those of a plain run. So an answer is the same
//! with drafts and without, greedy or not. Drafts only decide how many tokens a run gives.

use super::answer::{Answering, Finish, STOPPED};
use super::lookup;
use super::session::Session;
use crate::error::Result;
use crate::graph::BatchShape;
use crate::lm::{ProgramKind, sequence_words};
use crate::op::SlotState;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Plain runs that are timed together.
const CALIBRATION_RUNS: u32 = 2;

impl Session {
    /// Times plain runs at the next position. The sampler is stopped, so they sample nothing, and later runs
    /// overwrite what they cache.
    pub(super) fn calibrate(&mut self) -> Result<()> {
        let position = self.cached.len();
        if position >= self.plan.ctx as usize {
            return Ok(());
        }
        self.write_slot(SlotState {
            stop: STOPPED,
            ..SlotState::default()
        })?;
        self.write_batch(&[0], position)?;
        let shape = BatchShape {
            tokens: 1,
            end: position as u32 + 1,
        };
        self.submit(ProgramKind::Decode, shape)?;
        self.wait()?;
        let start = Instant::now();
        for _ in 0..CALIBRATION_RUNS {
            self.submit(ProgramKind::Decode, shape)?;
        }
        self.wait_all()?;
        self.drafting.tuner.calibrate(start.elapsed() / CALIBRATION_RUNS);
        // The first token is sampled after the last chunk of the prompt.
        let first = position - self.last_chunk;
        let words = sequence_words(&self.cached[first..], first as u32);
        self.executor.write(self.plan.buffers.batch, &words)
    }

    /// Decodes with the draft head. The run that samples the first token is in flight. Each speculative step is
    /// submitted before the one before it is read: only the device knows where it begins. After the end of the answer
    /// it does nothing.
    pub(super) fn decode_with_head(&mut self, answering: &mut Answering) -> Result<Finish> {
        let ctx = self.plan.ctx as usize;
        let width = self.plan.drafts as usize + 1;
        // Most tokens that each run in flight can sample.
        let mut most = VecDeque::from([1]);
        // The last sampled token, which was not run yet.
        let mut pending = None;
        let mut since = Instant::now();
        loop {
            // Each run in flight samples at least one token.
            let more = answering.position() + self.in_flight.len() <= answering.last()
                && !answering.cancel.is_cancelled()
                && !self.drafting.paused;
            if more {
                let end = answering.position() + most.iter().sum::<usize>() - 1 + width;
                self.submit_decoding(ProgramKind::Speculate, width as u32, end.min(ctx))?;
                most.push_back(width);
            }
            if self.in_flight.is_empty() {
                // Drafting is paused or cancelled. A plain run continues with the last sampled token.
                self.cached.extend(pending);
                self.submit_decoding(ProgramKind::Decode, 1, self.cached.len())?;
                return self.decode_plain(answering);
            }
            let state = self.wait()?;
            most.pop_front();
            if pending.is_some() {
                self.cache_step(pending, &state);
                self.drafting.record(&state, since.elapsed());
            }
            since = Instant::now();
            pending = state.sampled().last().copied().or(pending);
            if let Some(finish) = answering.take(&state)? {
                while !self.in_flight.is_empty() {
                    let state = self.wait()?;
                    if state.stop == 0 && state.count != 0 {
                        self.cache_step(pending, &state);
                    }
                }
                self.finish_speculation(answering, pending)?;
                return Ok(finish);
            }
        }
    }

    /// Decodes with drafts from the conversation. The run that samples the first token is in flight. Each step is
    /// read before the next one is drafted.
    pub(super) fn decode_with_lookup(&mut self, answering: &mut Answering) -> Result<Finish> {
        // The cached tokens and the last sampled one.
        let mut history = self.cached.clone();
        let mut state = self.wait()?;
        loop {
            let pending = state.sampled().last().copied();
            history.extend_from_slice(state.sampled());
            if let Some(finish) = answering.take(&state)? {
                self.finish_speculation(answering, pending)?;
                return Ok(finish);
            }
            let position = self.cached.len();
            let budget = answering.last().saturating_sub(position + 1);
            let drafts = lookup::drafts(&history, budget.min(self.plan.drafts as usize));
            let batch = [&history[position..], drafts].concat();
            let kind = match drafts.is_empty() {
                true => ProgramKind::Decode,
                false => {
                    self.write_batch(&batch, position)?;
                    ProgramKind::Speculate
                }
            };
            self.submit_decoding(kind, batch.len() as u32, position + batch.len())?;
            state = self.wait()?;
            self.cache_step(pending, &state);
            self.drafting.record(&state, Duration::ZERO);
        }
    }

    /// Records the tokens that a step cached: its first one and the accepted drafts.
    fn cache_step(&mut self, first: Option<u32>, state: &SlotState) {
        self.run_end = self.run_end.max(self.cached.len() + 1 + state.drafted as usize);
        if let Some((_, accepted)) = state.sampled().split_last() {
            self.cached.extend(first);
            self.cached.extend_from_slice(accepted);
        }
    }

    /// Leaves the cache as plain decoding does: no token that was not emitted, and the last emitted one, unless none
    /// could have followed it.
    fn finish_speculation(&mut self, answering: &Answering, pending: Option<u32>) -> Result<()> {
        self.cached.truncate(answering.position());
        let position = self.cached.len();
        let Some(token) = pending.filter(|_| position + 1 == answering.position()) else {
            return Ok(());
        };
        if position >= answering.last() {
            return Ok(());
        }
        self.write_batch(&[token], position)?;
        self.submit_decoding(ProgramKind::Decode, 1, position + 1)?;
        // The answer has ended, so the sampled token is not used.
        self.wait()?;
        self.cached.push(token);
        self.run_end = self.run_end.max(self.cached.len());
        Ok(())
    }
}

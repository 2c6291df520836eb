//! Answers: settings for the sampler, then speculative or plain decoding, with one token in each run.

use super::answer::{Answering, Cancel, Finish, Generation, TokenSink};
use super::drafting::DraftMode;
use super::session::Session;
use crate::error::{Result, bail};
use crate::graph::BatchShape;
use crate::lm::ProgramKind;
use crate::op::SlotState;
use crate::sampling::SEEN_IN_PROMPT;

impl Session {
    /// Samples tokens after a prefill until the answer ends. `emit` receives each token and can end the answer. Plain
    /// decoding submits the run of the next token before it reads a token. Speculation gives the same tokens, several
    /// at a time.
    ///
    /// Errors: `Usage` without a prefill; `NonFinite` with the position; those of the executor. The session can be used
    /// afterwards; its cache is empty then.
    pub fn generate(&mut self, generation: &Generation, cancel: &Cancel, emit: TokenSink) -> Result<Finish> {
        let result = self.answer(&mut Answering {
            generation,
            cancel,
            emit,
            emitted: 0,
            start: self.cached.len(),
            ctx: self.plan.ctx as usize,
        });
        self.settle(result)
    }

    fn answer(&mut self, answering: &mut Answering) -> Result<Finish> {
        if self.last_chunk == 0 {
            bail!(Usage, "an answer needs a prompt");
        }
        let generation = answering.generation;
        let settings = generation.sampling.words(&generation.stops)?;
        self.decode_cost = Default::default();
        self.drafting.begin_answer();
        if generation.max_tokens == 0 {
            return Ok(Finish::Length);
        }
        self.executor.write(self.plan.buffers.settings, &settings)?;
        if generation.sampling.penalises() {
            let mut seen = vec![0; self.plan.vocab as usize];
            for &token in &self.cached {
                seen[token as usize] = SEEN_IN_PROMPT;
            }
            self.executor.write(self.plan.buffers.seen, &seen)?;
        }
        if self.drafting.needs_calibration() {
            self.calibrate()?;
        }
        self.write_slot(SlotState {
            last: answering.last() as u32,
            ..SlotState::default()
        })?;
        // The run that samples the first token, after the last token of the prompt.
        self.last_chunk = 0;
        let end = self.cached.len() as u32;
        self.submit(ProgramKind::Head, BatchShape { tokens: 1, end })?;
        let before = self.executor.counters();
        let finish = match self.drafting.mode() {
            DraftMode::Off => self.decode_plain(answering),
            DraftMode::Head => self.decode_with_head(answering),
            DraftMode::Lookup => self.decode_with_lookup(answering),
        }?;
        self.decode_cost.1 = self.executor.counters().since(&before);
        Ok(finish)
    }

    /// Decodes until the answer ends. The run that samples its next token is in flight.
    pub(super) fn decode_plain(&mut self, answering: &mut Answering) -> Result<Finish> {
        loop {
            // The run in flight samples the token at this position.
            let position = answering.position();
            let more = position < answering.last() && !answering.cancel.is_cancelled();
            if more {
                self.submit_decoding(ProgramKind::Decode, 1, position + 1)?;
            }
            let state = self.wait()?;
            if more {
                self.cached.extend_from_slice(state.sampled());
                self.run_end = self.cached.len();
            }
            if let Some(finish) = answering.take(&state)? {
                self.wait_all()?;
                return Ok(finish);
            }
            if !more {
                return Ok(Finish::Interrupted);
            }
        }
    }
}

//! Plain decoding: one token in each run.

use super::answer::{Answering, Finish};
use super::session::Session;
use crate::error::Result;
use crate::graph::BatchShape;
use crate::lm::ProgramKind;

impl Session {
    /// Submits the run that samples the first token, after the last token of the prompt.
    pub(super) fn submit_first(&mut self) -> Result<()> {
        let end = self.cached.len() as u32;
        self.last_chunk = 0;
        self.submit(ProgramKind::Head, BatchShape { tokens: 1, end })
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

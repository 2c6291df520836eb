//! The settings and the progress of an answer, and how it is cancelled.

use crate::error::{Result, bail};
use crate::op::SlotState;
use crate::sampling::Sampling;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// [`SlotState::stop`] after a stop token. Nothing is sampled in this state.
pub(super) const STOPPED: u32 = 1;
/// [`SlotState::stop`] after logits that are not finite.
const NOT_FINITE: u32 = 2;

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finish {
    /// A stop token or a stop text.
    Stop,
    /// The answer has the requested number of tokens.
    Length,
    /// The context is full.
    Context,
    /// The caller cancelled it.
    Interrupted,
}

impl Finish {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Finish::Stop => "stop",
            Finish::Length => "length",
            Finish::Context => "context",
            Finish::Interrupted => "interrupted",
        }
    }
}

/// The settings of an answer.
#[derive(Clone, Debug)]
pub struct Generation {
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Tokens that end the answer.
    pub stops: Vec<u32>,
    /// Most tokens of the answer.
    pub max_tokens: usize,
}

/// Receives each token of an answer. It can end the answer and gives the reason.
pub type TokenSink<'a> = &'a mut dyn FnMut(u32) -> ControlFlow<Finish>;

/// Cancels work from another thread. The work ends after the token, or the part of a prompt, that is running.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// A handle that is not cancelled. Clones share its state.
    pub fn new() -> Cancel {
        Cancel::default()
    }

    /// Requests the end of the work.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether the end was requested.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// An answer in progress.
pub(super) struct Answering<'a> {
    pub generation: &'a Generation,
    pub cancel: &'a Cancel,
    pub emit: TokenSink<'a>,
    /// Tokens passed to `emit`.
    pub emitted: usize,
    /// Position of the answer's first token.
    pub start: usize,
    /// Positions of the context.
    pub ctx: usize,
}

impl Answering<'_> {
    /// Position of the next token to emit.
    pub fn position(&self) -> usize {
        self.start + self.emitted
    }

    /// Position of the last possible token. A token at position `ctx` can be emitted but not run.
    pub fn last(&self) -> usize {
        (self.start.saturating_add(self.generation.max_tokens) - 1).min(self.ctx)
    }

    /// Emits the tokens that a run sampled, until the answer ends.
    ///
    /// Errors: `NonFinite` with the position, after the tokens before it.
    pub fn take(&mut self, state: &SlotState) -> Result<Option<Finish>> {
        let sampled = state.sampled();
        for (i, &token) in sampled.iter().enumerate() {
            let position = self.position();
            self.emitted += 1;
            let flow = (self.emit)(token);
            if state.stop == STOPPED && i + 1 == sampled.len() {
                return Ok(Some(Finish::Stop));
            }
            if let ControlFlow::Break(finish) = flow {
                return Ok(Some(finish));
            }
            if self.cancel.is_cancelled() {
                return Ok(Some(Finish::Interrupted));
            }
            if self.emitted >= self.generation.max_tokens {
                return Ok(Some(Finish::Length));
            }
            if position >= self.ctx {
                return Ok(Some(Finish::Context));
            }
        }
        if state.stop == NOT_FINITE {
            bail!(
                NonFinite,
                "the logits at position {} are not finite numbers",
                self.position()
            );
        }
        Ok(None)
    }
}

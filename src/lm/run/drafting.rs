//! Whether to draft, where drafts come from, and how many were accepted.

use super::tuner::Tuner;
use crate::lm::Plan;
use crate::op::SlotState;
use std::fmt;
use std::time::Duration;

/// Where drafts come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DraftMode {
    /// Nothing is drafted.
    #[default]
    Off,
    /// The model's draft head.
    Head,
    /// The tokens that followed the same tokens earlier in the conversation.
    Lookup,
}

impl DraftMode {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            DraftMode::Off => "off",
            DraftMode::Head => "mtp",
            DraftMode::Lookup => "lookup",
        }
    }
}

/// Statistics of speculation in one answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Speculated {
    /// Where the drafts came from.
    pub mode: DraftMode,
    /// Speculative steps that sampled something.
    pub steps: u64,
    /// Drafts that were verified.
    pub drafted: u64,
    /// Drafts that were accepted.
    pub accepted: u64,
}

/// A fact about drafting that a caller should know. Its `Display` is one sentence for users.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum DraftNotice {
    /// Speculation was slower than plain decoding.
    Paused {
        /// Mean tokens of a speculative step.
        tokens: f64,
        /// Mean time of a speculative step, in plain decode steps.
        cost: f64,
    },
}

impl fmt::Display for DraftNotice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DraftNotice::Paused { tokens, cost } => write!(
                f,
                "speculation is off until the next new conversation: a speculative step gave {tokens:.1} tokens in the time of \
                 {cost:.1} plain steps"
            ),
        }
    }
}

/// The drafting of a session, across answers.
#[derive(Default)]
pub(super) struct Drafting {
    /// Where the plan takes drafts from.
    source: DraftMode,
    pub only_while_it_pays: bool,
    pub tuner: Tuner,
    /// Whether drafting stopped because it was slower. The draft head's cache has gaps then, so it stays off until
    /// the next prefill from position 0.
    pub paused: bool,
    pub statistics: Speculated,
    pub notice: Option<DraftNotice>,
    /// Whether the notice was returned.
    noticed: bool,
}

impl Drafting {
    pub fn new(plan: &Plan) -> Drafting {
        Drafting::from(match (plan.drafts, plan.buffers.draft_batch) {
            (0, _) => DraftMode::Off,
            (_, Some(_)) => DraftMode::Head,
            (_, None) => DraftMode::Lookup,
        })
    }

    fn from(source: DraftMode) -> Drafting {
        Drafting {
            source,
            ..Drafting::default()
        }
    }

    /// Starts over with another plan.
    pub fn reset(&mut self, plan: &Plan) {
        let only_while_it_pays = self.only_while_it_pays;
        *self = Drafting {
            only_while_it_pays,
            ..Drafting::new(plan)
        };
    }

    /// A prefill begins at position 0, so the draft head's cache will be complete.
    pub fn begin_conversation(&mut self) {
        self.paused = false;
    }

    pub fn begin_answer(&mut self) {
        self.statistics = Speculated {
            mode: self.mode(),
            ..Speculated::default()
        };
        self.tuner.restart();
    }

    /// The source of drafts at present.
    pub fn mode(&self) -> DraftMode {
        match self.paused {
            true => DraftMode::Off,
            false => self.source,
        }
    }

    /// Whether plain runs have to be timed before drafting can be compared with them.
    pub fn needs_calibration(&self) -> bool {
        self.mode() == DraftMode::Head && self.only_while_it_pays && !self.tuner.is_calibrated()
    }

    /// Records a run of the verifier, unless it sampled nothing.
    pub fn record(&mut self, state: &SlotState, time: Duration) {
        if state.count == 0 {
            return;
        }
        self.statistics.steps += 1;
        self.statistics.drafted += u64::from(state.drafted);
        self.statistics.accepted += u64::from(state.count - 1);
        if !self.only_while_it_pays {
            return;
        }
        if let Some([tokens, cost]) = self.tuner.record(state.count, time) {
            self.paused = true;
            if !std::mem::replace(&mut self.noticed, true) {
                self.notice = Some(DraftNotice::Paused { tokens, cost });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(drafting: &mut Drafting, steps: u32, drafted: u32, accepted: u32) {
        let state = SlotState {
            count: accepted + 1,
            drafted,
            ..SlotState::default()
        };
        (0..steps).for_each(|_| drafting.record(&state, Duration::from_millis(20)));
    }

    #[test]
    fn a_head_that_loses_pauses_until_the_next_conversation() {
        let mut drafting = Drafting::from(DraftMode::Head);
        drafting.only_while_it_pays = true;
        assert!(drafting.needs_calibration());
        drafting.tuner.calibrate(Duration::from_millis(10));
        assert!(!drafting.needs_calibration());
        record(&mut drafting, 32, 3, 2);
        assert_eq!(drafting.mode(), DraftMode::Head, "three tokens in the time of two");
        record(&mut drafting, 32, 3, 0);
        assert_eq!(drafting.mode(), DraftMode::Off);
        let notice = drafting.notice.take();
        assert_eq!(notice, Some(DraftNotice::Paused { tokens: 1.0, cost: 2.0 }));
        assert!(notice.unwrap().to_string().contains("1.0 tokens in the time of 2.0"));
        drafting.begin_conversation();
        assert_eq!(drafting.mode(), DraftMode::Head);
        record(&mut drafting, 32, 3, 0);
        assert_eq!((drafting.mode(), drafting.notice), (DraftMode::Off, None));
    }
}

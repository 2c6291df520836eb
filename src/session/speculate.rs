//! Answers in speculative rounds: tokens are drafted, and the network judges all drafts of a round in one run.
//!
//! A draft stands only if the network samples that very token at its position, with the position's own random number and
//! penalties, from logits that are those of a plain run to the bit. So an answer is the same with drafts and without, greedy or
//! not, and the distribution of sampled tokens is untouched; drafts only decide how many tokens a run gives.

use super::tuner::{Loss, Tuner};
use super::{Answering, Finish, Session, lookup};
use crate::error::Result;
use crate::program::{Ctl, Extent, Plan, Which};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Drafts after which a reading of hidden states is judged.
const TRIAL: u64 = 32;

/// Where drafts come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DraftMode {
    /// There are none.
    #[default]
    Off,
    /// The model's draft head.
    Head,
    /// What followed the same tokens earlier in the conversation.
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

/// What drafting did for an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Speculated {
    /// Where the drafts came from.
    pub mode: DraftMode,
    /// Rounds that sampled something.
    pub rounds: u64,
    /// Drafts that were judged.
    pub drafted: u64,
    /// Drafts that stood.
    pub accepted: u64,
}

/// Which of the head's two readings of hidden states is in use, where the file does not say.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Trial {
    Settled,
    /// Drafts and those that stood, with the first reading.
    First(u64, u64),
    /// The share that stood with the first; drafts and those that stood with the other.
    Other(f64, u64, u64),
}

/// A session's drafting, across answers.
pub(super) struct Drafting {
    mode: DraftMode,
    /// Whether it ends when plain runs would be faster.
    only_while_it_pays: bool,
    tuner: Tuner,
    /// It did not pay: the head has missed tokens, and rests until a prompt begins anew.
    resting: bool,
    other_reading: bool,
    trial: Trial,
    done: Speculated,
    notices: Vec<String>,
    said: bool,
}

impl Drafting {
    pub fn new(plan: &Plan) -> Drafting {
        let mode = match (plan.drafts, plan.fixed.head) {
            (0, _) => DraftMode::Off,
            (_, Some(_)) => DraftMode::Head,
            (_, None) => DraftMode::Lookup,
        };
        Drafting {
            mode,
            only_while_it_pays: false,
            tuner: Tuner::default(),
            resting: false,
            other_reading: false,
            trial: match plan.program(Which::OtherRound).steps.is_empty() {
                true => Trial::Settled,
                false => Trial::First(0, 0),
            },
            done: Speculated::default(),
            notices: Vec::new(),
            said: false,
        }
    }

    /// Another choice of steps runs: it may have no rounds.
    pub fn begin_with(&mut self, plan: &Plan) {
        let only_while_it_pays = self.only_while_it_pays;
        *self = Drafting {
            only_while_it_pays,
            ..Drafting::new(plan)
        };
    }

    /// A prompt begins at position 0: the head will see all of it.
    pub fn begin_anew(&mut self) {
        self.resting = false;
    }

    pub fn begin_answer(&mut self) {
        self.done = Speculated {
            mode: self.mode(),
            ..Speculated::default()
        };
        self.tuner.restart();
    }

    fn mode(&self) -> DraftMode {
        match self.resting {
            true => DraftMode::Off,
            false => self.mode,
        }
    }

    /// The program of prompts.
    pub fn prefill(&self) -> Which {
        match self.other_reading {
            true => Which::OtherPrefill,
            false => Which::Prefill,
        }
    }

    /// The program of rounds.
    fn round(&self) -> Which {
        match self.other_reading {
            true => Which::OtherRound,
            false => Which::Round,
        }
    }

    /// Counts a run that judged drafts and sampled something.
    fn count(&mut self, ctl: &Ctl, time: Duration) {
        if ctl.count == 0 {
            return;
        }
        let (drafted, accepted) = (u64::from(ctl.drafted), u64::from(ctl.count.saturating_sub(1)));
        self.done.rounds += 1;
        self.done.drafted += drafted;
        self.done.accepted += accepted;
        self.try_readings(drafted, accepted);
        if self.only_while_it_pays
            && let Some(Loss { tokens, cost }) = self.tuner.round(ctl.count, time)
        {
            self.resting = true;
            if !std::mem::replace(&mut self.said, true) {
                self.notices.push(format!(
                    "drafting is off until a prompt begins anew: a round gives {tokens:.1} tokens in the time of {cost:.1}"
                ));
            }
        }
    }

    fn try_readings(&mut self, more: u64, stood: u64) {
        self.trial = match self.trial {
            Trial::Settled => Trial::Settled,
            Trial::First(drafted, accepted) => match (drafted + more, accepted + stood) {
                (drafted, accepted) if drafted < TRIAL => Trial::First(drafted, accepted),
                // Even a poor head with its own reading does better than one in sixteen.
                (drafted, accepted) if accepted * 16 >= drafted => Trial::Settled,
                (drafted, accepted) => {
                    self.other_reading = true;
                    Trial::Other(accepted as f64 / drafted as f64, 0, 0)
                }
            },
            Trial::Other(first, drafted, accepted) => match (drafted + more, accepted + stood) {
                (drafted, accepted) if drafted < TRIAL => Trial::Other(first, drafted, accepted),
                (drafted, accepted) => {
                    let other = accepted as f64 / drafted as f64;
                    self.other_reading = other > first;
                    self.notices.push(format!(
                        "the file does not say which hidden state its draft head reads: {:.0} % of its drafts stand with the \
                         one before the final norm, {:.0} % with the one after it; the better is kept",
                        first * 100.0,
                        other * 100.0
                    ));
                    Trial::Settled
                }
            },
        };
    }
}

impl Session {
    /// From now on the draft head rests when plain runs would be faster; what each takes is measured. Prompt lookup goes on.
    pub fn draft_only_while_it_pays(&mut self) {
        self.drafting.only_while_it_pays = true;
    }

    /// What drafting did for the last answer.
    pub fn speculated(&self) -> Speculated {
        self.drafting.done
    }

    /// What should be said about drafting, each thing once.
    pub fn take_notices(&mut self) -> Vec<String> {
        std::mem::take(&mut self.drafting.notices)
    }

    /// The answer, in rounds where there are any.
    pub(super) fn speculate(&mut self, answering: &mut Answering) -> Result<Finish> {
        let mode = self.drafting.mode();
        let columns = self.pending_columns;
        if mode == DraftMode::Head {
            if self.drafting.only_while_it_pays && !self.drafting.tuner.is_calibrated() {
                self.calibrate()?;
            }
            self.write_ctl(&Ctl {
                pos: self.cached.len() as u32 - columns,
                columns,
                last: answering.last(self.plan.ctx) as u32,
                ..Ctl::default()
            })?;
        }
        self.submit_head()?;
        let before = self.executor.counters();
        let finish = match mode {
            DraftMode::Off => self.sample(answering),
            DraftMode::Head => self.head_rounds(answering),
            DraftMode::Lookup => self.lookup_rounds(answering),
        }?;
        self.decode_cost.1 = self.executor.counters().since(&before);
        Ok(finish)
    }

    /// Measures plain runs: at the next position, as after a stop, so that nothing is sampled and everything they leave is
    /// overwritten.
    fn calibrate(&mut self) -> Result<()> {
        let pos = self.cached.len() as u32;
        if pos >= self.plan.ctx {
            return Ok(());
        }
        self.write_ctl(&Ctl {
            pos,
            columns: 1,
            stop: 1,
            ..Ctl::default()
        })?;
        let extent = Extent {
            columns: 1,
            end: pos + 1,
        };
        self.submit(Which::Decode, extent)?;
        self.wait()?;
        let start = Instant::now();
        const RUNS: u32 = 2;
        for _ in 0..RUNS {
            self.submit(Which::Decode, extent)?;
        }
        for _ in 0..RUNS {
            self.wait()?;
        }
        self.drafting.tuner.calibrate(start.elapsed() / RUNS);
        Ok(())
    }

    /// Rounds with the draft head; the first token's run is under way. A round is submitted before the one before it is
    /// read: where it begins is known to the device alone, and after the end it does nothing.
    fn head_rounds(&mut self, answering: &mut Answering) -> Result<Finish> {
        let ctx = self.plan.ctx;
        let width = self.plan.drafts + 1;
        // Most tokens of each run in flight.
        let mut most = VecDeque::from([1]);
        // The token sampled last, which has not been run.
        let mut pending = None;
        let mut since = Instant::now();
        loop {
            // Each run in flight gives a token at least.
            let more = answering.position() + self.in_flight.len() <= answering.last(ctx)
                && !answering.cancel.is_cancelled()
                && !self.drafting.resting;
            if more {
                let end = answering.position() as u32 + most.iter().sum::<u32>() - 1 + width;
                let extent = Extent {
                    columns: width,
                    end: end.min(ctx),
                };
                self.submit(self.drafting.round(), extent)?;
                most.push_back(width);
                self.decode_cost.0 += 1;
            }
            if self.in_flight.is_empty() {
                // Drafting has been given up; the token sampled last is run as any other.
                self.cached.extend(pending);
                let end = self.cached.len() as u32;
                self.submit(Which::Decode, Extent { columns: 1, end })?;
                self.decode_cost.0 += 1;
                return self.sample(answering);
            }
            let ctl = self.wait()?;
            most.pop_front();
            if pending.is_some() {
                self.cache_round(pending, &ctl);
                self.drafting.count(&ctl, since.elapsed());
            }
            since = Instant::now();
            pending = ctl.sampled().last().copied().or(pending);
            if let Some(finish) = answering.take(&ctl, ctx)? {
                while !self.in_flight.is_empty() {
                    let ctl = self.wait()?;
                    if ctl.stop == 0 && ctl.count != 0 {
                        self.cache_round(pending, &ctl);
                    }
                }
                self.end_rounds(answering, pending)?;
                return Ok(finish);
            }
        }
    }

    /// Rounds with drafts from the conversation; the first token's run is under way. Each round is read before the next is
    /// drafted.
    fn lookup_rounds(&mut self, answering: &mut Answering) -> Result<Finish> {
        let ctx = self.plan.ctx;
        let mut ctl = self.wait()?;
        loop {
            let pending = ctl.sampled().last().copied();
            if let Some(finish) = answering.take(&ctl, ctx)? {
                self.end_rounds(answering, pending)?;
                return Ok(finish);
            }
            let pos = self.cached.len();
            let room = answering.last(ctx).saturating_sub(pos + 1);
            let mut history = self.cached.clone();
            history.extend(pending);
            let drafts = lookup::drafts(&history, room.min(self.plan.drafts as usize));
            let columns = 1 + drafts.len() as u32;
            let which = if drafts.is_empty() { Which::Decode } else { Which::Round };
            if which == Which::Round {
                ctl.tokens[1..]
                    .iter_mut()
                    .zip(drafts)
                    .for_each(|(to, &draft)| *to = draft);
                ctl.columns = columns;
                self.write_ctl(&ctl)?;
            }
            let extent = Extent {
                columns,
                end: pos as u32 + columns,
            };
            self.submit(which, extent)?;
            self.decode_cost.0 += 1;
            ctl = self.wait()?;
            self.cache_round(pending, &ctl);
            self.drafting.count(&ctl, Duration::ZERO);
        }
    }

    /// What a round from this token on left in the caches.
    fn cache_round(&mut self, pending: Option<u32>, ctl: &Ctl) {
        self.run_end = self.run_end.max(self.cached.len() + 1 + ctl.drafted as usize);
        if let Some((_, accepted)) = ctl.sampled().split_last() {
            self.cached.extend(pending);
            self.cached.extend_from_slice(accepted);
        }
    }

    /// Leaves the caches as an answer without rounds does: no token that was not handed out, and the last one that was, unless
    /// nothing could have followed it.
    fn end_rounds(&mut self, answering: &Answering, pending: Option<u32>) -> Result<()> {
        self.cached.truncate(answering.position());
        let pos = self.cached.len();
        let Some(token) = pending.filter(|_| pos + 1 == answering.position()) else {
            return Ok(());
        };
        if pos >= answering.last(self.plan.ctx) {
            return Ok(());
        }
        // As after a stop, so that nothing is sampled.
        let mut ctl = Ctl {
            pos: pos as u32,
            columns: 1,
            stop: 1,
            ..Ctl::default()
        };
        ctl.tokens[0] = token;
        self.write_ctl(&ctl)?;
        let end = pos as u32 + 1;
        self.submit(Which::Decode, Extent { columns: 1, end })?;
        self.decode_cost.0 += 1;
        self.wait()?;
        self.cached.push(token);
        self.run_end = self.run_end.max(self.cached.len());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drafting(trial: Trial) -> Drafting {
        Drafting {
            mode: DraftMode::Head,
            only_while_it_pays: false,
            tuner: Tuner::default(),
            resting: false,
            other_reading: false,
            trial,
            done: Speculated::default(),
            notices: Vec::new(),
            said: false,
        }
    }

    fn rounds(drafting: &mut Drafting, count: u32, drafted: u32, accepted: u32) {
        let ctl = Ctl {
            count: accepted + 1,
            drafted,
            ..Ctl::default()
        };
        (0..count).for_each(|_| drafting.count(&ctl, Duration::from_millis(20)));
    }

    #[test]
    fn a_reading_that_does_well_stays_without_a_word() {
        let mut drafting = drafting(Trial::First(0, 0));
        rounds(&mut drafting, 7, 4, 0);
        assert!(matches!(drafting.trial, Trial::First(28, 0)));
        rounds(&mut drafting, 1, 4, 2);
        assert_eq!((drafting.trial, drafting.prefill()), (Trial::Settled, Which::Prefill));
        rounds(&mut drafting, 50, 4, 0);
        assert!(!drafting.other_reading && drafting.notices.is_empty());
    }

    #[test]
    fn the_better_of_two_readings_is_kept_and_said_once() {
        for (stands, other) in [(1, true), (0, false)] {
            let mut drafting = drafting(Trial::First(0, 0));
            rounds(&mut drafting, 8, 4, 0);
            assert_eq!(
                (drafting.round(), drafting.prefill()),
                (Which::OtherRound, Which::OtherPrefill)
            );
            rounds(&mut drafting, 8, 4, stands);
            assert_eq!((drafting.trial, drafting.other_reading), (Trial::Settled, other));
            assert_eq!(drafting.notices.len(), 1);
        }
    }

    #[test]
    fn a_head_that_loses_rests_until_a_prompt_begins_anew() {
        let mut drafting = drafting(Trial::Settled);
        drafting.only_while_it_pays = true;
        drafting.tuner.calibrate(Duration::from_millis(10));
        rounds(&mut drafting, 32, 3, 2);
        assert_eq!(drafting.mode(), DraftMode::Head, "three tokens in the time of two");
        rounds(&mut drafting, 32, 3, 0);
        assert_eq!(drafting.mode(), DraftMode::Off);
        drafting.begin_anew();
        assert_eq!(drafting.mode(), DraftMode::Head);
        rounds(&mut drafting, 32, 3, 0);
        assert_eq!((drafting.mode(), drafting.notices.len()), (DraftMode::Off, 1));
    }
}

//! Whether drafting pays: times of rounds against the time of a plain run.
//!
//! Knows durations and counts, not where they come from; equal numbers give equal verdicts.

use std::time::Duration;

/// Rounds that are looked at together.
const WINDOW: u32 = 16;

/// Adds up rounds and judges every window of them.
#[derive(Clone, Debug, Default)]
pub(super) struct Tuner {
    /// What a plain run takes; nothing is judged before this is known.
    plain: Option<Duration>,
    rounds: u32,
    tokens: u32,
    time: Duration,
}

/// A window that lost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Loss {
    /// Tokens of a round, on average.
    pub tokens: f64,
    /// Plain runs that take as long as a round.
    pub cost: f64,
}

impl Tuner {
    /// Whether it knows what a plain run takes.
    pub fn is_calibrated(&self) -> bool {
        self.plain.is_some()
    }

    /// Tells what a plain run takes.
    pub fn calibrate(&mut self, plain: Duration) {
        self.plain = Some(plain);
    }

    /// Forgets the window that is not full.
    pub fn restart(&mut self) {
        (self.rounds, self.tokens, self.time) = (0, 0, Duration::ZERO);
    }

    /// Counts a round; a loss when the window is full and its tokens would have come faster without drafts.
    pub fn round(&mut self, tokens: u32, time: Duration) -> Option<Loss> {
        let plain = self.plain?;
        self.rounds += 1;
        self.tokens = self.tokens.saturating_add(tokens);
        self.time += time;
        if self.rounds < WINDOW {
            return None;
        }
        let loss = Loss {
            tokens: f64::from(self.tokens) / f64::from(self.rounds),
            cost: self.time.as_secs_f64() / plain.as_secs_f64().max(1e-9) / f64::from(self.rounds),
        };
        self.restart();
        (loss.cost > loss.tokens).then_some(loss)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(tuner: &mut Tuner, count: u32, tokens: u32, ms: u64) -> Vec<Option<Loss>> {
        (0..count)
            .map(|_| tuner.round(tokens, Duration::from_millis(ms)))
            .collect()
    }

    #[test]
    fn a_window_is_judged_as_a_whole() {
        let mut tuner = Tuner::default();
        assert!(
            rounds(&mut tuner, 64, 1, 1000).iter().all(Option::is_none),
            "nothing to compare with"
        );
        tuner.calibrate(Duration::from_millis(10));
        // Two tokens in the time of one and a half.
        assert!(rounds(&mut tuner, 64, 2, 15).iter().all(Option::is_none));
        let verdicts = rounds(&mut tuner, WINDOW, 1, 15);
        assert!(verdicts[..WINDOW as usize - 1].iter().all(Option::is_none));
        let loss = verdicts[WINDOW as usize - 1].unwrap();
        assert!(
            (loss.tokens - 1.0).abs() < 1e-9 && (loss.cost - 1.5).abs() < 1e-9,
            "{loss:?}"
        );
    }

    #[test]
    fn a_restart_begins_a_new_window() {
        let mut tuner = Tuner::default();
        tuner.calibrate(Duration::from_millis(10));
        rounds(&mut tuner, WINDOW - 1, 1, 100);
        tuner.restart();
        assert!(rounds(&mut tuner, WINDOW, 4, 20).iter().all(Option::is_none));
    }
}

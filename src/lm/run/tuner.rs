//! Whether drafting pays: times of speculative steps against the time of a plain step.
//!
//! Knows durations and counts, not their source. Equal numbers give equal results.

use std::time::Duration;

/// Speculative steps that are evaluated together.
const WINDOW: u32 = 16;

/// Adds up speculative steps and evaluates every window of them.
#[derive(Clone, Debug, Default)]
pub(super) struct Tuner {
    /// Time of a plain step. Nothing is evaluated before it is known.
    plain: Option<Duration>,
    steps: u32,
    tokens: u32,
    time: Duration,
}

/// A window that was slower than plain decoding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Loss {
    /// Mean tokens of a speculative step.
    pub tokens: f64,
    /// Mean time of a speculative step, in plain steps.
    pub cost: f64,
}

impl Tuner {
    /// Whether the time of a plain step is known.
    pub fn is_calibrated(&self) -> bool {
        self.plain.is_some()
    }

    /// Sets the time of a plain step.
    pub fn calibrate(&mut self, plain: Duration) {
        self.plain = Some(plain);
    }

    /// Drops an incomplete window.
    pub fn restart(&mut self) {
        (self.steps, self.tokens, self.time) = (0, 0, Duration::ZERO);
    }

    /// Records a speculative step. Returns a loss if a window is complete and plain steps would have been faster.
    pub fn record(&mut self, tokens: u32, time: Duration) -> Option<Loss> {
        let plain = self.plain?;
        self.steps += 1;
        self.tokens = self.tokens.saturating_add(tokens);
        self.time += time;
        if self.steps < WINDOW {
            return None;
        }
        let loss = Loss {
            tokens: f64::from(self.tokens) / f64::from(self.steps),
            cost: self.time.as_secs_f64() / plain.as_secs_f64().max(1e-9) / f64::from(self.steps),
        };
        self.restart();
        (loss.cost > loss.tokens).then_some(loss)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(tuner: &mut Tuner, steps: u32, tokens: u32, ms: u64) -> Vec<Option<Loss>> {
        (0..steps)
            .map(|_| tuner.record(tokens, Duration::from_millis(ms)))
            .collect()
    }

    #[test]
    fn a_window_is_evaluated_as_a_whole() {
        let mut tuner = Tuner::default();
        assert!(
            record(&mut tuner, 64, 1, 1000).iter().all(Option::is_none),
            "nothing to compare with"
        );
        tuner.calibrate(Duration::from_millis(10));
        // Two tokens in the time of one and a half.
        assert!(record(&mut tuner, 64, 2, 15).iter().all(Option::is_none));
        let results = record(&mut tuner, WINDOW, 1, 15);
        assert!(results[..WINDOW as usize - 1].iter().all(Option::is_none));
        let loss = results[WINDOW as usize - 1].unwrap();
        assert!(
            (loss.tokens - 1.0).abs() < 1e-9 && (loss.cost - 1.5).abs() < 1e-9,
            "{loss:?}"
        );
    }

    #[test]
    fn a_restart_begins_a_new_window() {
        let mut tuner = Tuner::default();
        tuner.calibrate(Duration::from_millis(10));
        record(&mut tuner, WINDOW - 1, 1, 100);
        tuner.restart();
        assert!(record(&mut tuner, WINDOW, 4, 20).iter().all(Option::is_none));
    }
}

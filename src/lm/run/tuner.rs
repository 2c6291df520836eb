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

    /// Records a speculative step. Returns its mean tokens and its mean cost, in plain steps, if a window is complete
    /// and plain steps would have been faster.
    pub fn record(&mut self, tokens: u32, time: Duration) -> Option<[f64; 2]> {
        let plain = self.plain?;
        self.steps += 1;
        self.tokens = self.tokens.saturating_add(tokens);
        self.time += time;
        if self.steps < WINDOW {
            return None;
        }
        let steps = f64::from(self.steps);
        let tokens = f64::from(self.tokens) / steps;
        let cost = self.time.as_secs_f64() / plain.as_secs_f64().max(1e-9) / steps;
        self.restart();
        (cost > tokens).then_some([tokens, cost])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(tuner: &mut Tuner, steps: u32, tokens: u32, ms: u64) -> Vec<Option<[f64; 2]>> {
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
        let [tokens, cost] = results[WINDOW as usize - 1].unwrap();
        assert!((tokens - 1.0).abs() < 1e-9 && (cost - 1.5).abs() < 1e-9, "{results:?}");
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

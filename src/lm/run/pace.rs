//! The number of steps of a program in one submission, from measured times.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Target time of a submission. Drivers reset a device that does not respond for seconds, and a cancel waits for
/// submissions in flight.
const SUBMISSION: Duration = Duration::from_millis(100);
/// Steps of a submission before any time is known.
pub(super) const FIRST_STEPS: usize = 16;
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

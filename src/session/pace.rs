//! How many steps of a program go into one submission. Knows time, not what steps do.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How long one submission should take: drivers reset a device that says nothing for seconds, and a cancel waits for what
/// is submitted.
const SUBMISSION: Duration = Duration::from_millis(100);
/// Steps of a submission when nothing is known of the device.
pub const FIRST_STEPS: usize = 16;
/// A submission has at most so many times the steps of the one before.
const GROWTH: usize = 4;

/// How fast a device gets through the parts of a program, of which two are under way at a time.
pub struct Pace {
    /// When the part before was done.
    since: Instant,
    /// Steps of the parts that nobody has waited for.
    under_way: VecDeque<usize>,
}

impl Pace {
    pub fn new() -> Pace {
        Pace {
            since: Instant::now(),
            under_way: VecDeque::new(),
        }
    }

    /// A part of so many steps is under way.
    pub fn submitted(&mut self, steps: usize) {
        self.under_way.push_back(steps);
    }

    /// The oldest part is done: how many steps the next one has, when the last one had `steps`.
    pub fn next(&mut self, steps: usize) -> usize {
        let took = self.since.elapsed();
        self.since = Instant::now();
        fit(self.under_way.pop_front().unwrap_or(steps), took, steps)
    }
}

/// So many steps as fit into a submission when `done` of them took so long, and not many more than `before`.
fn fit(done: usize, took: Duration, before: usize) -> usize {
    let fit = done as f64 * SUBMISSION.as_secs_f64() / took.as_secs_f64().max(1e-9);
    (fit as usize).clamp(1, before.saturating_mul(GROWTH))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn submissions_become_as_long_as_they_should_be() {
        let ms = Duration::from_millis;
        assert_eq!(fit(16, ms(100), 16), 16);
        assert_eq!(fit(16, ms(400), 16), 4);
        assert_eq!(fit(16, ms(50), 16), 32);
        // The last part of a program is short, and still says how long a step takes.
        assert_eq!(fit(4, ms(25), 16), 16);
        // A fast device, by and by; a very slow one, still something.
        assert_eq!(fit(16, Duration::ZERO, 16), 64);
        assert_eq!(fit(16, ms(60_000), 16), 1);
        assert_eq!(fit(1, Duration::ZERO, usize::MAX), 100_000_000);
    }
}

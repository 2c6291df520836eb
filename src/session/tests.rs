//! Prefill in parts, on an executor that only keeps a list.

use super::*;
use std::ops::Range;
use std::sync::Mutex;
use std::time::Duration;

/// Steps of the prefill program.
const STEPS: usize = 100;
/// Columns of a chunk.
const CHUNK: u32 = 8;

type Log = Arc<Mutex<Vec<Range<usize>>>>;

/// Takes its time for every step, and is cancelled while it is busy with a submission.
struct Pretender {
    log: Log,
    step: Duration,
    cancel: Cancel,
    cancelled_at: usize,
}

impl Executor for Pretender {
    fn run(&mut self, _: Which, _: Range<usize>, _: Extent) -> Result<()> {
        Ok(())
    }

    fn submit(&mut self, which: Which, extent: Extent) -> Result<Ticket> {
        self.submit_part(which, 0..STEPS, extent)
    }

    fn select(&mut self, _: Arc<Plan>) -> Result<()> {
        Ok(())
    }

    fn submit_part(&mut self, _: Which, steps: Range<usize>, _: Extent) -> Result<Ticket> {
        std::thread::sleep(self.step * steps.len() as u32);
        let mut log = self.log.lock().unwrap();
        log.push(steps);
        if log.len() == self.cancelled_at {
            self.cancel.cancel();
        }
        Ok(Ticket(0))
    }

    fn wait(&mut self, _: Ticket) -> Result<Ctl> {
        Ok(Ctl::default())
    }

    fn replace(&mut self, _: Arc<Plan>, _: Arc<dyn crate::container::Tensors>, _: &[usize]) -> Result<()> {
        Ok(())
    }

    fn write(&mut self, _: usize, _: &[u32]) -> Result<()> {
        Ok(())
    }

    fn read(&mut self, _: usize, _: usize, _: usize) -> Result<Vec<u32>> {
        Ok(Vec::new())
    }

    fn counters(&self) -> Counters {
        Counters::default()
    }
}

fn session(step: Duration, cancelled_at: usize, kept_states: Option<u32>) -> (Session, Cancel, Log) {
    let plan = Plan::of_nothing(STEPS, CHUNK, kept_states);
    let (cancel, log) = (Cancel::new(), Log::default());
    let pretender = Pretender {
        log: log.clone(),
        step,
        cancel: cancel.clone(),
        cancelled_at,
    };
    (Session::new(Arc::new(plan), Box::new(pretender)), cancel, log)
}

/// Every chunk runs every step once and in order, in submissions that become as long as the device allows.
#[test]
fn a_fast_device_gets_a_chunk_at_once_and_a_slow_one_in_parts() {
    for (step, parts_of_a_late_chunk) in [(Duration::ZERO, 1..2), (Duration::from_millis(5), 3..12)] {
        let (mut session, cancel, log) = session(step, usize::MAX, None);
        let chunks = 5;
        let (run, flow) = session.prefill(&[1; CHUNK as usize * 5], &cancel).unwrap();
        assert_eq!((run, flow), (CHUNK as usize * chunks, ControlFlow::Continue(())));
        let log = log.lock().unwrap();
        let steps: Vec<usize> = log.iter().cloned().flatten().collect();
        assert_eq!(steps, (0..chunks).flat_map(|_| 0..STEPS).collect::<Vec<_>>());
        let last = log.len() - log.iter().rposition(|part| part.start == 0).unwrap();
        assert!(parts_of_a_late_chunk.contains(&last), "{step:?}: {log:?}");
    }
}

/// A cancel ends the prefill in the middle of a chunk, of which nothing counts.
#[test]
fn a_cancel_does_not_wait_for_the_chunk() {
    let (mut session, cancel, log) = session(Duration::from_millis(20), 4, None);
    let told = session.prefill(&[1; 20], &cancel).unwrap();
    assert_eq!(told, (0, ControlFlow::Break(())));
    assert_eq!(log.lock().unwrap().len(), 4);
    assert!(session.cached().is_empty());
    // The next prompt begins where nothing is cached, at the first step.
    let (run, flow) = session.prefill(&[1; 3], &Cancel::new()).unwrap();
    assert_eq!((run, flow), (3, ControlFlow::Continue(())));
    assert_eq!(log.lock().unwrap()[4].start, 0);
}

/// A cancel leaves recurrent states that belong to no position.
#[test]
fn a_cancel_waits_for_a_chunk_that_overwrites_states() {
    let chunk = CHUNK as usize;
    for (kept, run) in [(CHUNK, chunk), (CHUNK + 1, 0)] {
        let (mut session, cancel, log) = session(Duration::from_millis(10), 2, Some(kept));
        assert_eq!(
            session.prefill(&[1; 3 * CHUNK as usize], &cancel).unwrap(),
            (run, ControlFlow::Break(()))
        );
        assert_eq!(session.cached().len(), run);
        let steps = log.lock().unwrap().iter().map(ExactSizeIterator::len).sum::<usize>();
        assert_eq!(steps == STEPS, run > 0, "{steps} steps");
    }
}

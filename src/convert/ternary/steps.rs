//! Progress of a file that is written tensor by tensor.

use crate::convert::options::Event;
use crate::error::{Result, bail};
use std::cell::RefCell;
use std::ops::ControlFlow;

/// Told of every tensor; may end the conversion.
pub(super) type Progress<'a> = &'a mut dyn FnMut(Event) -> ControlFlow<()>;

/// Calls the caller's progress when a tensor was written.
pub(super) struct Steps<'a> {
    total: usize,
    /// The number of calls so far.
    state: RefCell<(usize, Progress<'a>)>,
}

impl<'a> Steps<'a> {
    pub fn new(total: usize, progress: Progress<'a>) -> Steps<'a> {
        let state = RefCell::new((0, progress));
        Steps { total, state }
    }

    /// Errors: `Interrupted` if the caller ends the conversion.
    pub fn step(&self, name: &str) -> Result<()> {
        let (done, progress) = &mut *self.state.borrow_mut();
        *done += 1;
        let event = Event::Tensor {
            done: (*done).min(self.total),
            total: self.total,
            name,
        };
        if progress(event).is_break() {
            bail!(Interrupted, "the conversion was cancelled");
        }
        Ok(())
    }
}

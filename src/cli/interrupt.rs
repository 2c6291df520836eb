//! Ctrl-C. The first one ends the work in hand where that work has something to keep; otherwise, and the second time, it
//! ends the program.

use super::Result;
use cmf_gpu::session::Cancel;
use cmf_gpu::{Error, Kind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What Ctrl-C does in this run of the program.
pub struct Interrupt(Arc<Mutex<State>>);

struct State {
    cancel: Cancel,
    graceful: bool,
}

impl Interrupt {
    /// Takes over Ctrl-C and requests to terminate.
    pub fn install() -> Result<Interrupt> {
        let state = Arc::new(Mutex::new(State {
            cancel: Cancel::new(),
            graceful: false,
        }));
        let interrupt = Interrupt(state.clone());
        ctrlc::set_handler(move || {
            let state = locked(&state);
            if state.cancel.is_cancelled() || !state.graceful {
                std::process::exit(130);
            }
            state.cancel.cancel();
        })
        .map_err(|err| Error::new(Kind::Io, format!("cannot listen for Ctrl-C: {err}")))?;
        Ok(interrupt)
    }

    /// From now on the first Ctrl-C sets the token that this returns.
    pub fn graceful(&self) -> Cancel {
        let mut state = locked(&self.0);
        state.graceful = true;
        state.cancel.clone()
    }

    /// The same, and what was interrupted before is forgotten.
    pub fn renewed(&self) -> Cancel {
        locked(&self.0).cancel = Cancel::new();
        self.graceful()
    }

    /// From now on Ctrl-C ends the program: there is nothing to keep.
    pub fn abrupt(&self) {
        locked(&self.0).graceful = false;
    }

    /// The token.
    pub fn cancel(&self) -> Cancel {
        locked(&self.0).cancel.clone()
    }
}

fn locked(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

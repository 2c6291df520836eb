//! Ctrl-C. The first one ends the work in hand where that work has something to keep; otherwise, and the second time, it
//! ends the program.

use super::Result;
use cmf_gpu::session::Cancel;
use cmf_gpu::{Error, Kind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What Ctrl-C does in this run of the program.
pub struct Interrupt {
    cancel: Cancel,
    graceful: Arc<AtomicBool>,
}

impl Interrupt {
    /// Takes over Ctrl-C and requests to terminate.
    pub fn install() -> Result<Interrupt> {
        let interrupt = Interrupt {
            cancel: Cancel::new(),
            graceful: Arc::new(AtomicBool::new(false)),
        };
        let (cancel, graceful) = (interrupt.cancel.clone(), interrupt.graceful.clone());
        ctrlc::set_handler(move || {
            if cancel.is_cancelled() || !graceful.load(Ordering::Relaxed) {
                std::process::exit(130);
            }
            cancel.cancel();
        })
        .map_err(|err| Error::new(Kind::Io, format!("cannot listen for Ctrl-C: {err}")))?;
        Ok(interrupt)
    }

    /// From now on the first Ctrl-C sets the token that this returns.
    pub fn graceful(&self) -> Cancel {
        self.graceful.store(true, Ordering::Relaxed);
        self.cancel.clone()
    }

    /// The token.
    pub fn cancel(&self) -> &Cancel {
        &self.cancel
    }
}

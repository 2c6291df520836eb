//! Ctrl-C. The first one ends the work in hand where that work has something to keep; otherwise, and the second time, it
//! ends the program.

use super::Result;
use cmf_gpu::session::Cancel;
use cmf_gpu::{Error, Kind};
#[cfg(unix)]
use nix::sys::termios::{SetArg, Termios, tcgetattr, tcsetattr};
#[cfg(unix)]
use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What Ctrl-C does in this run of the program.
pub struct Interrupt(Arc<Mutex<State>>);

struct State {
    cancel: Cancel,
    graceful: bool,
    /// The terminal as it was before an editor took it over.
    #[cfg(unix)]
    terminal: Option<Termios>,
}

impl State {
    /// Ends the program: there is nothing to keep.
    fn exit(&self) -> ! {
        #[cfg(unix)]
        if let (false, Some(terminal)) = (self.graceful, &self.terminal) {
            // An editor is reading a line: keys are not shown, and pasted text comes in brackets.
            let _ = std::io::stdout().write_all(b"\x1b[?2004l\r\n");
            let _ = std::io::stdout().flush();
            let _ = tcsetattr(std::io::stdin(), SetArg::TCSANOW, terminal);
        }
        std::process::exit(130)
    }
}

impl Interrupt {
    /// Takes over Ctrl-C and requests to terminate.
    pub fn install() -> Result<Interrupt> {
        let state = Arc::new(Mutex::new(State {
            cancel: Cancel::new(),
            graceful: false,
            #[cfg(unix)]
            terminal: None,
        }));
        let interrupt = Interrupt(state.clone());
        ctrlc::set_handler(move || {
            let state = locked(&state);
            if state.cancel.is_cancelled() || !state.graceful {
                state.exit();
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

    /// An editor will take over the terminal on stdin: a signal that ends the program gives it back as it is now.
    pub fn remember_terminal(&self) {
        #[cfg(unix)]
        {
            // Of what is no terminal there is nothing to remember.
            locked(&self.0).terminal = tcgetattr(std::io::stdin()).ok();
        }
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

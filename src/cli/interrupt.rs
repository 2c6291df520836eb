//! Ctrl-C. The first one cancels the current work if that work asked for it; otherwise, and the second time, it ends the
//! program.

use cmf_gpu::{Cancel, Error, Kind, Result};
#[cfg(unix)]
use nix::sys::termios::{SetArg, Termios, tcgetattr, tcsetattr};
#[cfg(unix)]
use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The effect of Ctrl-C in this run of the program.
pub struct Interrupt(Arc<Mutex<State>>);

struct State {
    cancel: Cancel,
    graceful: bool,
    /// The settings of the terminal before a line editor changed them.
    #[cfg(unix)]
    terminal: Option<Termios>,
}

impl State {
    /// Ends the program.
    fn exit(&self) -> ! {
        #[cfg(unix)]
        if let (false, Some(terminal)) = (self.graceful, &self.terminal) {
            // A line editor is active: echo is off, and pasted text arrives in brackets.
            let _ = std::io::stdout().write_all(b"\x1b[?2004l\r\n");
            let _ = std::io::stdout().flush();
            let _ = tcsetattr(std::io::stdin(), SetArg::TCSANOW, terminal);
        }
        std::process::exit(130)
    }
}

impl Interrupt {
    /// Handles Ctrl-C and termination signals from now on.
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

    /// From now on the first Ctrl-C sets the returned token.
    pub fn graceful(&self) -> Cancel {
        let mut state = locked(&self.0);
        state.graceful = true;
        state.cancel.clone()
    }

    /// Like [`Interrupt::graceful`], with a new token.
    pub fn renewed(&self) -> Cancel {
        locked(&self.0).cancel = Cancel::new();
        self.graceful()
    }

    /// Saves the settings of the terminal on stdin; a signal that ends the program restores them.
    pub fn remember_terminal(&self) {
        #[cfg(unix)]
        {
            locked(&self.0).terminal = tcgetattr(std::io::stdin()).ok();
        }
    }

    /// From now on Ctrl-C ends the program.
    pub fn abrupt(&self) {
        locked(&self.0).graceful = false;
    }

    /// The current token.
    pub fn cancel(&self) -> Cancel {
        locked(&self.0).cancel.clone()
    }
}

fn locked(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

//! What every command gets, and how a command ends.

use super::interrupt::Interrupt;
use super::output::Output;
use cmf_gpu::{Error, Kind};

/// Where to write, and whether to stop.
pub struct Context {
    pub out: Output,
    pub interrupt: Interrupt,
}

/// How a command ends when nothing failed.
pub enum Outcome {
    /// Exit code 0.
    Done,
    /// A check failed and was reported: exit code 1.
    Failed,
    /// Ctrl-C: exit code 130.
    Interrupted,
}

/// A command's result.
pub type Result<T = Outcome, E = Error> = cmf_gpu::Result<T, E>;

/// An error about how the program was called.
pub fn usage(message: impl Into<String>) -> Error {
    Error::new(Kind::Usage, message)
}

/// The error of work that Ctrl-C ended.
pub fn interrupted() -> Error {
    Error::new(Kind::Interrupted, "cancelled")
}

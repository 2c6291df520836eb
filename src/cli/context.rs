//! What every command gets, how it reports its result, and how it ends.

use super::interrupt::Interrupt;
use super::output::{Output, shown, size};
use cmf_gpu::tools::{Progress, Written};
use cmf_gpu::{Cancel, Error, Kind};
use serde_json::{Value, json};
use std::ops::ControlFlow;
use std::path::Path;

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

/// Errors: `Interrupted` after Ctrl-C.
pub fn unless_cancelled(cancel: &Cancel) -> Result<()> {
    match cancel.is_cancelled() {
        true => Err(interrupted()),
        false => Ok(()),
    }
}

/// The outcome of a check.
pub fn checked(passed: bool) -> Result {
    Ok(if passed { Outcome::Done } else { Outcome::Failed })
}

impl Context {
    /// Ends a command with its answer: `object` with `--json`, else `lines`.
    pub fn answer(&mut self, object: Value, lines: impl IntoIterator<Item = impl AsRef<str>>) -> Result {
        match self.out.json {
            true => self.out.json(&object)?,
            false => lines.into_iter().try_for_each(|line| self.out.line(line))?,
        }
        Ok(Outcome::Done)
    }

    /// Calls `work` with a progress bar of bytes; the first Ctrl-C cancels it.
    pub fn cancellable<T>(&self, title: &'static str, work: impl FnOnce(Progress) -> Result<T>) -> Result<T> {
        self.with_bar(title, true, work)
    }

    /// The same with a progress bar of bytes or, where `bytes` is false, of items.
    pub fn with_bar<T>(&self, title: &'static str, bytes: bool, work: impl FnOnce(Progress) -> Result<T>) -> Result<T> {
        let cancel = self.interrupt.graceful();
        let mut bar = self.out.progress(title, bytes);
        work(&mut |done, total| {
            bar.set(done, total);
            match cancel.is_cancelled() {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        })
    }

    /// Runs `work`, which writes `out`, and reports the result.
    pub fn writing(
        &mut self,
        title: &'static str,
        out: &Path,
        work: impl FnOnce(Progress) -> Result<Written>,
    ) -> Result {
        let written = self.cancellable(title, work)?;
        self.report("written:", &written, out)
    }

    /// Reports a file that was written or changed.
    pub fn report(&mut self, done: &str, written: &Written, out: &Path) -> Result {
        self.out.notices(&written.notes);
        let Written { tensors, bytes, notes } = written;
        let line = format!("{done} {}: {tensors} tensors, {}", shown(out), size(*bytes));
        let path = out.display().to_string();
        self.answer(
            json!({"out": path, "tensors": tensors, "bytes": bytes, "notes": notes}),
            [line],
        )
    }
}

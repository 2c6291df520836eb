//! Long work on files: a progress bar, cancellation with Ctrl-C, and the report of the written file.

use super::context::{Context, Outcome, Result};
use super::output::size;
use cmf_gpu::error::escape;
use cmf_gpu::tools::{Progress, Written};
use serde_json::json;
use std::ops::ControlFlow;
use std::path::Path;

/// Runs `work` with a progress bar; the first Ctrl-C cancels it.
pub fn cancellable<T>(
    title: &'static str,
    context: &mut Context,
    work: &mut dyn FnMut(Progress) -> Result<T>,
) -> Result<T> {
    let cancel = context.interrupt.graceful();
    let mut bar = context.out.progress(title, true);
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
    title: &'static str,
    out: &Path,
    context: &mut Context,
    work: &mut dyn FnMut(Progress) -> Result<Written>,
) -> Result {
    let written = cancellable(title, context, work)?;
    report("written:", &written, out, context)
}

/// Reports a file that was written or changed.
pub fn report(done: &str, written: &Written, out: &Path, context: &mut Context) -> Result {
    context.out.notices(&written.notes);
    let path = out.display().to_string();
    if context.out.json {
        context.out.json(&json!({
            "out": path,
            "tensors": written.tensors,
            "bytes": written.bytes,
            "notes": written.notes,
        }))?;
    } else {
        let (tensors, bytes) = (written.tensors, size(written.bytes));
        context
            .out
            .line(format!("{done} {}: {tensors} tensors, {bytes}", escape(path)))?;
    }
    Ok(Outcome::Done)
}

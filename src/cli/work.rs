//! Long work on files: a bar, Ctrl-C ends it without leaving anything behind, and what it wrote is told.

use super::output::size;
use super::{Context, Outcome, Result};
use cmf_gpu::error::escape;
use cmf_gpu::tools::{Progress, Written};
use serde_json::json;
use std::ops::ControlFlow;
use std::path::Path;

/// Does `work`, shows how far it is, and ends it at the first Ctrl-C.
pub fn cancellable<T>(
    what: &'static str,
    context: &mut Context,
    work: &mut dyn FnMut(Progress) -> Result<T>,
) -> Result<T> {
    let cancel = context.interrupt.graceful();
    let mut bar = context.out.progress(what, true);
    work(&mut |done, total| {
        bar.set(done, total);
        match cancel.is_cancelled() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    })
}

/// Does `work` that writes `out`, and tells about it.
pub fn writing(
    what: &'static str,
    out: &Path,
    context: &mut Context,
    work: &mut dyn FnMut(Progress) -> Result<Written>,
) -> Result {
    let written = cancellable(what, context, work)?;
    tell("written:", &written, out, context)
}

/// Tells what was done with which file.
pub fn tell(done: &str, written: &Written, out: &Path, context: &mut Context) -> Result {
    for note in &written.notes {
        context.out.note(format!("note: {note}"));
    }
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

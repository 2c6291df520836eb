//! Long work on files: a bar, and Ctrl-C ends it without leaving anything behind.

use super::{Context, Result};
use cmf_gpu::tools::Progress;
use std::ops::ControlFlow;

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

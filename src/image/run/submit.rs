//! Runs steps in short submissions, so that a device never looks hung and a cancelled run ends soon.

use crate::error::{Result, bail};
use crate::graph::{BatchShape, Executor, Ticket};
use crate::lm::run::Cancel;
use crate::op::BufferId;
use std::ops::Range;

/// Steps of one submission: about one block of the denoiser.
const STEPS: usize = 12;

/// Runs steps of a program for so many rows, and waits for them. Errors: `Interrupted`; those of the executor.
pub(super) fn run(
    executor: &mut dyn Executor,
    program: usize,
    steps: Range<usize>,
    rows: usize,
    cancel: &Cancel,
) -> Result<()> {
    let shape = BatchShape {
        tokens: rows as u32,
        end: rows as u32,
    };
    let mut before: Option<Ticket> = None;
    for start in steps.clone().step_by(STEPS) {
        if cancel.is_cancelled() {
            if let Some(ticket) = before.take() {
                executor.wait(ticket)?;
            }
            bail!(Interrupted, "cancelled");
        }
        let ticket = executor.submit(program, start..steps.end.min(start + STEPS), shape)?;
        // One submission runs while the next is made.
        if let Some(ticket) = before.replace(ticket) {
            executor.wait(ticket)?;
        }
    }
    if let Some(ticket) = before {
        executor.wait(ticket)?;
    }
    Ok(())
}

/// Writes f32 at the start of a buffer.
pub(super) fn write(executor: &mut dyn Executor, buffer: BufferId, values: &[f32]) -> Result<()> {
    executor.write(buffer, bytemuck::cast_slice(values))
}

/// Reads f32 from the start of a buffer. Errors: `NonFinite`, naming what was computed; those of the executor.
pub(super) fn read(executor: &mut dyn Executor, buffer: BufferId, count: usize, what: &str) -> Result<Vec<f32>> {
    let words = executor.read(buffer, 0, count)?;
    let values: Vec<f32> = words.into_iter().map(f32::from_bits).collect();
    match values.iter().all(|value| value.is_finite()) {
        true => Ok(values),
        false => bail!(NonFinite, "{what} is not a finite number everywhere"),
    }
}

/// The first `len` elements of rows that are padded to whole groups of 32.
pub(super) fn unpadded(rows: &[f32], len: usize) -> Vec<f32> {
    let rows = rows.chunks_exact(len.next_multiple_of(32));
    rows.flat_map(|row| &row[..len]).copied().collect()
}

/// Rows of `len` elements, padded to whole groups of 32.
pub(super) fn padded(rows: &[f32], len: usize) -> Vec<f32> {
    let mut all = Vec::new();
    for row in rows.chunks_exact(len) {
        all.extend_from_slice(row);
        all.resize(all.len().next_multiple_of(32), 0.0);
    }
    all
}

//! The text encoder on an executor.

use super::submit::{read, run, unpadded};
use crate::error::{Result, bail};
use crate::graph::Executor;
use crate::image::lower::TextPlan;
use crate::lm::run::Cancel;
use crate::lm::sequence_words;

/// A text encoder.
pub struct Encoder {
    executor: Box<dyn Executor>,
    plan: TextPlan,
}

impl Encoder {
    /// An encoder on an executor that performs the plan's graph.
    pub fn new(executor: Box<dyn Executor>, plan: TextPlan) -> Encoder {
        Encoder { executor, plan }
    }

    /// The features of a text, `[tokens, hidden]`. `watch` gets the number of each layer and the stream after it.
    ///
    /// Errors: `Usage` for an empty text and for too many tokens; `NonFinite`; `Interrupted`; those of the executor.
    pub fn features(&mut self, ids: &[u32], cancel: &Cancel, watch: &mut dyn FnMut(usize, &[f32])) -> Result<Vec<f32>> {
        let TextPlan { graph, hidden, .. } = &self.plan;
        if ids.is_empty() || ids.len() > self.plan.tokens {
            bail!(
                Usage,
                "a text of {} tokens, expected 1 to {}",
                ids.len(),
                self.plan.tokens
            );
        }
        let executor = &mut *self.executor;
        executor.write(self.plan.batch, &sequence_words(ids, 0))?;
        let program = &graph.programs[0];
        let count = ids.len() * hidden.next_multiple_of(32);
        let mut done = 0;
        for (layer, &(end, stream)) in program.taps.iter().enumerate() {
            run(executor, 0, done..end, ids.len(), cancel)?;
            done = end;
            let rows = read(executor, stream, count, "the stream of the text encoder")?;
            watch(layer, &unpadded(&rows, *hidden));
        }
        if program.taps.is_empty() {
            run(executor, 0, 0..program.steps.len(), ids.len(), cancel)?;
        }
        let rows = read(executor, self.plan.features, count, "the text's features")?;
        Ok(unpadded(&rows, *hidden))
    }
}

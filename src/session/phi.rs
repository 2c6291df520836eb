//! Hidden states of a prompt as one vector, and the change of a plan under a session.

use super::pace::FIRST_STEPS;
use super::{Cancel, Session};
use crate::error::{Result, bail};
use crate::program::{Executor, Plan, Which};
use std::sync::Arc;

impl Session {
    /// φ: for each of `layers`, in ascending order, the mean over all tokens of the residual stream behind that layer. Only the
    /// layers up to the last of them are run. What was cached is forgotten.
    ///
    /// Errors: as [`Session::prefill`]; `Usage` for a layer there is not; `Interrupted`; `NonFinite`.
    pub fn mean_hidden(&mut self, tokens: &[u32], layers: &[usize], cancel: &Cancel) -> Result<Vec<Vec<f64>>> {
        self.check(tokens)?;
        self.clear();
        let plan = self.plan.clone();
        let program = plan.program(Which::Prefill);
        let mut sums = vec![vec![0f64; plan.hidden as usize]; layers.len()];
        for chunk in tokens.chunks(plan.chunk as usize) {
            let extent = self.begin_chunk(chunk)?;
            let mut done = 0;
            for (&layer, sum) in layers.iter().zip(&mut sums) {
                let Some(&end) = program.layer_ends.get(layer).filter(|&&end| end >= done) else {
                    bail!(
                        Usage,
                        "layer {layer} of {}, in ascending order",
                        program.layer_ends.len()
                    );
                };
                while done < end {
                    if cancel.is_cancelled() {
                        self.clear();
                        bail!(Interrupted, "cancelled");
                    }
                    let until = end.min(done + FIRST_STEPS);
                    self.executor.run(Which::Prefill, done..until, extent)?;
                    done = until;
                }
                let Some(&stream) = program.hidden.get(layer) else {
                    bail!(Usage, "layer {layer} of {}", program.hidden.len());
                };
                for column in self.columns(stream, plan.hidden as usize, chunk.len())? {
                    sum.iter_mut()
                        .zip(&column)
                        .for_each(|(sum, &value)| *sum += f64::from(value));
                }
            }
            self.end_chunk(chunk);
        }
        self.clear();
        for sum in &mut sums {
            sum.iter_mut().for_each(|value| *value /= tokens.len() as f64);
            if sum.iter().any(|value| !value.is_finite()) {
                bail!(NonFinite, "the hidden states of the prompt are not finite numbers");
            }
        }
        Ok(sums)
    }

    /// Runs `plan`, of the same network, once `change` has brought the executor to it. What was cached is forgotten. Errors:
    /// those of `change`, after which the plan before stays.
    pub fn change(&mut self, plan: Arc<Plan>, change: impl FnOnce(&mut dyn Executor) -> Result<()>) -> Result<()> {
        while !self.in_flight.is_empty() {
            self.wait()?;
        }
        self.clear();
        change(self.executor.as_mut())?;
        self.plan = plan;
        self.drafting.begin_with(&self.plan);
        Ok(())
    }
}

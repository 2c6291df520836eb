//! The mean hidden states of a prompt.

use super::cancel::Cancel;
use super::session::Session;
use crate::error::{Result, bail};
use crate::lm::ProgramKind;

impl Session {
    /// φ of a prompt: for each of `layers`, which is ascending, the mean over all tokens of the residual stream after
    /// that layer. Runs only the layers up to the last of them. Empties the cache.
    ///
    /// Errors: as [`Session::prefill`]; `Usage` for an unknown layer or another order; `Interrupted`; `NonFinite`.
    pub fn mean_hidden(&mut self, tokens: &[u32], layers: &[usize], cancel: &Cancel) -> Result<Vec<Vec<f64>>> {
        self.check(tokens)?;
        let plan = self.plan.clone();
        let taps = &plan.program(ProgramKind::Prefill).taps;
        if !layers.is_sorted() || layers.last().is_some_and(|&last| last >= taps.len()) {
            bail!(
                Usage,
                "layers {layers:?}: expected ascending numbers below {}",
                taps.len()
            );
        }
        self.clear();
        let mut sums = vec![vec![0f64; plan.hidden as usize]; layers.len()];
        for chunk in tokens.chunks(plan.chunk as usize) {
            let result = self.add_hidden(chunk, layers.iter().map(|&layer| taps[layer]), &mut sums, cancel);
            self.settle(result)?;
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

    /// Runs a chunk up to each of `taps` and adds the rows of its tokens to the tap's sum.
    fn add_hidden(
        &mut self,
        chunk: &[u32],
        taps: impl Iterator<Item = (usize, usize)>,
        sums: &mut [Vec<f64>],
        cancel: &Cancel,
    ) -> Result<()> {
        let shape = self.begin_chunk(chunk)?;
        let mut done = 0;
        for ((end, stream), sum) in taps.zip(sums) {
            self.run_steps(ProgramKind::Prefill, done..end, shape, cancel)?;
            done = end;
            for row in self.token_rows(stream, sum.len(), chunk.len())? {
                sum.iter_mut()
                    .zip(&row)
                    .for_each(|(sum, &value)| *sum += f64::from(value));
            }
        }
        self.end_chunk(chunk);
        Ok(())
    }
}

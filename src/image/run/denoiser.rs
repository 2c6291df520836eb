//! The denoiser on an executor.

use super::submit::{padded, read, run, unpadded, write};
use crate::error::{Result, bail};
use crate::graph::Executor;
use crate::image::TIME_ELEMENTS;
use crate::image::config::DitConfig;
use crate::image::grid::{Grid, caption_table};
use crate::image::lower::{DitPlan, DitProgram};
use crate::image::sampler::time_embedding;
use crate::lm::run::Cancel;

/// A prompt as the denoiser reads it: refined once, for all steps.
#[derive(Clone, Debug, PartialEq)]
pub struct Branch {
    /// Tokens of the caption.
    pub tokens: usize,
    /// Its refined tokens, with padding.
    caption: Vec<f32>,
    /// The rotation of image and caption.
    table: Vec<f32>,
}

/// Receives the name of an intermediate result and its rows.
pub type Watch<'a> = &'a mut dyn FnMut(&str, Vec<f32>);

/// A denoiser for images of one size.
pub struct Denoiser {
    executor: Box<dyn Executor>,
    plan: DitPlan,
    config: DitConfig,
    grid: Grid,
}

impl Denoiser {
    /// A denoiser on an executor that performs the plan's graph.
    pub fn new(executor: Box<dyn Executor>, plan: DitPlan, config: DitConfig, grid: Grid) -> Denoiser {
        Denoiser {
            executor,
            plan,
            config,
            grid,
        }
    }

    /// The executor, for a denoiser of another size.
    pub fn into_executor(self) -> Box<dyn Executor> {
        self.executor
    }

    /// The size and the captions that it has room for.
    pub fn fits(&self, grid: Grid, caption: usize) -> bool {
        self.grid == grid && caption <= self.plan.caption_tokens
    }

    /// Refines a caption's features `[tokens, elements]`.
    ///
    /// Errors: `Usage` for too many tokens; `NonFinite`; `Interrupted`; those of the executor.
    pub fn branch(&mut self, features: &[f32], cancel: &Cancel, watch: Option<Watch>) -> Result<Branch> {
        let tokens = features.len() / self.config.caption.max(1);
        if tokens == 0 || tokens > self.plan.caption_tokens {
            let most = self.plan.caption_tokens;
            bail!(Usage, "a caption of {tokens} tokens, expected 1 to {most}");
        }
        let plan = self.plan.clone();
        self.write_batches(tokens)?;
        let executor = &mut *self.executor;
        write(executor, plan.features, &padded(features, self.config.caption))?;
        let table = caption_table(&self.config, tokens)?;
        // Rows of the table are as long as a head, without padding.
        write(executor, plan.caption_table, &table)?;
        self.run(DitProgram::Caption, tokens, cancel, watch, tokens)?;
        let count = tokens * self.config.hidden.next_multiple_of(32);
        Ok(Branch {
            tokens,
            caption: read(&mut *self.executor, plan.caption, count, "the refined caption")?,
            table: self.grid.table(&self.config, tokens)?,
        })
    }

    /// Computes the modulations of all blocks for a time in 0 to 1: 1 minus the noise level.
    ///
    /// Errors: `Interrupted`; those of the executor.
    pub fn set_time(&mut self, time: f32, cancel: &Cancel, watch: Option<Watch>) -> Result<()> {
        let embedding = time_embedding(time, TIME_ELEMENTS);
        write(&mut *self.executor, self.plan.time, &embedding)?;
        self.run(DitProgram::Time, 1, cancel, watch, 1)
    }

    /// The velocity of latents `[channels, height, width]` at the time that was set, in their shape.
    ///
    /// Errors: `NonFinite`; `Interrupted`; those of the executor.
    pub fn velocity(
        &mut self,
        latents: &[f32],
        branch: &Branch,
        cancel: &Cancel,
        watch: Option<Watch>,
    ) -> Result<Vec<f32>> {
        let plan = self.plan.clone();
        self.write_batches(branch.tokens)?;
        let executor = &mut *self.executor;
        write(executor, plan.caption, &branch.caption)?;
        write(executor, plan.table, &branch.table)?;
        write(executor, plan.patches, &self.grid.patches(&self.config, latents))?;
        let all = plan.image_tokens + branch.tokens;
        self.run(DitProgram::Velocity, all, cancel, watch, all)?;
        let count = plan.image_tokens * self.config.patch_elements().next_multiple_of(32);
        let patches = read(&mut *self.executor, plan.velocity, count, "the velocity of the latents")?;
        Ok(self.grid.unpatched(&self.config, &patches))
    }

    /// Writes the numbers of tokens.
    fn write_batches(&mut self, caption: usize) -> Result<()> {
        let counts = [caption, self.plan.image_tokens, self.plan.image_tokens + caption];
        for (buffer, count) in self.plan.batches.into_iter().zip(counts) {
            self.executor.write(buffer, &[count as u32])?;
        }
        Ok(())
    }

    /// Runs a program; at each of its taps, `watch` gets `rows` rows.
    fn run(
        &mut self,
        program: DitProgram,
        tokens: usize,
        cancel: &Cancel,
        watch: Option<Watch>,
        rows: usize,
    ) -> Result<()> {
        let graph = self.plan.graph.clone();
        let (executor, index) = (&mut *self.executor, program as usize);
        let steps = &graph.programs[index].steps;
        let mut done = 0;
        if let Some(watch) = watch {
            let width = match program {
                DitProgram::Time => self.config.time(),
                _ => self.config.hidden,
            };
            for &(end, buffer) in &graph.programs[index].taps {
                run(executor, index, done..end, tokens, cancel)?;
                done = end;
                let words = executor.read(buffer, 0, rows * width.next_multiple_of(32))?;
                let values: Vec<f32> = words.into_iter().map(f32::from_bits).collect();
                watch(&steps[end - 1].label, unpadded(&values, width));
            }
        }
        run(executor, index, done..steps.len(), tokens, cancel)
    }
}

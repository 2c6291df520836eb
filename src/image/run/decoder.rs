//! The decoder of latents on an executor, on the whole image or in strips of rows.

use super::submit::{read, run, write};
use crate::error::{Result, bail};
use crate::graph::Executor;
use crate::image::config::VaeConfig;
use crate::image::lower::{Part, Residual, VaePlan};
use crate::lm::run::Cancel;
use crate::op::Frame;

/// A decoder for latents of one size.
pub struct Decoder {
    executor: Box<dyn Executor>,
    plan: VaePlan,
    config: VaeConfig,
}

/// Receives the name of a layer, its result `[height, width, stride]`, and the elements from one pixel to the next.
pub type Watch<'a> = &'a mut dyn FnMut(&str, &[f32], usize);

/// Images between the layers that run in strips.
#[derive(Default)]
struct Held {
    /// The result of the layer before.
    current: Vec<f32>,
    /// What the next layer adds to.
    stream: Vec<f32>,
}

impl Decoder {
    /// A decoder on an executor that performs the plan's graph.
    pub fn new(executor: Box<dyn Executor>, plan: VaePlan, config: VaeConfig) -> Decoder {
        Decoder { executor, plan, config }
    }

    /// Whether latents of this height and width are those that it decodes.
    pub fn fits(&self, [height, width]: [usize; 2]) -> bool {
        let first = self.plan.parts.first().map(|part| part.from);
        first.is_some_and(|from| (from.height, from.width) == (height, width))
    }

    /// The executor, for a decoder of another size.
    pub fn into_executor(self) -> Box<dyn Executor> {
        self.executor
    }

    /// The image of latents `[channels, height, width]`, as the decoder computes it: `[3, height, width]`, about -1 to 1.
    ///
    /// Errors: `NonFinite`; `Interrupted`; `Internal` for latents of another size; those of the executor.
    pub fn decode(&mut self, latents: &[f32], cancel: &Cancel, mut watch: Option<Watch>) -> Result<Vec<f32>> {
        let parts = self.plan.parts.clone();
        let [Some(first), Some(last)] = [parts.first(), parts.last()] else {
            bail!(Internal, "the decoder has no layers");
        };
        let pixels = first.from.height * first.from.width;
        if latents.len() != pixels * self.config.latent {
            bail!(
                Internal,
                "{} latents, expected {} of {pixels}",
                latents.len(),
                self.config.latent
            );
        }
        self.executor.write(self.plan.batch, &[pixels as u32])?;
        let scaled = self.scaled(latents, first.from.stride);
        write(&mut *self.executor, first.input, &scaled)?;
        let mut held = Held::default();
        for (i, part) in parts.iter().enumerate() {
            let in_strips = self.plan.strip_input == Some(part.input);
            if in_strips && held.current.is_empty() {
                let before = &parts[i - 1];
                held.current = self.read(before.output, before.to.elements())?;
            }
            match in_strips {
                true => self.strips(part, &mut held, cancel)?,
                false => self.whole(part, cancel)?,
            }
            if let Some(watch) = &mut watch {
                match in_strips {
                    true => watch(&part.label, &held.current, part.to.stride),
                    false => watch(
                        &part.label,
                        &self.read(part.output, part.to.elements())?,
                        part.to.stride,
                    ),
                }
            }
        }
        let pixels = match held.current.is_empty() {
            true => self.read(last.output, last.to.elements())?,
            false => held.current,
        };
        let channel = |c: usize| pixels.iter().skip(c).step_by(last.to.stride).copied();
        Ok((0..3).flat_map(channel).collect())
    }

    /// Latents as the decoder reads them: divided and shifted, a row of channels for each.
    pub fn scaled(&self, latents: &[f32], stride: usize) -> Vec<f32> {
        let pixels = latents.len() / self.config.latent;
        let mut rows = vec![0.0; pixels * stride];
        for (channel, values) in latents.chunks_exact(pixels).enumerate() {
            for (pixel, value) in values.iter().enumerate() {
                rows[pixel * stride + channel] = value / self.config.scaling + self.config.shift;
            }
        }
        rows
    }

    fn read(&mut self, buffer: usize, count: usize) -> Result<Vec<f32>> {
        read(&mut *self.executor, buffer, count, "a layer of the decoder")
    }

    /// Runs a layer on the whole image.
    fn whole(&mut self, part: &Part, cancel: &Cancel) -> Result<()> {
        let output = Frame::whole(part.to.height as u32);
        let input = Frame::whole(part.from.height as u32);
        self.write_frames([input, output, output])?;
        let pixels = part.to.height * part.to.width;
        run(&mut *self.executor, 0, part.steps.start..part.merge.end, pixels, cancel)
    }

    fn write_frames(&mut self, frames: [Frame; 3]) -> Result<()> {
        for (buffer, frame) in self.plan.frames.into_iter().zip(frames) {
            self.executor.write(buffer, &frame.words())?;
        }
        Ok(())
    }

    /// Runs a layer in strips. Images between layers are in host memory, so the device holds one strip at a time.
    fn strips(&mut self, part: &Part, held: &mut Held, cancel: &Cancel) -> Result<()> {
        let (from, to) = (part.from, part.to);
        let mut result = Vec::with_capacity(to.elements());
        for first in (0..to.height).step_by(part.rows) {
            let rows = part.rows.min(to.height - first);
            let above = first.saturating_sub(part.halo);
            let below = (first + rows + part.halo).min(to.height);
            let (begin, end) = match part.doubled {
                true => (above / 2, below.div_ceil(2)),
                false => (above, below),
            };
            let input = Frame {
                first: begin as u32,
                height: from.height as u32,
                held: begin as u32,
                rows: (end - begin) as u32,
            };
            let output = Frame {
                first: first as u32,
                height: to.height as u32,
                held: begin as u32,
                rows: rows as u32,
            };
            let stream = Frame {
                held: first as u32,
                ..output
            };
            self.write_frames([input, output, stream])?;
            let executor = &mut *self.executor;
            write(
                executor,
                part.input,
                &held.current[begin * from.row()..end * from.row()],
            )?;
            let buffer = match part.residual {
                Residual::None => None,
                Residual::Same => Some(part.output),
                Residual::Shortcut(buffer) => Some(buffer),
            };
            if let Some(buffer) = buffer {
                let row = held.stream.len() / to.height;
                write(executor, buffer, &held.stream[first * row..(first + rows) * row])?;
            }
            let pixels = ((end - begin) * from.width).max(rows * to.width);
            run(executor, 0, part.steps.clone(), pixels, cancel)?;
            result.extend(self.read(part.output, rows * to.row())?);
        }
        let shape = to.height * to.width;
        run(&mut *self.executor, 0, part.merge.clone(), shape, cancel)?;
        let input = std::mem::replace(&mut held.current, result);
        held.stream = if part.keeps_input { input } else { Vec::new() };
        Ok(())
    }
}

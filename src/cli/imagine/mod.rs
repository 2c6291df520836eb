//! `imagine`: pictures from a text.
//!
//! What can be checked is checked before the first step: flags, the size, the files to write, memory. Latents are written before
//! they are decoded, so that no failure of the decoder loses them.

mod args;
mod files;
mod latents;
mod png;
mod settings;

pub use args::Args;

use super::args::{device_json, open_as};
use super::context::{Context, Outcome, Result};
use super::model::require_image;
use super::output::{Output, shown};
use cmf_gpu::engine::{ImageEvent, ImagePipeline, Made};
use cmf_gpu::image::{ImageRequest, Latents};
use cmf_gpu::{Cancel, Error, Kind};
use files::Files;
use serde_json::{Value, json};
use settings::{Settings, model_name};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

pub fn run(args: Args, context: &mut Context) -> Result {
    args.check()?;
    let path = args.model.path()?;
    let source = open_as(&path, args.quant)?;
    require_image(&source)?;
    let start = args.init_latents.as_deref().map(latents::read).transpose()?;
    if args.seed.is_some() && start.is_some() {
        context
            .out
            .note("note: --init-latents replaces the noise; --seed has no effect");
    }
    let files = Files::checked(&args, &source)?;
    context.out.notices(&source.notes);
    let began = Instant::now();
    let pipeline = ImagePipeline::load(&source, &args.adapter.options())?;
    let request = args.request(start);
    let size = pipeline.check(&request)?;
    let report = pipeline.device_report();
    context.out.notices(&report.notices);
    let (name, backend, kind) = (&report.name, &report.backend, &report.kind);
    let [width, height] = size;
    context.out.note(format!(
        "{name} ({backend}, {kind}): {width} × {height} pixels, {} steps",
        args.steps
    ));
    let mut job = Job {
        device: device_json(report),
        stages: BTreeMap::from([("load", began.elapsed().as_secs_f64())]),
        model: model_name(&source, &path),
        files,
        pipeline,
        request,
        made: Vec::new(),
        latents: Vec::new(),
        size,
        preview: None,
        args: &args,
    };
    let cancel = context.interrupt.graceful();
    let count = args.batch as usize;
    match (0..count).try_for_each(|index| job.picture(index, &cancel, &context.out)) {
        Ok(()) => {
            let lines: Vec<String> = job.made.iter().map(|path| shown(path)).collect();
            context.answer(job.json(), lines)
        }
        Err(err) if err.kind == Kind::Interrupted => job.interrupted(context),
        Err(err) => Err(err),
    }
}

/// The pictures of one call.
struct Job<'a> {
    args: &'a Args,
    pipeline: ImagePipeline,
    request: ImageRequest,
    files: Files,
    /// The name of the model, and a hash of its weights.
    model: (String, Option<String>),
    device: Value,
    /// Seconds of each stage, of all pictures together.
    stages: BTreeMap<&'static str, f64>,
    /// The pictures that are written.
    made: Vec<PathBuf>,
    /// Width and height.
    size: [u32; 2],
    /// The latents that are written.
    latents: Vec<PathBuf>,
    /// The last preview that was written.
    preview: Option<PathBuf>,
}

impl Job<'_> {
    /// Makes and writes a picture. Errors: those of the pipeline; `Io`.
    fn picture(&mut self, index: usize, cancel: &Cancel, out: &Output) -> Result<()> {
        let request = ImageRequest {
            seed: self.request.seed.wrapping_add(index as u64),
            ..self.request.clone()
        };
        if request.latents.is_none() {
            out.note(format!("seed {}", request.seed));
        }
        let (files, written, preview) = (&self.files, &mut self.latents, &mut self.preview);
        let asked = files.outputs.latents.get(index);
        let mut undecoded = None;
        let mut bar = out.progress("sampling", false);
        let made = self.pipeline.generate(&request, cancel, &mut |event| {
            match event {
                ImageEvent::Step { done, total } => bar.set(done.into(), total.into()),
                ImageEvent::Preview(image) => {
                    if let Some(path) = files.outputs.previews.get(index) {
                        files.picture(path, &image, None)?;
                        *preview = Some(path.clone());
                    }
                }
                ImageEvent::Latents(latents) => match asked {
                    Some(path) => {
                        files.latents(path, latents)?;
                        written.push(path.clone());
                    }
                    None => undecoded = Some(latents.clone()),
                },
            }
            Ok(())
        });
        drop(bar);
        let made = made.map_err(|err| match &undecoded {
            Some(latents) => self.rescued(err, latents, index, out),
            None => err,
        })?;
        self.write(&request, &made, index)?;
        for (stage, seconds) in made.seconds {
            *self.stages.entry(stage).or_default() += seconds;
        }
        Ok(())
    }

    /// Writes latents that cannot be decoded. Returns the error of the decoder.
    fn rescued(&self, err: Error, latents: &Latents, index: usize, out: &Output) -> Error {
        let path = self.files.outputs.rescued(index);
        match self.files.latents(&path, latents) {
            Ok(()) => out.note(format!("the latents after the last step are in {}", shown(&path))),
            // The error of the decoder is the one to report.
            Err(failed) => out.note(format!("the latents after the last step are lost: {}", failed.message)),
        }
        err
    }

    fn write(&mut self, request: &ImageRequest, made: &Made, index: usize) -> Result<()> {
        let (width, height) = (made.image.width, made.image.height);
        let settings = Settings {
            prompt: &request.prompt,
            negative: &request.negative,
            steps: request.steps,
            guidance: request.guidance,
            seed: request.latents.is_none().then_some(request.seed),
            width,
            height,
            shift: made.shift,
            model: &self.model,
        };
        let settings = (!self.args.no_metadata).then(|| settings.text());
        let path = &self.files.outputs.pictures[index];
        self.files.picture(path, &made.image, settings.as_deref())?;
        self.made.push(path.clone());
        Ok(())
    }

    fn json(&self) -> Value {
        let seeded = self.request.latents.is_none();
        let seeds = (0..u64::from(self.args.batch))
            .filter(|_| seeded)
            .map(|index| self.request.seed.wrapping_add(index));
        let seeds: Vec<u64> = seeds.collect();
        let text = |path: &PathBuf| path.display().to_string();
        json!({
            "images": self.made.iter().map(text).collect::<Vec<_>>(),
            "seed": seeds.first(),
            "seeds": seeds,
            "steps": self.request.steps,
            "width": self.size[0],
            "height": self.size[1],
            "latents": self.latents.iter().map(text).collect::<Vec<_>>(),
            "preview": self.preview.as_ref().map(text),
            "stage_s": self.stages,
            "device": self.device,
        })
    }

    /// Reports what is left after Ctrl-C.
    fn interrupted(&self, context: &mut Context) -> Result {
        let names = |paths: &[PathBuf]| paths.iter().map(|path| shown(path)).collect::<Vec<_>>().join(", ");
        if !self.made.is_empty() {
            context.out.note(format!("interrupted after {}", names(&self.made)));
        }
        if let Some(path) = &self.preview {
            context.out.note(format!("the last preview is in {}", shown(path)));
        }
        if context.out.json {
            let mut object = self.json();
            object["finish"] = "interrupted".into();
            context.out.json(&object)?;
        }
        Ok(Outcome::Interrupted)
    }
}

//! `logits`: teacher-forced logits of every position of a text, as a safetensors file.

use super::args::{self, LoadArgs, Tokens, token_list, whole};
use super::context::{Context, Outcome, Result, interrupted, usage};
use super::model;
use super::overlay::SkillChoice;
use cmf_gpu::error::escape;
use cmf_gpu::format::{not_the_output, target, temporary_beside};
use cmf_gpu::source::ModelSource;
use cmf_gpu::{Cancel, Engine, Error, Kind};
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::json;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Flags of `logits`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    load: LoadArgs,
    /// The tokens, separated by commas
    #[arg(long, value_parser = token_list)]
    tokens: Tokens,
    /// The safetensors file to write: f32 logits [n, vocab]
    #[arg(short, long)]
    out: PathBuf,
    /// Also writes hidden.{layer} [n, hidden]: the residual stream after each layer
    #[arg(long)]
    hidden: bool,
    /// Runs the first N tokens in one prefill, the others one by one through the decode program [default: all in one
    /// prefill]
    #[arg(long, value_name = "N", value_parser = whole::<usize>, allow_negative_numbers = true)]
    step_from: Option<usize>,
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let tokens = &args.tokens.0;
    let source = args.load.open()?;
    let skills = args.check(&source)?;
    // Opened now, so that an error comes before the model is loaded.
    let out = target(&args.out)?;
    let to = temporary_beside(&out)?;
    let options = args.load.options();
    let task = options.task.clone();
    let mut engine = args::load(source, &skills.first(options.all_logits(true)), context)?;
    let cancel = context.interrupt.cancel();
    skills.settle(&mut engine, &task, tokens, &cancel, &context.out)?;
    let Recorded { logits, hidden } = args.record(&mut engine, &cancel, context)?;
    let n = tokens.len();
    let (vocab, width) = (logits.len() / n, engine.model().hidden);
    let mut tensors = vec![("logits".to_string(), view(vec![n, vocab], &logits)?)];
    for (layer, values) in hidden.iter().enumerate() {
        tensors.push((format!("hidden.{layer}"), view(vec![n, width], values)?));
    }
    write(tensors, to, &out)?;
    match context.out.json {
        true => context.out.json(&json!({"n": n, "vocab": vocab}))?,
        false => context.out.line(format!(
            "{}: {n} positions, vocabulary {vocab}",
            escape(args.out.display().to_string())
        ))?,
    }
    Ok(Outcome::Done)
}

/// The recorded values of all positions.
struct Recorded {
    /// `[n, vocab]`
    logits: Vec<f32>,
    /// For each layer `[n, hidden]`; empty without `--hidden`.
    hidden: Vec<Vec<f32>>,
}

impl Args {
    /// Tokens of the prefill.
    fn prefill(&self) -> usize {
        self.step_from.unwrap_or(self.tokens.0.len())
    }

    /// The skills, once all flags are checked. Errors: `Usage`.
    fn check(&self, source: &ModelSource) -> Result<SkillChoice> {
        let (prefill, tokens) = (self.prefill(), &self.tokens.0);
        if prefill > tokens.len() {
            return Err(usage(format!(
                "--step-from {prefill}: there are only {} tokens",
                tokens.len()
            )));
        }
        model::known_tokens(tokens, source)?;
        for input in &source.files {
            not_the_output(input, &self.out)?;
        }
        self.load.overlay.choice(source)
    }

    fn record(&self, engine: &mut Engine, cancel: &Cancel, context: &Context) -> Result<Recorded> {
        let layers = engine.model().layers.len() * engine.model().loops;
        let tokens = &self.tokens.0;
        let mut logits: Vec<f32> = Vec::new();
        let mut hidden: Vec<Vec<f32>> = vec![Vec::new(); if self.hidden { layers } else { 0 }];
        let mut bar = context.out.progress("logits", false);
        let mut sink = |position: usize, values: &[f32], residual: &[Vec<f32>]| {
            if cancel.is_cancelled() {
                return Err(interrupted());
            }
            bar.set(position as u64 + 1, tokens.len() as u64);
            logits.extend_from_slice(values);
            for (all, values) in hidden.iter_mut().zip(residual) {
                all.extend_from_slice(values);
            }
            Ok(())
        };
        engine
            .session()
            .logits(tokens, self.prefill(), self.hidden, &mut sink)?;
        Ok(Recorded { logits, hidden })
    }
}

fn view(shape: Vec<usize>, values: &[f32]) -> Result<TensorView<'_>> {
    TensorView::new(Dtype::F32, shape, bytemuck::cast_slice(values))
        .map_err(|err| Error::new(Kind::Parse, format!("logits: {err}")))
}

/// Writes under the temporary name and renames.
fn write(tensors: Vec<(String, TensorView)>, to: NamedTempFile, out: &Path) -> Result<()> {
    serialize_to_file(tensors, None, to.path())
        .map_err(|err| Error::new(Kind::Io, format!("{}: {err}", out.display())))?;
    to.as_file().sync_all().map_err(|err| Error::io(out, &err))?;
    to.persist(out).map_err(|err| Error::io(out, &err.error))?;
    Ok(())
}

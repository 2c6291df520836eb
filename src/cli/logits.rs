//! `logits`: teacher-forced logits of every position of a text, as a safetensors file.

use super::args::{self, LoadArgs, Tokens, token_list, whole};
use super::context::{Context, Result, unless_cancelled, usage};
use super::file::OutFile;
use super::model;
use super::output::shown;
use super::overlay::SkillChoice;
use cmf_gpu::source::ModelSource;
use cmf_gpu::{Cancel, Engine, Error, Kind};
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::json;
use std::path::PathBuf;

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
    let out = OutFile::create(&args.out, source.files.iter().map(PathBuf::as_path))?;
    let options = skills.first(args.load.options().all_logits(true));
    let mut engine = args::load(source, &options, context)?;
    let cancel = context.interrupt.cancel();
    skills.settle(&mut engine, &args.load.task.choice(), tokens, &cancel, &context.out)?;
    let (logits, hidden) = args.record(&mut engine, &cancel, context)?;
    let n = tokens.len();
    let (vocab, width) = (logits.len() / n, engine.model().hidden);
    let mut tensors = vec![("logits".to_string(), view(vec![n, vocab], &logits)?)];
    for (layer, values) in hidden.iter().enumerate() {
        tensors.push((format!("hidden.{layer}"), view(vec![n, width], values)?));
    }
    out.write(|path| serialize_to_file(tensors, None, path))?;
    let line = format!("{}: {n} positions, vocabulary {vocab}", shown(&args.out));
    context.answer(json!({"n": n, "vocab": vocab}), [line])
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
            let count = tokens.len();
            return Err(usage(format!("--step-from {prefill}: there are only {count} tokens")));
        }
        model::known_tokens(tokens, source)?;
        self.load.overlay.choice(source)
    }

    /// The logits of all positions, `[n, vocab]`, and with `--hidden` for each layer `[n, hidden]`.
    fn record(&self, engine: &mut Engine, cancel: &Cancel, context: &Context) -> Result<(Vec<f32>, Vec<Vec<f32>>)> {
        let layers = engine.model().layers.len() * engine.model().loops;
        let tokens = &self.tokens.0;
        let mut logits: Vec<f32> = Vec::new();
        let mut hidden: Vec<Vec<f32>> = vec![Vec::new(); if self.hidden { layers } else { 0 }];
        let mut bar = context.out.progress("logits", false);
        let mut sink = |position: usize, values: &[f32], residual: &[Vec<f32>]| {
            unless_cancelled(cancel)?;
            bar.set(position as u64 + 1, tokens.len() as u64);
            logits.extend_from_slice(values);
            for (all, values) in hidden.iter_mut().zip(residual) {
                all.extend_from_slice(values);
            }
            Ok(())
        };
        let session = engine.session();
        session.logits(tokens, self.prefill(), self.hidden, &mut sink)?;
        Ok((logits, hidden))
    }
}

fn view(shape: Vec<usize>, values: &[f32]) -> Result<TensorView<'_>> {
    TensorView::new(Dtype::F32, shape, bytemuck::cast_slice(values))
        .map_err(|err| Error::new(Kind::Parse, format!("logits: {err}")))
}

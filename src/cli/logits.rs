//! `logits`: what the model says at every position of a given text, as a safetensors file.

use super::args::{self, LoadArgs, Tokens, token_list, whole};
use super::model;
use super::{Context, Outcome, Result, interrupted, usage};
use clap::builder::FalseyValueParser;
use cmf_gpu::container::{not_the_output, target, temporary_beside};
use cmf_gpu::error::escape;
use cmf_gpu::{Error, Kind};
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
    #[arg(long, env = "CMF_GPU_TOKENS", value_parser = token_list, hide_env = true)]
    tokens: Tokens,
    /// The safetensors file to write: f32 logits [n, vocab]
    #[arg(short, long, env = "CMF_GPU_OUT", hide_env = true)]
    out: PathBuf,
    /// Writes also hidden.{layer} [n, hidden]: the residual stream after each layer
    #[arg(long, env = "CMF_GPU_HIDDEN", value_parser = FalseyValueParser::new(), hide_env = true)]
    hidden: bool,
    /// The first N tokens in one prefill, the others one by one through the decode program [default: all in one prefill]
    #[arg(
        long,
        env = "CMF_GPU_STEP_FROM",
        value_name = "N",
        value_parser = whole::<usize>,
        allow_negative_numbers = true,
        hide_env = true
    )]
    step_from: Option<usize>,
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let Tokens(tokens) = args.tokens;
    let path = args.load.model.path(context)?;
    let prefill = args.step_from.unwrap_or(tokens.len());
    if prefill > tokens.len() {
        return Err(usage(format!(
            "--step-from {prefill}: there are only {} tokens",
            tokens.len()
        )));
    }
    let mut options = args.load.options();
    options.all_logits = true;
    // Before minutes of work, not after.
    let container = model::open(&path)?;
    model::known_tokens(&tokens, &container)?;
    let overlay = args.load.overlay.wanted(&container, context)?;
    let task = options.task.clone();
    options = overlay.first(options);
    for input in container.shard_paths() {
        not_the_output(input, &args.out)?;
    }
    let out = target(&args.out)?;
    let to = temporary_beside(&out)?;
    let mut engine = args::load(container, &options, context)?;
    let cancel = context.interrupt.cancel();
    overlay.settle(&mut engine, &task, &tokens, &cancel, &context.out)?;
    let layers = engine.model().layers.len() * engine.model().loops;
    let mut logits: Vec<f32> = Vec::new();
    let mut hidden: Vec<Vec<f32>> = vec![Vec::new(); if args.hidden { layers } else { 0 }];
    let mut bar = context.out.progress("logits", false);
    engine
        .session()
        .logits(&tokens, prefill, args.hidden, &mut |position, values, residual| {
            if cancel.is_cancelled() {
                return Err(interrupted());
            }
            bar.set(position as u64 + 1, tokens.len() as u64);
            logits.extend_from_slice(values);
            for (all, values) in hidden.iter_mut().zip(residual) {
                all.extend_from_slice(values);
            }
            Ok(())
        })?;
    drop(bar);
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

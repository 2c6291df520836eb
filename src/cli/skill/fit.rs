//! `skill fit`: which prompts a skill is for, from examples.

use crate::cli::args::{self, DeviceArgs, positive, read_text, whole};
use crate::cli::{Context, Error, Outcome, Result, model, usage};
use cmf_gpu::container::SkillView;
use cmf_gpu::engine::incomparable;
use cmf_gpu::error::escape;
use cmf_gpu::options::{LoadOptions, TaskChoice};
use cmf_gpu::tools::registry::set_selection;
use cmf_gpu::{Kind, routing};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Most directions when nothing is said.
const DEFAULT_RANK: usize = 16;

/// Flags of `skill fit`.
#[derive(clap::Args)]
pub struct Args {
    /// The .cmf file, which changes
    model: PathBuf,
    /// The skill
    id: String,
    #[command(flatten)]
    device: DeviceArgs,
    /// The example prompts: a text with one a line, or a .json file with a list of texts or of lists of token ids; - = stdin, a
    /// text
    #[arg(short, long, env = "CMF_GPU_FILE", hide_env = true)]
    file: PathBuf,
    /// The layer behind which hidden states are compared, from 0 [default: that of the file's other skills, else the
    /// skill's own, else the one at two thirds]
    #[arg(long, env = "CMF_GPU_PHI_LAYER", value_name = "L", value_parser = whole::<usize>, allow_negative_numbers = true, hide_env = true)]
    phi_layer: Option<usize>,
    /// Most directions in which prompts of the skill may differ [default: 16]
    #[arg(long, env = "CMF_GPU_RANK", value_name = "R", value_parser = positive::<usize>, allow_negative_numbers = true, hide_env = true)]
    rank: Option<usize>,
}

/// What a model is loaded with to find out what a prompt is like: without a mask, whatever the file says.
pub fn full(device: &DeviceArgs) -> LoadOptions {
    LoadOptions {
        task: TaskChoice::Full,
        ..device.options()
    }
}

/// An example prompt.
enum Example {
    Text(String),
    Tokens(Vec<u32>),
}

/// Errors: `Parse` for JSON that is no list of prompts.
fn examples(text: &str, path: &Path) -> Result<Vec<Example>> {
    if path.extension().is_none_or(|extension| extension != "json") {
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        return Ok(lines.map(|line| Example::Text(line.to_owned())).collect());
    }
    let wrong = |what: String| Error::new(Kind::Parse, format!("{}: {what}", path.display()));
    let list: Vec<Value> = serde_json::from_str(text).map_err(|err| wrong(err.to_string()))?;
    let example = |(i, value): (usize, Value)| match value {
        Value::String(text) => Ok(Example::Text(text)),
        value => match serde_json::from_value(value) {
            Ok(tokens) => Ok(Example::Tokens(tokens)),
            Err(_) => Err(wrong(format!("item {i}: wanted a text or a list of token ids"))),
        },
    };
    list.into_iter().enumerate().map(example).collect()
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let container = model::open(&args.model)?;
    model::runnable(&container)?;
    SkillView::new(&container, Some(&args.id))?;
    let examples = examples(&read_text(&args.file)?, &args.file)?;
    if examples.len() < 2 {
        return Err(usage(format!(
            "{}: wanted at least 2 example prompts, found {}",
            args.file.display(),
            examples.len()
        )));
    }
    let layers = container.header().arch.num_layers;
    let fitted = container
        .skills()
        .iter()
        .filter_map(|skill| Some((skill.id.as_str(), skill.selection.as_ref()?.phi_layer)));
    let (own, others): (Vec<_>, Vec<_>) = fitted.partition(|(id, _)| *id == args.id);
    let before = others.first().or(own.first()).map(|(_, layer)| *layer);
    let layer = args.phi_layer.or(before).unwrap_or(layers * 2 / 3);
    if layer >= layers {
        return Err(usage(format!("--phi-layer {layer}: the network has {layers} layers")));
    }
    let all = others.iter().copied().chain([(args.id.as_str(), layer)]);
    if let Some(notice) = incomparable(all) {
        context.out.note(format!("note: {notice}"));
    }
    let changed = container.shard_paths()[0].display().to_string();
    let mut engine = args::load(container, &full(&args.device), context)?;
    let cancel = context.interrupt.graceful();
    let mut bar = context.out.progress("fitting", false);
    let mut means = Vec::new();
    for (i, example) in examples.iter().enumerate() {
        let tokens = match example {
            Example::Text(text) => &engine.tokenizer()?.encode(text, true)?,
            Example::Tokens(tokens) => tokens,
        };
        let phi = engine.mean_hidden(tokens, &[layer], &cancel);
        means.extend(phi.map_err(|err| err.context(format_args!("example {i}")))?);
        bar.set(i as u64 + 1, examples.len() as u64);
    }
    drop(bar);
    // Nothing reads the file while it grows.
    drop(engine);
    let selection = routing::fit(&means, layer, args.rank.unwrap_or(DEFAULT_RANK))?;
    let written = set_selection(&args.model, &args.id, &selection)?;
    for note in &written.notes {
        context.out.note(format!("note: {note}"));
    }
    let (id, examples, rank) = (&args.id, examples.len(), selection.rank);
    match context.out.json {
        true => context.out.json(&json!({
            "out": changed, "skill": id, "examples": examples, "rank": rank, "phi_layer": layer,
            "bytes": written.bytes, "notes": written.notes,
        }))?,
        false => context.out.line(escape(format!(
            "fitted {id} in {changed}: {examples} examples, {rank} directions behind layer {layer}"
        )))?,
    }
    Ok(Outcome::Done)
}

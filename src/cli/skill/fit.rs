//! `skill fit`: learns from examples which prompts fit a skill.

use crate::cli::args::{self, DeviceArgs, positive, whole};
use crate::cli::context::{Context, Result, usage};
use crate::cli::file::read_text;
use crate::cli::model;
use cmf_gpu::engine::incomparable;
use cmf_gpu::error::escape;
use cmf_gpu::options::TaskChoice;
use cmf_gpu::source::ModelSource;
use cmf_gpu::tools::skill::set_selection;
use cmf_gpu::{Error, Kind, LoadOptions, routing};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Most directions of the subspace by default.
const DEFAULT_RANK: usize = 16;

#[derive(clap::Args)]
pub struct Args {
    /// The .cmf file, which is changed
    model: PathBuf,
    /// The skill
    id: String,
    #[command(flatten)]
    device: DeviceArgs,
    /// The example prompts: a text file with one prompt per line, or a .json file with a list of texts or of lists of token
    /// ids; - = a text from stdin
    #[arg(short, long)]
    file: PathBuf,
    /// The layer, from 0, whose output is compared [default: that of the file's other skills, else that of this skill, else
    /// the layer at two thirds of the network]
    #[arg(long, value_name = "L", value_parser = whole::<usize>, allow_negative_numbers = true)]
    phi_layer: Option<usize>,
    /// Most dimensions of the skill's subspace [default: 16]
    #[arg(long, value_name = "R", value_parser = positive::<usize>, allow_negative_numbers = true)]
    rank: Option<usize>,
}

/// The options of measuring prompts: without a mask, also if the file has a default task.
pub fn full(device: &DeviceArgs) -> LoadOptions {
    device.options().task(TaskChoice::Full)
}

/// An example prompt.
enum Example {
    Text(String),
    Tokens(Vec<u32>),
}

/// The example prompts of a file. Errors: `Parse` for JSON that is not a list of prompts.
fn examples(text: &str, path: &Path) -> Result<Vec<Example>> {
    if path.extension().is_none_or(|extension| extension != "json") {
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        return Ok(lines.map(|line| Example::Text(line.to_owned())).collect());
    }
    let wrong = |message: String| Error::new(Kind::Parse, format!("{}: {message}", path.display()));
    let list: Vec<Value> = serde_json::from_str(text).map_err(|err| wrong(err.to_string()))?;
    let example = |(i, value): (usize, Value)| match value {
        Value::String(text) => Ok(Example::Text(text)),
        value => match serde_json::from_value(value) {
            Ok(tokens) => Ok(Example::Tokens(tokens)),
            Err(_) => Err(wrong(format!("item {i}: expected a text or a list of token ids"))),
        },
    };
    list.into_iter().enumerate().map(example).collect()
}

impl Args {
    /// The layer whose output is compared. Prints a note if other skills use another one. Errors: `Usage`.
    fn layer(&self, source: &ModelSource, context: &Context) -> Result<usize> {
        let layers = source.arch.num_layers;
        let skills = source.skills.iter();
        let fitted = skills.filter_map(|skill| Some((skill.id.as_str(), skill.selection.as_ref()?.phi_layer)));
        let (own, others): (Vec<_>, Vec<_>) = fitted.partition(|(id, _)| *id == self.id);
        let before = others.first().or(own.first()).map(|(_, layer)| *layer);
        let layer = self.phi_layer.or(before).unwrap_or(layers * 2 / 3);
        if layer >= layers {
            return Err(usage(format!("--phi-layer {layer}: the network has {layers} layers")));
        }
        let all = others.iter().copied().chain([(self.id.as_str(), layer)]);
        context.out.notices(&incomparable(all));
        Ok(layer)
    }
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let source = model::open(&args.model)?;
    source.with_skill(Some(&args.id))?;
    let examples = examples(&read_text(&args.file)?, &args.file)?;
    if examples.len() < 2 {
        let (file, count) = (args.file.display(), examples.len());
        return Err(usage(format!(
            "{file}: expected at least 2 example prompts, found {count}"
        )));
    }
    let layer = args.layer(&source, context)?;
    let changed = source.files[0].display().to_string();
    let mut engine = args::load(source, &full(&args.device), context)?;
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
    // Unmaps the file before it is changed.
    drop(engine);
    let selection = routing::fit(&means, layer, args.rank.unwrap_or(DEFAULT_RANK))?;
    let written = set_selection(&args.model, &args.id, &selection)?;
    context.out.notices(&written.notes);
    let (id, examples, rank) = (&args.id, examples.len(), selection.rank);
    let line = format!("fitted {id} in {changed}: {examples} examples, {rank} dimensions after layer {layer}");
    let object = json!({
        "out": changed, "skill": id, "examples": examples, "rank": rank, "phi_layer": layer,
        "bytes": written.bytes, "notes": written.notes,
    });
    context.answer(object, [escape(line)])
}

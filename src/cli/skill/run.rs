//! The subcommands of `skill` that run the model: `route`, `fit` and `measure`.

use crate::cli::args::{self, DeviceArgs, TaskArgs, positive, whole};
use crate::cli::context::{Context, Result, usage};
use crate::cli::file::read_text;
use crate::cli::model;
use crate::cli::overlay::note_incomparable;
use crate::cli::ppl::{CTX_HELP, Windows, tokens};
use crate::cli::prompt::{self, Prompt, PromptArgs};
use cmf_gpu::engine::{Route, incomparable};
use cmf_gpu::error::escape;
use cmf_gpu::options::TaskChoice;
use cmf_gpu::source::{ModelSource, NO_TASK};
use cmf_gpu::tools::skill::{set_quality, set_selection};
use cmf_gpu::{Error, Kind, LoadOptions, routing};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct RouteArgs {
    /// A .cmf file; any one of the files if the model has several
    model: PathBuf,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    prompt: PromptArgs,
}

/// Shows how well each skill fits a prompt. The prompt gets no template, and the model no mask.
pub fn route(args: RouteArgs, context: &mut Context) -> Result {
    let source = model::open(&args.model)?;
    let prompt = match (args.prompt.given(), args.prompt.file()) {
        (Some(prompt), _) => prompt,
        (None, Some(file)) => Prompt::Text(prompt::read(file)?),
        (None, None) => return Err(usage("a prompt is missing: expected -p, -f or --prompt-tokens")),
    };
    if let Prompt::Tokens(tokens) = &prompt {
        model::known_tokens(tokens, &source)?;
    }
    let mut engine = args::load(source, &full(&args.device), context)?;
    let tokens = prompt.tokens(&engine)?;
    let routes = engine.route(&tokens, &context.interrupt.graceful())?;
    note_incomparable(&routes, &context.out);
    let winner = routes.first().map(|best| &best.id);
    let line = |route: &Route| escape(format!("{}  E {:.6}", route.id, route.energy));
    let object = json!({"winner": winner, "routes": routes, "tokens": tokens.len()});
    context.answer(object, routes.iter().map(line))
}

#[derive(clap::Args)]
pub struct FitArgs {
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
    /// Most dimensions of the skill's subspace
    #[arg(long, value_name = "R", default_value_t = 16, value_parser = positive::<usize>, allow_negative_numbers = true)]
    rank: usize,
}

/// The options of measuring prompts: without a mask, also if the file has a default task.
fn full(device: &DeviceArgs) -> LoadOptions {
    device.options().task(TaskChoice::Full)
}

/// The example prompts of a file. Errors: `Parse` for JSON that is not a list of prompts.
fn examples(text: &str, path: &Path) -> Result<Vec<Prompt>> {
    if path.extension().is_none_or(|extension| extension != "json") {
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        return Ok(lines.map(|line| Prompt::Text(line.to_owned())).collect());
    }
    let wrong = |message: String| Error::new(Kind::Parse, format!("{}: {message}", path.display()));
    let list: Vec<Value> = serde_json::from_str(text).map_err(|err| wrong(err.to_string()))?;
    let example = |(i, value)| {
        let wrong = |_| wrong(format!("item {i}: expected a text or a list of token ids"));
        serde_json::from_value(value).map_err(wrong)
    };
    list.into_iter().enumerate().map(example).collect()
}

impl FitArgs {
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

/// Learns from examples which prompts fit a skill.
pub fn fit(args: FitArgs, context: &mut Context) -> Result {
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
        let tokens = example.tokens(&engine)?;
        let phi = engine.mean_hidden(&tokens, &[layer], &cancel);
        means.extend(phi.map_err(|err| err.context(format_args!("example {i}")))?);
        bar.set(i as u64 + 1, examples.len() as u64);
    }
    drop(bar);
    // Unmaps the file before it is changed.
    drop(engine);
    let selection = routing::fit(&means, layer, args.rank)?;
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

#[derive(clap::Args)]
#[command(mut_arg("ctx", |arg| arg.help(CTX_HELP)))]
pub struct MeasureArgs {
    /// The .cmf file, which is changed
    model: PathBuf,
    /// The skill
    id: String,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    task: TaskArgs,
    /// A text of the skill's kind that is not in its training data; - = stdin
    #[arg(short, long)]
    file: PathBuf,
    /// Tokens from one window's start to the next [default: half a window]
    #[arg(long, value_parser = whole::<usize>, allow_negative_numbers = true)]
    stride: Option<usize>,
}

/// Measures the perplexity of a text without and with a skill.
pub fn measure(args: MeasureArgs, context: &mut Context) -> Result {
    let text = read_text(&args.file)?;
    let source = model::open(&args.model)?;
    source.with_skill(Some(&args.id))?;
    let mut options = args.device.options().task(args.task.choice());
    let windows = Windows::new(&mut options, &source, args.stride)?;
    let mut engine = args::load(source, &options, context)?;
    let tokens = tokens(&engine, &text, &args.file)?;
    let (backbone, count) = windows.measure(&mut engine, &tokens, context)?;
    let without = engine.task().unwrap_or(NO_TASK).to_owned();
    context.out.notices(&engine.set_skill(Some(&args.id))?);
    let task = engine.task().unwrap_or(NO_TASK).to_owned();
    if task != without {
        context.out.note(format!("with skill {}: task {task}", args.id));
    }
    let (overlaid, _) = windows.measure(&mut engine, &tokens, context)?;
    // Unmaps the file before it is changed.
    drop(engine);
    let (backbone, overlaid) = (backbone.exp(), overlaid.exp());
    let written = set_quality(&args.model, &args.id, (backbone, &without), (overlaid, &task), &text)?;
    context.out.notices(&written.notes);
    let id = &args.id;
    let line = format!("ppl {backbone:.4} without skill {id}, {overlaid:.4} with it ({count} tokens)");
    let object = json!({
        "skill": id, "metric": "ppl", "backbone": backbone, "overlaid": overlaid, "tokens": count,
        "backbone_task": without, "task": task,
    });
    context.answer(object, [line])
}

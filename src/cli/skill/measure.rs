//! `skill measure`: the perplexity of a text without and with a skill.

use crate::cli::args::{self, DeviceArgs, TaskArgs, whole};
use crate::cli::context::{Context, Result};
use crate::cli::file::read_text;
use crate::cli::model;
use crate::cli::ppl::{CTX_HELP, Windows, tokens};
use cmf_gpu::source::NO_TASK;
use cmf_gpu::tools::skill::set_quality;
use serde_json::json;
use std::path::PathBuf;

#[derive(clap::Args)]
#[command(mut_arg("ctx", |arg| arg.help(CTX_HELP)))]
pub struct Args {
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

pub fn run(args: Args, context: &mut Context) -> Result {
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

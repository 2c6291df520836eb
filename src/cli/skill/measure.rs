//! `skill measure`: what a skill is worth, by the perplexity of a text.

use crate::cli::args::{self, DeviceArgs, TaskArgs, read_text, whole};
use crate::cli::ppl::{Windows, tokens};
use crate::cli::{Context, Outcome, Result, model};
use cmf_gpu::container::{NO_TASK, SkillView};
use cmf_gpu::tools::registry::set_quality;
use serde_json::json;
use std::path::PathBuf;

/// Flags of `skill measure`.
#[derive(clap::Args)]
#[command(mut_arg("ctx", |arg| arg.help("Tokens of a window; 0 = what the model was trained for [default: 512]")))]
pub struct Args {
    /// The .cmf file, which changes
    model: PathBuf,
    /// The skill
    id: String,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    task: TaskArgs,
    /// A text of the skill's task that it was not trained with; - = stdin
    #[arg(short, long, env = "CMF_GPU_FILE", hide_env = true)]
    file: PathBuf,
    /// Tokens from one window's start to the next [default: half a window]
    #[arg(long, env = "CMF_GPU_STRIDE", value_parser = whole::<usize>, allow_negative_numbers = true, hide_env = true)]
    stride: Option<usize>,
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let text = read_text(&args.file)?;
    let container = model::open(&args.model)?;
    model::runnable(&container)?;
    SkillView::new(&container, Some(&args.id))?;
    let mut options = args.device.options();
    options.task = args.task.choice();
    let windows = Windows::planned(&mut options, &container, args.stride)?;
    let mut engine = args::load(container, &options, context)?;
    let tokens = tokens(&engine, &text, &args.file)?;
    let (backbone, count) = windows.measure(&mut engine, &tokens, context)?;
    let without = engine.task().unwrap_or(NO_TASK).to_owned();
    if let Some(notice) = engine.set_skill(Some(&args.id))? {
        context.out.note(format!("note: {notice}"));
    }
    let task = engine.task().unwrap_or(NO_TASK).to_owned();
    if task != without {
        context.out.note(format!("with skill {}: task {task}", args.id));
    }
    let (overlaid, _) = windows.measure(&mut engine, &tokens, context)?;
    // Nothing reads the file while it grows.
    drop(engine);
    let (backbone, overlaid) = (backbone.exp(), overlaid.exp());
    let written = set_quality(&args.model, &args.id, (backbone, &without), (overlaid, &task), &text)?;
    for note in &written.notes {
        context.out.note(format!("note: {note}"));
    }
    match context.out.json {
        true => context.out.json(&json!({
            "skill": args.id, "metric": "ppl", "backbone": backbone, "overlaid": overlaid, "tokens": count,
            "backbone_task": without, "task": task,
        }))?,
        false => context.out.line(format!(
            "ppl {backbone:.4} without skill {}, {overlaid:.4} with it ({count} tokens)",
            args.id
        ))?,
    }
    Ok(Outcome::Done)
}

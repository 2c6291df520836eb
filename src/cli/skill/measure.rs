//! `skill measure`: what a skill is worth, by the perplexity of a text.

use crate::cli::args::{self, DeviceArgs, read_text, whole};
use crate::cli::ppl::{Windows, tokens};
use crate::cli::{Context, Outcome, Result, model};
use cmf_gpu::container::SkillView;
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
    SkillView::new(&container, Some(&args.id))?;
    let mut options = args.device.options();
    let windows = Windows::planned(&mut options, &container, args.stride)?;
    let mut engine = args::load(container, &options, context)?;
    let tokens = tokens(&engine, &text, &args.file)?;
    let (backbone, count) = windows.measure(&mut engine, &tokens, context)?;
    engine.set_skill(Some(&args.id))?;
    let (overlaid, _) = windows.measure(&mut engine, &tokens, context)?;
    // Nothing reads the file while it grows.
    drop(engine);
    let (backbone, overlaid) = (backbone.exp(), overlaid.exp());
    let written = set_quality(&args.model, &args.id, backbone, overlaid, &text)?;
    for note in &written.notes {
        context.out.note(format!("note: {note}"));
    }
    match context.out.json {
        true => context.out.json(&json!({
            "skill": args.id, "metric": "ppl", "backbone": backbone, "overlaid": overlaid, "tokens": count,
        }))?,
        false => context.out.line(format!(
            "ppl {backbone:.4} without skill {}, {overlaid:.4} with it ({count} tokens)",
            args.id
        ))?,
    }
    Ok(Outcome::Done)
}

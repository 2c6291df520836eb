//! `skill route`: how well each skill fits a prompt. The prompt gets no template, and the model no mask.

use super::fit::full;
use crate::cli::args::{self, DeviceArgs};
use crate::cli::context::{Context, Result, usage};
use crate::cli::model;
use crate::cli::overlay::note_incomparable;
use crate::cli::prompt::{self, Given, PromptArgs};
use cmf_gpu::error::escape;
use serde_json::json;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// A .cmf file; any one of the files if the model has several
    model: PathBuf,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    prompt: PromptArgs,
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let source = model::open(&args.model)?;
    let (text, tokens) = match args.prompt.given() {
        Some(Given::Text(text)) => (text.to_owned(), None),
        Some(Given::File(file)) => (prompt::read(file)?, None),
        Some(Given::Tokens(tokens)) => (String::new(), Some(tokens.to_owned())),
        None => return Err(usage("a prompt is missing: expected -p, -f or --prompt-tokens")),
    };
    if let Some(tokens) = &tokens {
        model::known_tokens(tokens, &source)?;
    }
    let mut engine = args::load(source, &full(&args.device), context)?;
    let tokens = match tokens {
        Some(tokens) => tokens,
        None => engine.tokenizer()?.encode(&text, true)?,
    };
    let routes = engine.route(&tokens, &context.interrupt.graceful())?;
    note_incomparable(&routes, &context.out);
    let winner = routes.first().map(|best| &best.id);
    let lines = routes
        .iter()
        .map(|route| escape(format!("{}  E {:.6}", route.id, route.energy)));
    context.answer(
        json!({"winner": winner, "routes": routes, "tokens": tokens.len()}),
        lines,
    )
}

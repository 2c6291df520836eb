//! `skill route`: how well each skill fits a prompt, taken as it is, without a template, in the model without masks.

use super::fit::full;
use crate::cli::args::{self, DeviceArgs};
use crate::cli::overlay::note_incomparable;
use crate::cli::prompt::{self, Given, PromptArgs};
use crate::cli::{Context, Outcome, Result, model, usage};
use cmf_gpu::error::escape;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Flags of `skill route`.
#[derive(clap::Args)]
pub struct Args {
    /// A .cmf file; of a model in several files, any of them
    model: PathBuf,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    prompt: PromptArgs,
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let matches = context.matches.subcommand().map(|(_, own)| own.clone());
    let container = model::open(&args.model)?;
    let (text, tokens) = match args.prompt.given(&matches.unwrap_or_default())? {
        Some(Given::Text(text)) => (text.to_owned(), None),
        Some(Given::File(file)) => (prompt::read(file)?, None),
        Some(Given::Tokens(tokens)) => (String::new(), Some(tokens.to_owned())),
        None => return Err(usage("wanted a prompt: -p, -f or --prompt-tokens")),
    };
    if let Some(tokens) = &tokens {
        model::known_tokens(tokens, &container)?;
    }
    let mut engine = args::load(container, &full(&args.device), context)?;
    let tokens = match tokens {
        Some(tokens) => tokens,
        None => engine.tokenizer()?.encode(&text, true)?,
    };
    let routes = engine.route(&tokens, &context.interrupt.graceful())?;
    note_incomparable(&routes, &context.out);
    if context.out.json {
        let energies: Vec<Value> = routes
            .iter()
            .map(|route| json!({"id": route.id, "energy": route.energy, "phi_layer": route.phi_layer}))
            .collect();
        context.out.json(&json!({
            "winner": routes.first().map(|best| &best.id),
            "routes": energies,
            "tokens": tokens.len(),
        }))?;
    } else {
        for route in &routes {
            context
                .out
                .line(escape(format!("{}  E {:.6}", route.id, route.energy)))?;
        }
    }
    Ok(Outcome::Done)
}

//! `skill route`: how well each skill fits a prompt.

use crate::cli::args::{self, DeviceArgs, Tokens, chosen, read_text, token_list};
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
    /// The prompt, as it is: no template
    #[arg(
        short,
        long,
        env = "CMF_GPU_PROMPT",
        value_name = "TEXT",
        allow_hyphen_values = true,
        hide_env = true
    )]
    prompt: Option<String>,
    /// A file with the prompt; - = stdin
    #[arg(short, long, env = "CMF_GPU_FILE", hide_env = true)]
    file: Option<PathBuf>,
    /// The prompt as token ids
    #[arg(long, env = "CMF_GPU_PROMPT_TOKENS", value_name = "IDS", value_parser = token_list, hide_env = true)]
    prompt_tokens: Option<Tokens>,
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let matches = context.matches.subcommand().map(|(_, own)| own.clone());
    let which = chosen(&matches.unwrap_or_default(), &["prompt", "file", "prompt_tokens"])?;
    let container = model::open(&args.model)?;
    let (text, tokens) = match (which, args.prompt, &args.file, args.prompt_tokens) {
        (Some("prompt"), Some(text), ..) => (text, None),
        (Some("file"), _, Some(file), _) => {
            let text = read_text(file)?;
            (text.strip_suffix('\n').unwrap_or(&text).to_owned(), None)
        }
        (Some("prompt_tokens"), _, _, Some(Tokens(tokens))) => (String::new(), Some(tokens)),
        _ => return Err(usage("wanted a prompt: -p, -f or --prompt-tokens")),
    };
    if let Some(tokens) = &tokens {
        model::known_tokens(tokens, &container)?;
    }
    let mut engine = args::load(container, &args.device.options(), context)?;
    let tokens = match tokens {
        Some(tokens) => tokens,
        None => engine.tokenizer()?.encode(&text, true)?,
    };
    let routes = engine.route(&tokens, &context.interrupt.graceful())?;
    if context.out.json {
        let energies: Vec<Value> = routes
            .iter()
            .map(|route| json!({"id": route.id, "energy": route.energy}))
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

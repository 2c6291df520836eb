//! `detokenize`: tokens as text, special tokens included.

use super::args::{Tokens, token_list};
use super::tokenize::tokenizer;
use super::{Context, Outcome, Result, usage};
use cmf_gpu::container::Container;
use serde_json::json;
use std::path::PathBuf;

/// Flags of `detokenize`.
#[derive(clap::Args)]
pub struct Args {
    /// A .cmf file
    model: PathBuf,
    /// Token ids, separated by commas
    #[arg(value_parser = token_list, allow_hyphen_values = true)]
    tokens: Tokens,
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let container = Container::open(&args.model)?;
    let tokenizer = tokenizer(&container)?;
    let Tokens(tokens) = args.tokens;
    if let Some(id) = tokens.iter().find(|&&id| tokenizer.token(id).is_none()) {
        let size = tokenizer.vocab_size();
        return Err(usage(format!("token {id} is not in the vocabulary of {size}")));
    }
    let text = tokenizer.decode(&tokens, false)?;
    match context.out.json {
        true => context.out.json(&json!({"text": text}))?,
        false => context.out.line(text)?,
    }
    Ok(Outcome::Done)
}

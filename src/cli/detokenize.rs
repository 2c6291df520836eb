//! `detokenize`: tokens as text, special tokens included.

use super::args::{Tokens, token_list};
use super::model::{ModelAndText, open};
use super::tokenize::tokenizer;
use super::{Context, Outcome, Result, usage};
use serde_json::json;

/// Flags of `detokenize`.
#[derive(clap::Args)]
#[command(override_usage = "cmf-gpu detokenize [OPTIONS] [MODEL] <IDS>")]
#[command(mut_arg("second", |arg| arg.value_name("IDS").help("Token ids, separated by commas")))]
pub struct Args {
    #[command(flatten)]
    what: ModelAndText,
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let (path, ids) = args.what.split(context)?;
    let Tokens(tokens) = token_list(&ids).map_err(usage)?;
    let tokenizer = tokenizer(&open(&path)?)?;
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

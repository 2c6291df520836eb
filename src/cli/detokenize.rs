//! `detokenize`: tokens as text, special tokens included.

use super::args;
use super::context::{Context, Outcome, Result, usage};
use super::model::{ModelAndText, open};
use super::tokenize::tokenizer;
use serde_json::json;

/// Flags of `detokenize`.
#[derive(clap::Args)]
#[command(override_usage = "cmf-gpu detokenize [OPTIONS] [MODEL] <IDS>")]
#[command(mut_arg("second", |arg| arg.value_name("IDS").help("Token ids, separated by commas")))]
pub struct Args {
    #[command(flatten)]
    input: ModelAndText,
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let (path, ids) = args.input.split()?;
    let ids: Vec<u64> = args::ids(&ids).map_err(usage)?;
    let tokenizer = tokenizer(&open(&path)?)?;
    let known = |&id: &u64| {
        let token = u32::try_from(id).ok().filter(|&id| tokenizer.token(id).is_some());
        token.ok_or_else(|| {
            let size = tokenizer.vocab_size();
            usage(format!("token {id} is not in the vocabulary of {size}"))
        })
    };
    let tokens: Vec<u32> = ids.iter().map(known).collect::<Result<_>>()?;
    let text = tokenizer.decode(&tokens, false)?;
    match context.out.json {
        true => context.out.json(&json!({"text": text}))?,
        false => context.out.line(text)?,
    }
    Ok(Outcome::Done)
}

//! `tokenize`: a text as the model sees it.

use super::args::show_tokens;
use super::model::{ModelAndText, open};
use super::{Context, Outcome, Result};
use clap::builder::FalseyValueParser;
use cmf_gpu::container::Container;
use cmf_gpu::text::Tokenizer;
use cmf_gpu::{Error, Kind};
use serde_json::json;

/// Flags of `tokenize`.
#[derive(clap::Args)]
#[command(override_usage = "cmf-gpu tokenize [OPTIONS] [MODEL] <TEXT>")]
#[command(mut_arg("second", |arg| arg.help("The text; special tokens in it are parsed")))]
pub struct Args {
    #[command(flatten)]
    what: ModelAndText,
    /// Leaves out what the tokenizer adds to a text, as a token for its beginning
    #[arg(long, env = "CMF_GPU_NO_SPECIAL", value_parser = FalseyValueParser::new(), hide_env = true)]
    no_special: bool,
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let (path, text) = args.what.split(context)?;
    let tokens = tokenizer(&open(&path)?)?.encode(&text, !args.no_special)?;
    match context.out.json {
        true => context.out.json(&json!({"tokens": tokens}))?,
        false => context.out.line(show_tokens(&tokens))?,
    }
    Ok(Outcome::Done)
}

/// The tokenizer of a file. Errors: `Tokenizer`, also when there is none.
pub fn tokenizer(container: &Container) -> Result<Tokenizer> {
    match container.tokenizer_json() {
        Some(bytes) => Tokenizer::from_json(bytes),
        None => Err(Error::new(Kind::Tokenizer, "the file has no tokenizer")),
    }
}

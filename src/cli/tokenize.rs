//! `tokenize`: the tokens of a text.

use super::args::show_tokens;
use super::context::{Context, Outcome, Result};
use super::model::{ModelAndText, open};
use cmf_gpu::source::ModelSource;
use cmf_gpu::text::Tokenizer;
use cmf_gpu::{Error, Kind};
use serde_json::json;

/// Flags of `tokenize`.
#[derive(clap::Args)]
#[command(override_usage = "cmf-gpu tokenize [OPTIONS] [MODEL] <TEXT>")]
#[command(mut_arg("second", |arg| arg.help("The text; special tokens in it are parsed")))]
pub struct Args {
    #[command(flatten)]
    input: ModelAndText,
    /// Leaves out tokens that the tokenizer adds, such as a token for the start of the text
    #[arg(long)]
    no_special: bool,
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let (path, text) = args.input.split()?;
    let tokens = tokenizer(&open(&path)?)?.encode(&text, !args.no_special)?;
    match context.out.json {
        true => context.out.json(&json!({"tokens": tokens}))?,
        false => context.out.line(show_tokens(&tokens))?,
    }
    Ok(Outcome::Done)
}

/// The tokenizer of a file. Errors: `Tokenizer` when it is missing or invalid.
pub fn tokenizer(source: &ModelSource) -> Result<Tokenizer> {
    match source.text.tokenizer_json() {
        Some(bytes) => Tokenizer::from_json(bytes),
        None => Err(Error::new(Kind::Tokenizer, "the file has no tokenizer")),
    }
}

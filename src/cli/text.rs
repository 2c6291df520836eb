//! `chat-template`, `tokenize` and `detokenize`: what the tokenizer and the chat template make of a text.

use super::args::{ids, show_tokens};
use super::context::{Context, Outcome, Result, usage};
use super::file::read_text;
use super::model::{ModelAndText, ModelArgs, open, require_language};
use cmf_gpu::format::json as strict_json;
use cmf_gpu::source::ModelSource;
use cmf_gpu::text::{self, ChatTemplate, RenderOptions, Tokenizer};
use cmf_gpu::{Error, Kind};
use serde_json::{Value, json};
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct TemplateArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// A JSON file: a list of objects with role and content; - = stdin
    #[arg(long, value_name = "FILE")]
    messages: PathBuf,
    /// A JSON file: a list of tool descriptions
    #[arg(long, value_name = "FILE")]
    tools: Option<PathBuf>,
    /// Further variables of the template, a JSON object
    #[arg(long, value_name = "JSON")]
    kwargs: Option<String>,
    /// Leaves out the start of the answer
    #[arg(long)]
    no_generation_prompt: bool,
}

#[derive(clap::Args)]
#[command(override_usage = "cmf-gpu tokenize [OPTIONS] [MODEL] <TEXT>")]
#[command(mut_arg("second", |arg| arg.help("The text; special tokens in it are parsed")))]
pub struct TokenizeArgs {
    #[command(flatten)]
    input: ModelAndText,
    /// Leaves out tokens that the tokenizer adds, such as a token for the start of the text
    #[arg(long)]
    no_special: bool,
}

#[derive(clap::Args)]
#[command(override_usage = "cmf-gpu detokenize [OPTIONS] [MODEL] <IDS>")]
#[command(mut_arg("second", |arg| arg.value_name("IDS").help("Token ids, separated by commas")))]
pub struct DetokenizeArgs {
    #[command(flatten)]
    input: ModelAndText,
}

/// The prompt that the template makes of a conversation, as text and as tokens.
pub fn template(args: TemplateArgs, context: &mut Context) -> Result {
    let source = open(&args.model.path()?)?;
    require_language(&source)?;
    let assets = &source.text;
    let tokenizer = tokenizer(&source)?;
    let template = match &assets.chat_template {
        Some(source) => ChatTemplate::new(source)?,
        None => ChatTemplate::chatml()?,
    };
    let Value::Array(messages) = strict_json::parse(read_text(&args.messages)?.as_bytes(), "messages")? else {
        return Err(usage("--messages: expected a list of messages"));
    };
    let tools = match &args.tools {
        Some(path) => Some(strict_json::parse(read_text(path)?.as_bytes(), "tools")?),
        None => None,
    };
    let kwargs = match &args.kwargs {
        Some(text) => strict_json::parse_object(text.as_bytes(), "kwargs")?,
        None => Default::default(),
    };
    let eos = assets.eos_token_ids.first().copied();
    let options = RenderOptions {
        add_generation_prompt: !args.no_generation_prompt,
        tools,
        special_tokens: text::special_tokens_map(&tokenizer, assets.bos_token_id, eos, assets.pad_token_id)?,
        kwargs,
        ..RenderOptions::default()
    };
    let rendered = template.render(&messages, &options)?;
    if context.out.json {
        let guarded = text::guard_messages(&tokenizer, &messages)?;
        let tools = match &options.tools {
            Some(Value::Array(tools)) => Some(Value::Array(text::guard_messages(&tokenizer, tools)?)),
            other => other.clone(),
        };
        let options = RenderOptions { tools, ..options };
        let tokens = tokenizer.encode_guarded(&template.render(&guarded, &options)?)?;
        context.out.json(&json!({"text": rendered, "tokens": tokens}))?;
    } else {
        context.out.text(&rendered)?;
    }
    Ok(Outcome::Done)
}

/// The tokens of a text.
pub fn tokenize(args: TokenizeArgs, context: &mut Context) -> Result {
    let (path, text) = args.input.split()?;
    let tokens = tokenizer(&open(&path)?)?.encode(&text, !args.no_special)?;
    context.answer(json!({"tokens": tokens}), [show_tokens(&tokens)])
}

/// Tokens as text, special tokens included.
pub fn detokenize(args: DetokenizeArgs, context: &mut Context) -> Result {
    let (path, text) = args.input.split()?;
    let ids: Vec<u64> = ids(&text).map_err(usage)?;
    let tokenizer = tokenizer(&open(&path)?)?;
    let known = |&id: &u64| {
        let token = u32::try_from(id).ok().filter(|&id| tokenizer.token(id).is_some());
        let size = tokenizer.vocab_size();
        token.ok_or_else(|| usage(format!("token {id} is not in the vocabulary of {size}")))
    };
    let tokens: Vec<u32> = ids.iter().map(known).collect::<Result<_>>()?;
    let text = tokenizer.decode(&tokens, false)?;
    context.answer(json!({"text": text}), [&text])
}

/// The tokenizer of a file. Errors: `Tokenizer` when it is missing or invalid.
fn tokenizer(source: &ModelSource) -> Result<Tokenizer> {
    match source.text.tokenizer_json() {
        Some(bytes) => Tokenizer::from_json(bytes),
        None => Err(Error::new(Kind::Tokenizer, "the file has no tokenizer")),
    }
}

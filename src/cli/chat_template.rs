//! `chat-template`: the prompt that the template makes of a conversation, as text and as tokens.

use super::args::read_text;
use super::context::{Context, Outcome, Result, usage};
use super::model::{ModelArgs, open};
use super::tokenize::tokenizer;
use cmf_gpu::format::json as strict_json;
use cmf_gpu::text::{self, ChatTemplate, RenderOptions};
use serde_json::{Value, json};
use std::path::PathBuf;

/// Flags of `chat-template`.
#[derive(clap::Args)]
pub struct Args {
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

pub fn run(args: Args, context: &mut Context) -> Result {
    let source = open(&args.model.path()?)?;
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

//! A prompt by flags: text, a file, or token ids.

use super::args::{Tokens, token_list};
use super::context::usage;
use super::file::read_text;
use cmf_gpu::{Engine, Result};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// The flags, of which one at most is given.
#[derive(clap::Args)]
#[group(multiple = false)]
pub struct PromptArgs {
    /// The prompt
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// A file with the prompt, without its last line break; - = stdin
    #[arg(short, long)]
    file: Option<PathBuf>,
    /// The prompt as token ids: no template, no added tokens
    #[arg(long, value_name = "IDS", value_parser = token_list)]
    prompt_tokens: Option<Tokens>,
}

/// A prompt; in JSON a text or a list of token ids.
#[derive(Deserialize)]
#[serde(untagged)]
pub enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

impl Prompt {
    /// The tokens, without the chat template. Errors: those of the tokenizer.
    pub fn tokens(&self, engine: &Engine) -> Result<Vec<u32>> {
        match self {
            Prompt::Tokens(tokens) => Ok(tokens.clone()),
            Prompt::Text(text) => engine.tokenizer()?.encode(text, true),
        }
    }
}

impl PromptArgs {
    /// The prompt of `--prompt` or `--prompt-tokens`.
    pub fn given(&self) -> Option<Prompt> {
        let tokens = || {
            self.prompt_tokens
                .as_ref()
                .map(|Tokens(tokens)| Prompt::Tokens(tokens.clone()))
        };
        self.prompt.clone().map(Prompt::Text).or_else(tokens)
    }

    /// Sets the prompt that is given by position. Errors: `Usage` when a flag gives one too.
    pub fn set(&mut self, text: String) -> Result<()> {
        if self.given().is_some() || self.file.is_some() {
            return Err(usage("the prompt is given twice, by position and by a flag"));
        }
        self.prompt = Some(text);
        Ok(())
    }

    /// The file of `--file`, to be read by [`read`].
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }
}

/// The text of a prompt file without its last line break. Errors: those of [`read_text`].
pub fn read(file: &Path) -> Result<String> {
    let text = read_text(file)?;
    let line = text.strip_suffix('\n').unwrap_or(&text);
    Ok(line.strip_suffix('\r').unwrap_or(line).into())
}

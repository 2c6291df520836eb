//! A prompt by flags: text, a file, or token ids.

use super::args::{Tokens, token_list};
use super::file::read_text;
use cmf_gpu::Result;
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

/// The prompt by the flag that was given.
pub enum Given<'a> {
    /// `--prompt`
    Text(&'a str),
    /// `--file`, to be read by [`read`]
    File(&'a Path),
    /// `--prompt-tokens`
    Tokens(&'a [u32]),
}

impl PromptArgs {
    /// The prompt, if there is one.
    pub fn given(&self) -> Option<Given<'_>> {
        let text = self.prompt.as_deref().map(Given::Text);
        let tokens = || self.prompt_tokens.as_ref().map(|Tokens(tokens)| Given::Tokens(tokens));
        text.or_else(|| self.file().map(Given::File)).or_else(tokens)
    }

    /// The file of `--file`.
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

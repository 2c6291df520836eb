//! A prompt by flags: text, a file, or token ids.

use super::Result;
use super::args::{Tokens, chosen, read_text, token_list};
use clap::ArgMatches;
use std::path::{Path, PathBuf};

/// The flags, of which one is in force.
#[derive(clap::Args)]
pub struct PromptArgs {
    /// The prompt
    #[arg(
        short,
        long,
        env = "CMF_GPU_PROMPT",
        value_name = "TEXT",
        allow_hyphen_values = true,
        hide_env = true
    )]
    prompt: Option<String>,
    /// A file with the prompt; - = stdin. One line end at its end is not part of the prompt
    #[arg(short, long, env = "CMF_GPU_FILE", hide_env = true)]
    file: Option<PathBuf>,
    /// The prompt as token ids, as they are: no template, nothing added
    #[arg(long, env = "CMF_GPU_PROMPT_TOKENS", value_name = "IDS", value_parser = token_list, hide_env = true)]
    prompt_tokens: Option<Tokens>,
}

/// What the flag in force holds.
pub enum Given<'a> {
    /// `--prompt`
    Text(&'a str),
    /// `--file`, to be read by [`read`]
    File(&'a Path),
    /// `--prompt-tokens`
    Tokens(&'a [u32]),
}

impl PromptArgs {
    /// The prompt, if there is one. Errors: `Usage` when several are given.
    pub fn given(&self, matches: &ArgMatches) -> Result<Option<Given<'_>>> {
        Ok(match chosen(matches, &["prompt", "file", "prompt_tokens"])? {
            Some("prompt") => self.prompt.as_deref().map(Given::Text),
            Some("file") => self.file().map(Given::File),
            Some(_) => self.prompt_tokens.as_ref().map(|Tokens(tokens)| Given::Tokens(tokens)),
            None => None,
        })
    }

    /// The file that is named, whether it is in force or not.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }
}

/// A prompt's file without the line end at its end. Errors: those of [`read_text`].
pub fn read(file: &Path) -> Result<String> {
    let mut text = read_text(file)?;
    if text.ends_with('\n') {
        text.pop();
    }
    if text.ends_with('\r') {
        text.pop();
    }
    Ok(text)
}

//! Which model a command gets, and what is said when there is none.

use super::{Context, Result, usage};
use clap::Args;
use clap::parser::ValueSource;
use cmf_gpu::container::Container;
use cmf_gpu::{Error, Kind};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The model, by position or by flag.
#[derive(Args)]
pub struct ModelArgs {
    /// A .cmf file; of a model in several files, any of them
    #[arg(value_name = "MODEL")]
    model: Option<PathBuf>,
    #[command(flatten)]
    flag: ModelFlag,
}

/// The model, by flag.
#[derive(Args)]
pub struct ModelFlag {
    /// The model, as a flag
    #[arg(
        short = 'm',
        long = "model",
        env = "CMF_GPU_MODEL",
        value_name = "MODEL",
        hide_env = true
    )]
    model_flag: Option<PathBuf>,
}

impl ModelFlag {
    /// The model of a command that was given this one by position, or none. Errors: `Usage` when there are two.
    fn or(&self, given: Option<PathBuf>, context: &Context) -> Result<Option<PathBuf>> {
        let flag_given = context.matches.value_source("model_flag") == Some(ValueSource::CommandLine);
        match (given, &self.model_flag) {
            (Some(_), Some(_)) if flag_given => Err(usage("the model is given twice, as MODEL and with -m")),
            (Some(path), _) => Ok(Some(path)),
            (None, flag) => Ok(flag.clone()),
        }
    }
}

impl ModelArgs {
    /// The model's path. Errors: `Usage` when there is none, or two.
    pub fn path(&self, context: &Context) -> Result<PathBuf> {
        self.optional(context)?.ok_or_else(|| usage("a MODEL is missing"))
    }

    /// The model's path where a command also works without one. Errors: `Usage` when there are two.
    pub fn optional(&self, context: &Context) -> Result<Option<PathBuf>> {
        self.flag.or(self.model.clone(), context)
    }
}

/// The model and a text: both by position, or the text alone when the model comes from the flag or the environment.
#[derive(Args)]
pub struct ModelAndText {
    /// A .cmf file; left out with -m
    #[arg(value_name = "MODEL", required = true)]
    first: Option<OsString>,
    /// The text, or the token ids
    #[arg(value_name = "TEXT", allow_hyphen_values = true)]
    second: Option<OsString>,
    #[command(flatten)]
    flag: ModelFlag,
}

impl ModelAndText {
    /// The model's path and the text. Errors: `Usage` when one is missing or given twice, or when the text is none.
    pub fn split(self, context: &Context) -> Result<(PathBuf, String)> {
        let (model, text) = match (self.first, self.second) {
            (Some(model), Some(text)) => (Some(PathBuf::from(model)), Some(text)),
            (text, _) => (None, text),
        };
        let Some(path) = self.flag.or(model, context)? else {
            return Err(usage("wanted a MODEL and what to look at in it"));
        };
        match text.map(OsString::into_string) {
            Some(Ok(text)) => Ok((path, text)),
            Some(Err(text)) => Err(usage(format!("'{}' is not UTF-8", text.display()))),
            None => Err(usage("wanted a MODEL and what to look at in it")),
        }
    }
}

/// Refuses ids that a vocabulary does not have. Errors: `Usage`.
pub fn known_tokens(tokens: &[u32], container: &Container) -> Result<()> {
    let vocab = container.header().arch.vocab_size;
    match tokens.iter().find(|&&token| token as usize >= vocab) {
        Some(token) => Err(usage(format!("token {token} is not in the vocabulary of {vocab}"))),
        None => Ok(()),
    }
}

/// Most models that a hint names.
const HINTS: usize = 5;

/// Opens a model's file. Errors: as [`Container::open`]; where there is no such file, also what could have been meant.
pub fn open(path: &Path) -> Result<Container> {
    Container::open(path).map_err(|err| match err.kind {
        Kind::Io => there(path).err().unwrap_or(err),
        _ => err,
    })
}

/// Errors: `SkillFile` for a file that holds a skill and no model.
pub fn runnable(container: &Container) -> Result<()> {
    match container.is_skill_file() {
        true => Err(Error::new(
            Kind::SkillFile,
            "this file is a skill: it is applied to a model and never run by itself",
        )),
        false => Ok(()),
    }
}

/// Errors: `Io` where there is no such file, or a directory, with what could have been meant.
pub fn there(path: &Path) -> Result<()> {
    if path.is_dir() {
        return Err(not_a_model(path, "a directory, and a model is a file", path));
    }
    there_at_all(path)
}

/// Errors: `Io` where there is neither a file nor a directory, with what could have been meant.
pub fn there_at_all(path: &Path) -> Result<()> {
    if path.exists() {
        return Ok(());
    }
    let beside = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    let beside = beside.unwrap_or(Path::new("."));
    Err(match beside.is_dir() {
        true => not_a_model(path, "no such file", beside),
        false => Error::new(
            Kind::Io,
            format!("{}: no such file, nor a directory {}", path.display(), beside.display()),
        ),
    })
}

/// The error for a path that is no model's, with the models of a directory.
fn not_a_model(path: &Path, what: &str, dir: &Path) -> Error {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut models: Vec<String> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| is_whole_or_first(name))
        .collect();
    models.sort();
    let dir = dir.display();
    let hint = match models.len() {
        0 if path.join("config.json").is_file() => {
            format!("`cmf-gpu convert {dir} -o model.cmf` makes one of what is in there")
        }
        0 => format!("there is no .cmf file in {dir}; `cmf-gpu convert` makes them"),
        count => {
            models.truncate(HINTS);
            let more = if count > HINTS { ", ..." } else { "" };
            format!("in {dir} there is {}{more}", models.join(", "))
        }
    };
    Error::new(Kind::Io, format!("{}: {what}; {hint}", path.display()))
}

/// Whether a name is that of a model in one file, or of the first of several files.
fn is_whole_or_first(name: &str) -> bool {
    let Some(stem) = name.strip_suffix(".cmf") else {
        return false;
    };
    let number = |text: &str| text.parse::<u32>().ok();
    let shard = stem.rsplit_once("-of-").and_then(|(front, count)| {
        number(count)?;
        number(front.rsplit_once('-')?.1)
    });
    shard.is_none_or(|shard| shard == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_model_in_several_files_one_is_offered() {
        for name in [
            "m.cmf",
            "m-00001-of-00003.cmf",
            "m-of-2.cmf",
            "best-of-breed.cmf",
            "a-b-of-3.cmf",
        ] {
            assert!(is_whole_or_first(name), "{name}");
        }
        for name in [
            "m-00002-of-00003.cmf",
            "m-3-of-3.cmf",
            "m.gguf",
            "cmf",
            ".cmf-x.partial",
        ] {
            assert!(!is_whole_or_first(name), "{name}");
        }
    }
}

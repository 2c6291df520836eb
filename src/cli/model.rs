//! The model that a command works on, and hints when there is no such file.

use super::context::{Result, usage};
use clap::Args;
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::source::{self, Format, ModelSource};
use cmf_gpu::{Error, Kind};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The environment variable with the model of a command that is given none.
pub const ENVIRONMENT: &str = "CMF_GPU_MODEL";

/// The model, by position or by flag.
#[derive(Args)]
pub struct ModelArgs {
    /// A .cmf, .gguf or .ninfer file, any one of the files if the model has several, or a Hugging Face or
    /// diffusers directory
    #[arg(value_name = "MODEL")]
    model: Option<PathBuf>,
    #[command(flatten)]
    flag: ModelFlag,
}

/// The model, by flag.
#[derive(Args)]
pub struct ModelFlag {
    /// The model, as a flag [env: CMF_GPU_MODEL]
    #[arg(short = 'm', long = "model", value_name = "MODEL")]
    model_flag: Option<PathBuf>,
}

impl ModelFlag {
    /// The model: given by position, by flag, or by the environment. Errors: `Usage` when both of the first are given.
    fn or(&self, given: Option<PathBuf>) -> Result<Option<PathBuf>> {
        match (given, &self.model_flag) {
            (Some(_), Some(_)) => Err(usage("the model is given twice, as MODEL and with -m")),
            (given, flag) => Ok(given
                .or_else(|| flag.clone())
                .or_else(|| std::env::var_os(ENVIRONMENT).map(PathBuf::from))),
        }
    }
}

impl ModelArgs {
    /// The model's path. Errors: `Usage` when there is none, or two.
    pub fn path(&self) -> Result<PathBuf> {
        self.optional()?.ok_or_else(|| usage("a MODEL is missing"))
    }

    /// The text that is given by position after the model, or in its place if a flag gives the model. Errors: `Usage` for a model
    /// by position and by flag, or for a text that is not UTF-8.
    pub fn text_beside_flag(&mut self, second: &mut Option<String>) -> Result<Option<String>> {
        let is_text = self.flag.model_flag.is_some() && second.is_none();
        match self.model.take_if(|_| is_text) {
            None => Ok(second.take()),
            Some(text) => match text.into_os_string().into_string() {
                Ok(text) => Ok(Some(text)),
                Err(text) => Err(usage(format!("'{}' is not UTF-8", text.display()))),
            },
        }
    }

    /// The model's path for a command that also works without one. Errors: `Usage` when there are two.
    pub fn optional(&self) -> Result<Option<PathBuf>> {
        self.flag.or(self.model.clone())
    }
}

/// The model and a text: both by position, or only the text when the model comes from the flag or the environment.
#[derive(Args)]
pub struct ModelAndText {
    /// A .cmf, .gguf or .ninfer file or a Hugging Face directory; left out with -m
    #[arg(value_name = "MODEL", required = true)]
    first: Option<OsString>,
    /// The text, or the token ids
    #[arg(value_name = "TEXT", allow_hyphen_values = true)]
    second: Option<OsString>,
    #[command(flatten)]
    flag: ModelFlag,
}

impl ModelAndText {
    /// The model's path and the text. Errors: `Usage` when one is missing or given twice, or when the text is not UTF-8.
    pub fn split(self) -> Result<(PathBuf, String)> {
        let (model, text) = match (self.first, self.second) {
            (Some(model), Some(text)) => (Some(PathBuf::from(model)), Some(text)),
            (text, _) => (None, text),
        };
        let (Some(path), Some(text)) = (self.flag.or(model)?, text) else {
            return Err(usage("a MODEL or the text is missing"));
        };
        let text = text.into_string();
        let text = text.map_err(|text| usage(format!("'{}' is not UTF-8", text.display())))?;
        Ok((path, text))
    }
}

/// Errors: `Usage` for token ids outside of the vocabulary.
pub fn known_tokens(tokens: &[u32], source: &ModelSource) -> Result<()> {
    let vocab = source.arch.vocab_size;
    match tokens.iter().find(|&&token| token as usize >= vocab) {
        Some(token) => Err(usage(format!("token {token} is not in the vocabulary of {vocab}"))),
        None => Ok(()),
    }
}

/// The file of a directory that describes its model, or its pipeline.
const CONFIGS: [&str; 2] = ["config.json", "model_index.json"];

/// Most models that a hint lists.
const HINTS: usize = 5;

/// Opens a model. Errors: as [`source::open`]; for a missing file with a hint.
pub fn open(path: &Path) -> Result<ModelSource> {
    source::open(path).map_err(|err| hinted(err, path))
}

/// Errors: `UnsupportedModel` for a pipeline, with the command that runs it.
pub fn require_language(source: &ModelSource) -> Result<()> {
    source.require_language().map_err(|err| match source.require_image() {
        Ok(()) => Error::new(
            err.kind,
            format!("{}; `cmf-gpu imagine` makes pictures with it", err.message),
        ),
        Err(_) => err,
    })
}

/// Errors: `UnsupportedModel` for anything but a text-to-image pipeline, with the command that runs it.
pub fn require_image(source: &ModelSource) -> Result<()> {
    source.require_image().map_err(|err| match source.require_language() {
        Ok(()) => Error::new(err.kind, format!("{}; `cmf-gpu run` answers with it", err.message)),
        Err(_) => err,
    })
}

/// Opens a model, or a file that holds a skill. Errors: as [`source::open_file`]; for a missing file with a hint.
pub fn open_file(path: &Path) -> Result<ModelSource> {
    source::open_file(path).map_err(|err| hinted(err, path))
}

/// Opens a CMF file. Errors: `UnsupportedFeature` for a model in another format; as [`CmfContainer::open`]; for a missing file
/// with a hint.
pub fn open_cmf(path: &Path) -> Result<CmfContainer> {
    require_cmf(path)?;
    CmfContainer::open(path).map_err(|err| hinted(err, path))
}

/// Errors: `UnsupportedFeature` for a model in another format than CMF.
fn require_cmf(path: &Path) -> Result<()> {
    let format = match Format::of(path) {
        Ok(Format::Gguf) => "a GGUF file",
        Ok(Format::Ninfer) => "a .ninfer file",
        Ok(Format::HuggingFace) if !path.is_dir() || CONFIGS.iter().any(|name| path.join(name).is_file()) => {
            "a Hugging Face model"
        }
        _ => return Ok(()),
    };
    let path = path.display();
    let message = format!("{path}: {format}, and this needs a CMF file; `cmf-gpu convert` makes one");
    Err(Error::new(Kind::UnsupportedFeature, message))
}

/// The error of opening a model, for a missing file with a hint.
pub fn hinted(err: Error, path: &Path) -> Error {
    match err.kind {
        // A directory with a configuration or weights and no other model is one that lacks something.
        Kind::Io if !is_hugging_face(path) || !models_in(path).is_empty() => hint(path).err().unwrap_or(err),
        _ => err,
    }
}

/// Whether a directory has any file of a Hugging Face model.
fn is_hugging_face(path: &Path) -> bool {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    let has = |name: &Path| {
        CONFIGS.iter().any(|config| name == Path::new(config))
            || name.extension().is_some_and(|kind| kind == "safetensors")
    };
    entries.into_iter().any(|entry| has(Path::new(&entry.file_name())))
}

/// Errors: `Io` for a directory or a missing file, with a hint; `UnsupportedFeature` for a model in another format than CMF.
pub fn require_file(path: &Path) -> Result<()> {
    require_cmf(path)?;
    hint(path)
}

/// Errors: `Io` for a directory or a missing file, with a hint.
fn hint(path: &Path) -> Result<()> {
    if path.is_dir() {
        return Err(not_a_model(path, "a directory, expected a model file", path));
    }
    require_path(path)
}

/// Errors: `Io` for a path with neither a file nor a directory, with a hint.
pub fn require_path(path: &Path) -> Result<()> {
    if path.exists() {
        return Ok(());
    }
    let parent = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    if parent.is_dir() {
        return Err(not_a_model(path, "no such file", parent));
    }
    let (path, parent) = (path.display(), parent.display());
    let message = format!("{path}: no such file, and no directory {parent}");
    Err(Error::new(Kind::Io, message))
}

/// The error for a path that is not a model, with the models in `dir` as a hint.
fn not_a_model(path: &Path, problem: &str, dir: &Path) -> Error {
    let mut models = models_in(dir);
    let dir = dir.display();
    let hint = match models.len() {
        0 => format!("there is no .cmf, .gguf or .ninfer file in {dir}"),
        count => {
            models.truncate(HINTS);
            let more = if count > HINTS { ", ..." } else { "" };
            format!("models in {dir}: {}{more}", models.join(", "))
        }
    };
    Error::new(Kind::Io, format!("{}: {problem}; {hint}", path.display()))
}

/// The names of the models in a directory.
fn models_in(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut models: Vec<String> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| is_whole_or_first(name))
        .collect();
    models.sort();
    models
}

/// Whether a name belongs to a model in one file, or to the first of several files.
fn is_whole_or_first(name: &str) -> bool {
    let Some(stem) = [".cmf", ".gguf", ".ninfer"]
        .iter()
        .find_map(|kind| name.strip_suffix(kind))
    else {
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
    fn only_the_first_file_of_a_sharded_model_is_offered() {
        let whole = [
            "m.cmf",
            "m.gguf",
            "m.ninfer",
            "m-of-2.cmf",
            "best-of-breed.cmf",
            "a-b-of-3.cmf",
        ];
        for name in whole.into_iter().chain(["m-00001-of-00003.cmf"]) {
            assert!(is_whole_or_first(name), "{name}");
        }
        for name in [
            "m-00002-of-00003.cmf",
            "m-3-of-3.cmf",
            "m-00002-of-00003.gguf",
            "m.safetensors",
            "cmf",
            ".cmf-x.partial",
        ] {
            assert!(!is_whole_or_first(name), "{name}");
        }
    }
}

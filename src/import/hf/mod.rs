//! A Hugging Face directory as a source, or one safetensors file beside its configuration.
//!
//! Finds the weights in the files of the directory; `config` and `tokens` read the JSON files.

pub(super) mod config;
pub(super) mod folder;
pub(super) mod keys;
pub(super) mod shards;
pub(super) mod tokenizer;
pub(super) mod tokens;

use super::bind::bind;
use super::experts;
use super::matrix::{Found, Matrix};
use super::model::{Bound, Description, Model};
use super::roles::MTP_NAMES;
use crate::error::{Result, bail};
use crate::format::Arch;
use folder::{Files, Folder};
use keys::Keys;
use serde_json::{Map, Value};
use shards::Shard;
use std::path::{Path, PathBuf};

/// The name of the weights, before `.safetensors`.
pub(super) const WEIGHTS: &str = "model";
/// Prefixes of the language model inside a larger model, and the prefixes that replace them.
const NESTED: [(&str, &str); 3] = [
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
];

/// The text encoder that a `config.json` describes: a Gemma 2 language model with the default rotation. `tensors`: the tensors
/// of the encoder, of which every layer has at least one.
///
/// Errors: those of the configuration; `UnsupportedModel` for another type of model, for biases of attention, and for scaled
/// rotations.
pub fn text_encoder(config: &Map<String, Value>, tensors: usize) -> Result<Arch> {
    let config::Config { family, arch, .. } = config::read(config, tensors)?;
    if family.model_type != "gemma2" {
        bail!(
            UnsupportedModel,
            "the text encoder is of type '{}', expected gemma2",
            family.model_type
        );
    }
    if Keys::new(config, "config.json").bool("attention_bias")? == Some(true) {
        bail!(
            UnsupportedModel,
            "config key 'attention_bias' is true, the attention of gemma2 has no biases"
        );
    }
    if arch.yarn.is_some() || arch.rope_freq_factors.is_some() {
        bail!(
            UnsupportedModel,
            "the rotation of the text encoder is scaled, expected the default rotation"
        );
    }
    Ok(arch)
}

/// An open directory.
pub(super) struct Source {
    folder: Folder,
    shards: Vec<Shard>,
}

impl Source {
    /// Opens a directory, or a single file of weights whose directory holds the configuration.
    pub fn open(path: &Path) -> Result<Source> {
        if path.is_dir() {
            let folder = Folder(path.to_owned());
            let shards = shards::open(&folder, WEIGHTS)?;
            return Ok(Source { folder, shards });
        }
        let folder = Folder(path.parent().unwrap_or(Path::new("")).to_owned());
        Ok(Source {
            folder,
            shards: vec![Shard::open(path)?],
        })
    }

    /// The model in the directory.
    pub fn model(&self) -> Result<Model> {
        let Some(config) = self.folder.json("config.json")? else {
            bail!(Io, "{}: there is no config.json", self.folder.0.display());
        };
        let count = self.shards.iter().map(|shard| shard.tensors.len()).sum();
        let config::Config {
            family,
            mut arch,
            mixtures,
            nested,
            notes,
        } = config::read(&config, count)?;
        let mut found = Found::new();
        let mut dropped = Vec::new();
        for shard in &self.shards {
            for tensor in &shard.tensors {
                let Some(name) = language_name(&tensor.name, nested) else {
                    dropped.push(format!("{}: not part of the language model", tensor.name));
                    continue;
                };
                let name = container_name(name);
                let (shape, range) = (tensor.shape.clone(), tensor.range.clone());
                let matrix = Matrix::in_file(shape, &shard.file, range, tensor.element())?;
                if found.insert(name.clone(), matrix).is_some() {
                    bail!(Parse, "tensor '{name}' occurs twice");
                }
            }
        }
        experts::split_stacked(&mut found, &arch)?;
        experts::check_layers(&found, family, &mixtures)?;
        let mut bound = bind(family, &mut arch, found)?;
        bound.dropped.extend(dropped);
        bound.notes.extend(notes);
        let files = self.shards.iter().map(|shard| shard.file.path().to_owned()).collect();
        complete("safetensors", &self.folder, &config, arch, bound, files)
    }
}

/// The model of these parts, with the tokenizer, template and settings in `small`. `config` is `config.json`.
///
/// Errors: `Parse`, `Tokenizer`, `Template`, `Io`.
pub(super) fn complete(
    format: &'static str,
    small: &dyn Files,
    config: &Map<String, Value>,
    arch: Arch,
    mut bound: Bound,
    files: Vec<PathBuf>,
) -> Result<Model> {
    let vocab = tokenizer::complete(small)?;
    let tokens = tokens::read(small, config, vocab.as_deref())?;
    bound.notes.extend(tokens.notes);
    if vocab.is_none() {
        bound
            .notes
            .push("there is no tokenizer.json: the result only runs with token ids".into());
    }
    Description {
        format,
        arch,
        tokenizer_config: tokens.config,
        sampling: tokens.sampling,
        provenance: Map::new(),
        vocab,
        files,
    }
    .model(bound)
}

/// The name of a tensor in the language model, `None` for one of another part.
fn language_name(name: &str, nested: bool) -> Option<String> {
    if !nested {
        return Some(name.to_owned());
    }
    let renamed = NESTED
        .iter()
        .find_map(|(from, to)| name.strip_prefix(from).map(|rest| format!("{to}{rest}")));
    let plain = [
        "model.layers.",
        "model.embed_tokens.",
        "model.norm.",
        "lm_head.",
        "mtp.",
    ];
    renamed.or_else(|| {
        plain
            .iter()
            .any(|prefix| name.starts_with(prefix))
            .then(|| name.to_owned())
    })
}

/// The container's name of a tensor of the language model. Only tensors of the draft head have another name.
fn container_name(name: String) -> String {
    let mut names = MTP_NAMES.iter();
    let renamed = names.find_map(|(from, to)| name.strip_prefix(from).map(|rest| format!("{to}{rest}")));
    renamed.unwrap_or(name)
}

//! A diffusers directory of a text-to-image pipeline: text encoder, denoiser and decoder, each in a folder of its own.
//!
//! Finds the tensors of all components under the container's names, and their configurations as tensors of bytes. Whether
//! configurations and tensors make a network is checked where it is built.

use super::hf::folder::{Files, Folder};
use super::hf::shards::{self, Shard};
use super::hf::{self, tokens};
use super::matrix::Matrix;
use super::model::{Bound, Description, Model, Tensor};
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result, bail};
use crate::format::MappedFile;
use crate::format::pipeline::{LUMINA2, config_name};
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The file that makes a directory a pipeline.
const INDEX: &str = "model_index.json";

/// Names of the pipeline, the second of older versions.
const CLASSES: [&str; 2] = ["Lumina2Pipeline", "Lumina2Text2ImgPipeline"];

/// The name of diffusers' own weights, before `.safetensors`.
const DIFFUSERS_WEIGHTS: &str = "diffusion_pytorch_model";

/// The end of the names of autoencoder tensors that quantise latents.
const POST_QUANT: &str = "post_quant_conv.";

/// A network of the pipeline.
struct Component {
    /// The prefix of its tensors in a container.
    prefix: &'static str,
    folder: &'static str,
    /// Its class in the index.
    class: &'static str,
    /// The name of its weights, before `.safetensors`.
    weights: &'static str,
}

const TEXT_ENCODER: Component = Component {
    prefix: "te",
    folder: "text_encoder",
    class: "Gemma2Model",
    weights: hf::WEIGHTS,
};

const DENOISER: Component = Component {
    prefix: "dit",
    folder: "transformer",
    class: "Lumina2Transformer2DModel",
    weights: DIFFUSERS_WEIGHTS,
};

const DECODER: Component = Component {
    prefix: "vae",
    folder: "vae",
    class: "AutoencoderKL",
    weights: DIFFUSERS_WEIGHTS,
};

/// Whether a directory holds a pipeline.
pub fn is_pipeline(path: &Path) -> bool {
    path.join(INDEX).is_file()
}

/// The pipeline in a directory. Reads no weights.
///
/// Errors: `UnsupportedModel` for another pipeline or another class of a component; `Io` for missing files; `Parse`,
/// `ShardMismatch` and `Tokenizer`.
pub(super) fn read(path: &Path) -> Result<Model> {
    let index = Folder(path.to_owned()).json(INDEX)?.unwrap_or_default();
    let class = index.get("_class_name").and_then(Value::as_str).unwrap_or_default();
    if !CLASSES.contains(&class) {
        bail!(
            UnsupportedModel,
            "{INDEX}: pipeline '{class}' is not supported; known is {}",
            CLASSES[0]
        );
    }
    let mut found = Found::default();
    let te = found.component(path, &index, &TEXT_ENCODER)?;
    let mut arch = hf::text_encoder(&te, found.bound.tensors.len()).map_err(|err| err.context(TEXT_ENCODER.folder))?;
    arch.arch_name = LUMINA2.to_owned();
    found.component(path, &index, &DENOISER)?;
    found.component(path, &index, &DECODER)?;
    let schedule = path.join("scheduler").join("scheduler_config.json");
    let scheduler = match schedule.exists() {
        true => found.config("scheduler", &schedule)?,
        false => Map::new(),
    };
    let small = Folder(path.join("tokenizer"));
    let vocab = hf::tokenizer::complete(&small)?;
    let tokens = tokens::read(&small, &te, vocab.as_deref())?;
    found.bound.notes.extend(tokens.notes);
    if vocab.is_none() {
        bail!(Io, "{}: there is no tokenizer.json", small.0.display());
    }
    let components = json!({
        TEXT_ENCODER.prefix: TEXT_ENCODER.class,
        DENOISER.prefix: DENOISER.class,
        DECODER.prefix: DECODER.class,
        "scheduler": scheduler.get("_class_name"),
    });
    let provenance = [("pipeline", json!(class)), ("components", components)];
    let description = Description {
        format: "diffusers",
        arch,
        tokenizer_config: tokens.config,
        sampling: Map::new(),
        provenance: provenance
            .map(|(key, value)| (key.to_owned(), value))
            .into_iter()
            .collect(),
        vocab,
        files: found.files,
    };
    description.model(found.bound)
}

/// What has been found of a pipeline.
#[derive(Default)]
struct Found {
    bound: Bound,
    names: HashSet<String>,
    files: Vec<PathBuf>,
}

impl Found {
    /// Adds a component and returns its configuration.
    fn component(
        &mut self,
        path: &Path,
        index: &Map<String, Value>,
        component: &Component,
    ) -> Result<Map<String, Value>> {
        let Component {
            prefix, folder, class, ..
        } = component;
        // A list of the library and the class.
        let named = index.get(*folder).and_then(|entry| entry.get(1)?.as_str());
        if named != Some(class) {
            bail!(
                UnsupportedModel,
                "{INDEX}: {folder} is '{}', expected '{class}'",
                named.unwrap_or_default()
            );
        }
        let folder = Folder(path.join(folder));
        let config = self.config(prefix, &folder.0.join("config.json"))?;
        let uses_post_quant = config.get("use_post_quant_conv").and_then(Value::as_bool) != Some(false);
        for Shard { file, tensors } in shards::open(&folder, component.weights)? {
            for tensor in tensors {
                let name = match component.name(&tensor.name, uses_post_quant)? {
                    Some(name) => format!("{prefix}.{name}"),
                    None => {
                        let dropped = format!("{prefix}.{}: no picture needs it", tensor.name);
                        self.bound.dropped.push(dropped);
                        continue;
                    }
                };
                let matrix = Matrix::in_file(tensor.shape.clone(), &file, tensor.range.clone(), tensor.element())?;
                self.add(name, matrix)?;
            }
            self.files.push(file.path().to_owned());
        }
        Ok(config)
    }

    /// Adds a configuration, unchanged, as a tensor of bytes. Errors: `Io`, `Parse`.
    fn config(&mut self, component: &str, path: &Path) -> Result<Map<String, Value>> {
        let file = Arc::new(MappedFile::open(path)?);
        let config = crate::format::json::parse_object(file.bytes(), &path.display().to_string())?;
        let bytes = file.bytes().len();
        let matrix = Matrix::in_file(vec![bytes as u64], &file, 0..bytes, Ok(Dtype::U8))?;
        self.add(config_name(component), matrix)?;
        self.files.push(path.to_owned());
        Ok(config)
    }

    /// Errors: `Parse` for a name that exists.
    fn add(&mut self, name: String, data: Matrix) -> Result<()> {
        if !self.names.insert(name.clone()) {
            return Err(Error::new(Kind::Parse, format!("tensor '{name}' occurs twice")));
        }
        self.bound.tensors.push(Tensor { name, data });
        Ok(())
    }
}

impl Component {
    /// The name of a tensor of the component in a container, without the component; `None` if no picture needs the tensor.
    ///
    /// Errors: `UnsupportedModel` for names of a layout other than that of diffusers.
    fn name<'n>(&self, name: &'n str, uses_post_quant: bool) -> Result<Option<&'n str>> {
        if name.starts_with("cap_embedder.") {
            bail!(
                UnsupportedModel,
                "tensor '{name}': these are the names of a single-file checkpoint; the names of diffusers are needed"
            );
        }
        let used = match self.prefix {
            "te" => !name.starts_with("lm_head."),
            "vae" => name.starts_with("decoder.") || (uses_post_quant && name.starts_with(POST_QUANT)),
            _ => true,
        };
        let name = match self.prefix {
            "te" => name.strip_prefix("model.").unwrap_or(name),
            _ => name,
        };
        Ok(used.then_some(name))
    }
}

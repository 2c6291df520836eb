//! A `.ninfer` file as a source: its objects under the container's names, its resources as the small files beside them.
//!
//! `names` has the names of objects, `objects` finds tensors in them, `layout` says which objects a file that is written has,
//! `rotation` reads the signs of rotated weights. A file need not describe its network: the published models have none of the
//! resource `frontend/config.json`, and are known by name.

#[cfg(feature = "tools")]
mod layout;
mod names;
mod objects;
mod rotation;

#[cfg(feature = "tools")]
pub use layout::{Layout, Rows, layout};
pub use names::FRONTEND;
#[cfg(feature = "tools")]
pub use names::{SIGNS, WIDTHS};

use super::bind::bind;
use super::experts;
use super::hf::{
    complete,
    config::{self, Config},
    folder::{Files, MAX_BYTES},
};
use super::model::Model;
use crate::error::{Result, bail};
#[cfg(feature = "tools")]
use crate::format::Arch;
use crate::format::MappedFile;
use crate::format::ninfer::Ninfer;
use objects::Objects;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::sync::Arc;

/// Models of this network need not describe it.
const KNOWN: [&str; 2] = ["qwen3.6-27b", "qwen3.8-27b"];

/// An open file.
pub(super) struct Source {
    file: Arc<MappedFile>,
    directory: Ninfer,
}

impl Source {
    /// Opens a file and checks its directory.
    pub fn open(path: &Path) -> Result<Source> {
        let file = MappedFile::open(path)?;
        let directory = Ninfer::parse(file.bytes()).map_err(|err| err.context(path.display()))?;
        let file = Arc::new(file);
        Ok(Source { file, directory })
    }

    /// The model in the file.
    pub fn model(&self) -> Result<Model> {
        let config = self.config()?;
        let objects = Objects {
            file: &self.file,
            directory: &self.directory,
        };
        let Config {
            family,
            mut arch,
            mixtures,
            notes,
            ..
        } = config::read(&config, self.directory.objects.len())?;
        // Rows of objects are counted with these dimensions.
        arch.validate()?;
        let hadamard = rotation::read(&objects, &config)?;
        let found = objects.tensors(family, &arch)?;
        experts::check_layers(&found, family, &mixtures)?;
        let mut bound = bind(family, &mut arch, found)?;
        arch.prism_hadamard = rotation::of_tensors(hadamard, &bound.tensors, arch.tie_word_embeddings)?;
        bound.notes.extend(notes);
        bound.notes.extend(objects.left_out());
        let files = vec![self.file.path().to_owned()];
        let mut model = complete("ninfer", self, &config, arch, bound, files)?;
        let name = self.directory.identity.model_id.clone();
        model.provenance.insert("source_name".into(), name.into());
        Ok(model)
    }

    /// The description of the network under the keys of a Hugging Face configuration.
    fn config(&self) -> Result<Map<String, Value>> {
        let name = &self.directory.identity.model_id;
        let is_known = KNOWN.contains(&name.as_str());
        if let Some(mut config) = self.json("config.json")? {
            let inner = config.get("text_config").and_then(|inner| inner.get(rotation::MEMBER));
            if is_known && inner.is_none() && !config.contains_key(rotation::MEMBER) {
                config.insert(rotation::MEMBER.into(), rotation::of_known());
            }
            return Ok(config);
        }
        if !is_known {
            bail!(
                UnsupportedModel,
                "model_id '{name}' is not known, and there is no {FRONTEND}config.json; known are {}",
                KNOWN.join(", ")
            );
        }
        Ok(description())
    }
}

/// The network of the models that need not be described.
fn description() -> Map<String, Value> {
    let config = json!({
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 64,
        "full_attention_interval": 4,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e7,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": false,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        rotation::MEMBER: rotation::of_known(),
    });
    match config {
        Value::Object(config) => config,
        _ => Map::new(),
    }
}

/// The identifier of a network that files need not describe; `None` for other networks.
#[cfg(feature = "tools")]
pub fn known(arch: &Arch) -> Option<&'static str> {
    let mut described = config::read(&description(), arch.num_layers).ok()?.arch;
    described.prism_hadamard.clone_from(&arch.prism_hadamard);
    KNOWN.first().copied().filter(|_| described == *arch)
}

/// The resources whose names begin with `frontend/`.
impl Files for Source {
    fn bytes(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let name = format!("{FRONTEND}{name}");
        let Some(object) = self.directory.find(&name) else {
            return Ok(None);
        };
        if object.tensor.is_some() {
            bail!(Parse, "object '{name}' is a tensor, expected a resource");
        }
        let len = object.range.len();
        if len as u64 > MAX_BYTES {
            bail!(
                Bounds,
                "object '{name}': expected at most {MAX_BYTES} bytes, found {len}"
            );
        }
        self.file.check_length()?;
        Ok(self.file.bytes().get(object.range.clone()).map(<[u8]>::to_vec))
    }
}

//! A model as an importer describes it: the network, its tensors, and what conversations need.

use super::matrix::Matrix;
use crate::error::{Result, bail};
use crate::format::Arch;
use serde_json::{Map, Value};
use std::path::PathBuf;

/// One tensor.
pub struct Tensor {
    /// The name in the container.
    pub name: String,
    /// Its values.
    pub data: Matrix,
}

/// The tensors that a network needs, and the names of those that are left out.
#[derive(Default)]
pub(super) struct Bound {
    pub tensors: Vec<Tensor>,
    pub dropped: Vec<String>,
    pub notes: Vec<String>,
}

/// A model that was trained elsewhere.
pub struct Model {
    /// The format of the files.
    pub format: &'static str,
    /// The network.
    pub arch: Arch,
    /// The header's `tokenizer_config`: chat template and token ids.
    pub tokenizer_config: Map<String, Value>,
    /// The header's `provenance`.
    pub provenance: Map<String, Value>,
    /// `tokenizer.json`.
    pub vocab: Option<Vec<u8>>,
    /// The tensors that the network needs, under the container's names.
    pub tensors: Vec<Tensor>,
    /// Tensors that the network does not use, each with the reason.
    pub dropped: Vec<String>,
    /// Remarks for the user.
    pub notes: Vec<String>,
    /// The files of weights.
    pub files: Vec<PathBuf>,
}

/// What an importer reads besides the tensors.
pub(super) struct Description {
    pub format: &'static str,
    pub arch: Arch,
    pub tokenizer_config: Map<String, Value>,
    /// The settings of the sampler.
    pub sampling: Map<String, Value>,
    /// The name and the licence of the model, if the files say them.
    pub provenance: Map<String, Value>,
    pub vocab: Option<Vec<u8>>,
    pub files: Vec<PathBuf>,
}

impl Description {
    /// The model with these tensors. Errors: `Tokenizer` for token ids outside of the embedding.
    pub fn model(self, bound: Bound) -> Result<Model> {
        let Description {
            format,
            arch,
            mut tokenizer_config,
            sampling,
            provenance: names,
            vocab,
            files,
        } = self;
        let Bound {
            tensors,
            dropped,
            mut notes,
        } = bound;
        let known = |id: &Value| id.as_u64().is_some_and(|id| id < arch.vocab_size as u64);
        let eos = tokenizer_config.get("eos_token_ids").and_then(Value::as_array);
        let stops = eos.into_iter().flatten().chain(tokenizer_config.get("bos_token_id"));
        if let Some(id) = stops.into_iter().find(|id| !known(id)) {
            bail!(
                Tokenizer,
                "token id {id} starts or ends texts, but the vocabulary has {} entries",
                arch.vocab_size
            );
        }
        if let Some(id) = tokenizer_config.get("pad_token_id").filter(|id| !known(id)).cloned() {
            tokenizer_config.remove("pad_token_id");
            notes.push(format!(
                "padding token {id} is left out: the vocabulary has {} entries",
                arch.vocab_size
            ));
        }
        let mut provenance = Map::from_iter([("source_format".to_owned(), format.into())]);
        provenance.extend(names);
        if !sampling.is_empty() {
            provenance.insert("generation_config".into(), sampling.into());
        }
        Ok(Model {
            format,
            arch,
            tokenizer_config,
            provenance,
            vocab,
            tensors,
            dropped,
            notes,
            files,
        })
    }
}

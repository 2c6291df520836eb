//! A model that was trained elsewhere, as an importer describes it.

use super::bind::Bound;
use super::model::Model;
use crate::error::{Result, bail, error};
use crate::format::Arch;
use serde_json::{Map, Value};
use std::borrow::Cow;

/// The description of an imported model.
pub(super) struct Import<'a> {
    pub arch: Arch,
    pub tokenizer_config: Map<String, Value>,
    pub provenance: Map<String, Value>,
    /// `tokenizer.json`.
    pub vocab: Option<Vec<u8>>,
    pub bound: Bound<'a>,
}

impl<'a> Import<'a> {
    /// The model with its header. Errors: `Tokenizer` for token ids outside of the embedding.
    pub fn model(self) -> Result<Model<'a>> {
        let Import {
            arch,
            mut tokenizer_config,
            provenance,
            vocab,
            bound,
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
        let arch = serde_json::to_value(&arch)
            .map_err(|err| error!(Parse, "the network's description is not valid JSON: {err}"))?;
        let header = [
            ("arch", arch),
            ("provenance", provenance.into()),
            ("tokenizer_config", tokenizer_config.into()),
        ];
        let header = header.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        Ok(Model {
            header,
            vocab: vocab.map(Cow::Owned),
            masks: None,
            tensors,
            dropped,
            notes,
        })
    }
}

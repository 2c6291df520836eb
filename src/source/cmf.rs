//! A CMF container as a model source.

use super::model::{ModelSource, SamplingDefaults, SharedBytes, TextAssets};
use super::tensors::{Place, Stored, Tensors};
use crate::error::{Result, bail};
use crate::format::cmf::{CmfContainer, Masks};
use crate::format::{TensorId, TensorInfo};
use serde_json::Value;
use std::sync::Arc;

impl Tensors for CmfContainer {
    fn infos(&self) -> &[TensorInfo] {
        self.infos()
    }

    fn find(&self, name: &str) -> Option<TensorId> {
        self.find(name)
    }

    fn stored(&self, id: TensorId) -> Result<Stored<'_>> {
        let bytes = self.bytes(id)?;
        Ok(Stored::new(&self.infos()[id], bytes))
    }

    fn place(&self, id: TensorId) -> Option<Place> {
        let payload = self.payloads().get(id)?;
        Some(Place {
            file: payload.shard,
            offset: payload.offset,
            hash: Some(payload.hash),
        })
    }

    fn masks(&self) -> Option<&Masks> {
        self.masks()
    }

    fn release(&self, id: TensorId) {
        self.release(id);
    }
}

/// The tokenizer section of a container.
struct Tokenizer(Arc<CmfContainer>);

impl AsRef<[u8]> for Tokenizer {
    fn as_ref(&self) -> &[u8] {
        self.0.tokenizer_json().unwrap_or_default()
    }
}

impl ModelSource {
    /// The model in a container. Errors: `SkillFile` for a file that holds a skill and no model.
    pub fn from_cmf(container: Arc<CmfContainer>) -> Result<ModelSource> {
        if container.is_skill_file() {
            bail!(
                SkillFile,
                "this file is a skill: it is applied to a model and never run by itself"
            );
        }
        Ok(ModelSource::of_container(container))
    }

    /// What is in a container, which may be a skill's.
    pub(super) fn of_container(container: Arc<CmfContainer>) -> ModelSource {
        let header = container.header();
        let config = &header.tokenizer_config;
        let tokenizer = container.tokenizer_json().is_some();
        ModelSource {
            format: "cmf-v2",
            arch: header.arch.clone(),
            tensors: container.clone(),
            text: TextAssets {
                tokenizer_json: tokenizer.then(|| Arc::new(Tokenizer(container.clone())) as SharedBytes),
                chat_template: config.chat_template.clone(),
                eos_token_ids: config.eos_token_ids.clone(),
                bos_token_id: config.bos_token_id,
                pad_token_id: config.pad_token_id,
                sampling: SamplingDefaults::of(&header.provenance),
            },
            skills: container.skills().to_vec(),
            provenance: header.provenance.clone(),
            files: container.shard_paths().to_vec(),
            dropped: Vec::new(),
            notes: Vec::new(),
            cmf: Some(container),
        }
    }
}

impl SamplingDefaults {
    /// The settings in a header's `provenance`.
    pub fn of(provenance: &Value) -> SamplingDefaults {
        let number = |key: &str| provenance.get("generation_config")?.get(key)?.as_f64();
        let single = |key: &str| number(key).map(|value| value as f32);
        let top_k = provenance
            .get("generation_config")
            .and_then(|config| config.get("top_k")?.as_u64());
        SamplingDefaults {
            temperature: single("temperature"),
            top_k: top_k.map(|k| k.min(u64::from(u32::MAX)) as u32),
            top_p: single("top_p"),
            min_p: single("min_p"),
            repetition_penalty: single("repetition_penalty"),
        }
    }
}

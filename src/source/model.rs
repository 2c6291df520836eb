//! A model that can be run: its network, tensors, text assets, tasks and skills.

use super::blend::BlendView;
use super::skill_view::SkillView;
use super::tensors::Tensors;
use crate::error::Result;
use crate::format::Arch;
use crate::format::cmf::{CmfContainer, Masks, Skill};
use serde_json::Value;
use std::path::PathBuf;
use std::sync::Arc;

/// Bytes that are shared with their owner, for example a section of a mapped file.
pub type SharedBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// An open model, independent of the format of its files.
#[derive(Clone)]
#[non_exhaustive]
pub struct ModelSource {
    /// The format of the files: `cmf-v2`, `gguf`, `ninfer`, `safetensors` or `diffusers`.
    pub format: &'static str,
    /// The network.
    pub arch: Arch,
    /// Every tensor of the files, those of skills included.
    pub tensors: Arc<dyn Tensors>,
    /// What conversations need besides the network.
    pub text: TextAssets,
    /// Replacements for some of the tensors, to be chosen by name.
    pub skills: Vec<Skill>,
    /// Where the model comes from, free-form; `Null` when the files do not say.
    pub provenance: Value,
    /// The files that were read.
    pub files: Vec<PathBuf>,
    /// Tensors of the files that the network does not use, each with the reason, if the format has a record of them.
    pub dropped: Vec<String>,
    /// Remarks for the user about what the files say.
    pub notes: Vec<String>,
    /// The CMF container, if the files are one.
    pub cmf: Option<Arc<CmfContainer>>,
}

/// Tokenizer, chat template and default settings of a model.
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct TextAssets {
    /// A Hugging Face `tokenizer.json`.
    pub tokenizer_json: Option<SharedBytes>,
    /// A Jinja template; absent: ChatML.
    pub chat_template: Option<String>,
    /// Ids that end an answer.
    pub eos_token_ids: Vec<u32>,
    /// The id that starts a text.
    pub bos_token_id: Option<u32>,
    /// The id that fills batches.
    pub pad_token_id: Option<u32>,
    /// How the model's authors choose tokens.
    pub sampling: SamplingDefaults,
}

/// Sampling settings that come with a model; absent ones are the caller's.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct SamplingDefaults {
    /// Divisor of the logits.
    pub temperature: Option<f32>,
    /// How many of the likeliest tokens are considered.
    pub top_k: Option<u32>,
    /// The probability that the considered tokens have together.
    pub top_p: Option<f32>,
    /// The least probability of a considered token, relative to the likeliest one.
    pub min_p: Option<f32>,
    /// Divisor of the logits of tokens that occurred already.
    pub repetition_penalty: Option<f32>,
}

impl TextAssets {
    /// The `tokenizer.json` of the model.
    pub fn tokenizer_json(&self) -> Option<&[u8]> {
        self.tokenizer_json.as_deref().map(AsRef::as_ref)
    }
}

impl ModelSource {
    /// The task masks, if the model has any.
    pub fn masks(&self) -> Option<&Masks> {
        self.tensors.masks()
    }

    /// The tensors of the model with the skill of this id active, or those of the bare backbone. Errors: as [`SkillView::new`].
    pub fn with_skill(&self, skill: Option<&str>) -> Result<SkillView<Arc<dyn Tensors>>> {
        SkillView::new(self.tensors.clone(), &self.skills, skill)
    }

    /// The tensors of the model with several skills active, weighted. Errors: as [`BlendView::new`].
    pub fn with_blend(&self, weights: &[(String, f32)], capacity: u64) -> Result<BlendView> {
        BlendView::new(self.tensors.clone(), &self.skills, weights, capacity)
    }
}

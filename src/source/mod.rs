//! Models that can be run, whatever the format of their files.
//!
//! [`open`] reads a file and returns a [`ModelSource`]: the network, its tensors, what conversations need, tasks and skills.
//! Code that runs models knows this interface only. What only one format has stays with that format.

mod blend;
mod cmf;
mod imported;
mod memory;
mod model;
mod pipeline;
mod skill_view;
mod tensors;
mod verify;

pub use crate::format::cmf::{Mask, MaskAxis, MaskShape, Masks, NO_TASK, Selection, Skill};
pub use crate::format::hadamard::Hadamard;
pub use crate::format::json::parse_object;
pub use crate::format::{
    Arch, HiddenAct, LayerType, Moe, Mtp, MtpHidden, NormStyle, TensorId, TensorInfo, Yarn, hash64,
};
pub use crate::import::{Format, Keys, text_encoder};
pub use blend::BlendView;
pub use imported::ImportedTensors;
pub use memory::MemoryTensors;
pub use model::{ModelSource, SamplingDefaults, SharedBytes, TextAssets};
pub use skill_view::SkillView;
pub use tensors::{Place, Stored, Tensors, decoder};

use crate::error::{Result, bail};
use crate::format::cmf::CmfContainer;
use crate::import;
use std::path::Path;
use std::sync::Arc;

/// Opens the model at `path`: a CMF, GGUF or `.ninfer` file, any file of a model in several, a Hugging Face directory, or a
/// diffusers directory of a pipeline. Reads no weights.
///
/// Errors: those of the format; `SkillFile` for a file that holds a skill and no model; `UnsupportedModel`, `MissingTensor` and
/// `UnsupportedTensorType` for models that were trained elsewhere and are not known; `InvalidMagic`; `Io`.
pub fn open(path: &Path) -> Result<ModelSource> {
    let source = open_file(path)?;
    if source.cmf.as_ref().is_some_and(|container| container.is_skill_file()) {
        bail!(
            SkillFile,
            "this file is a skill: it is applied to a model and never run by itself"
        );
    }
    Ok(source)
}

/// As [`open`], also for a file that holds a skill and no model.
pub fn open_file(path: &Path) -> Result<ModelSource> {
    match Format::of(path)? {
        Format::Cmf => Ok(ModelSource::of_container(Arc::new(CmfContainer::open(path)?))),
        Format::Gguf => ModelSource::from_import(import::gguf(path)?),
        Format::Ninfer => ModelSource::from_import(import::ninfer(path)?),
        Format::HuggingFace => ModelSource::from_import(import::hugging_face(path)?),
    }
}

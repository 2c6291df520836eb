//! Models that can be run, whatever the format of their files.
//!
//! [`open`] reads a file and returns a [`ModelSource`]: the network, its tensors, what conversations need, tasks and skills.
//! Code that runs models knows this interface only. What only one format has stays with that format.

mod blend;
mod cmf;
mod memory;
mod model;
mod skill_view;
mod tensors;

pub use crate::format::cmf::{Mask, MaskAxis, MaskShape, Masks, NO_TASK, Selection, Skill};
pub use crate::format::{
    Arch, HiddenAct, LayerType, Moe, Mtp, MtpHidden, NormStyle, TensorId, TensorInfo, Yarn, hash64,
};
pub use blend::BlendView;
pub use memory::MemoryTensors;
pub use model::{ModelSource, SamplingDefaults, SharedBytes, TextAssets};
pub use skill_view::SkillView;
pub use tensors::Tensors;

use crate::error::Result;
use crate::format::cmf::CmfContainer;
use std::path::Path;
use std::sync::Arc;

/// Opens the model at `path`: a CMF file, or any file of a model in several. Reads no weights.
///
/// Errors: those of the format; `SkillFile` for a file that holds a skill and no model; `Io`.
pub fn open(path: &Path) -> Result<ModelSource> {
    ModelSource::from_cmf(Arc::new(CmfContainer::open(path)?))
}

//! `compact`: the same model in one canonical file, without unused bytes and without shards.

use super::rewrite::{NewFile, NewTensor, header_of};
use super::{Progress, Written};
use crate::error::{Result, bail};
use crate::format::cmf::CmfContainer;
use std::path::Path;

/// Writes the model at `model` to `out`: sections in canonical order, tensors in directory order, payloads unchanged.
///
/// Errors: those of [`CmfContainer::open`]; `HashMismatch` for damage; `SkillFile` for a skill file that names no base;
/// `Usage` if `out` is an input; `Io`.
pub fn compact(model: &Path, out: &Path, progress: Progress) -> Result<Written> {
    let model = CmfContainer::open(model)?;
    let file = whole(&model)?;
    file.write(&[&model], out, Vec::new(), progress)
}

/// The file that copies the whole model.
pub(super) fn whole(model: &CmfContainer) -> Result<NewFile<'_>> {
    if model.is_skill_file() && !model.header().has_bound_skill() {
        bail!(
            SkillFile,
            "the file is marked as a skill file, but no record names its base"
        );
    }
    Ok(NewFile {
        header: header_of(model),
        tensors: (0..model.infos().len()).map(|id| NewTensor::copy(model, id)).collect(),
        sections: model.sections()?,
        per_loop: model.has_loop_masks(),
    })
}

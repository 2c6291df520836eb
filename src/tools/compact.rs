//! `compact`: the same model in one canonical file, without dead bytes and without shards.

use super::rewrite::{Part, Plan, header_of};
use super::{Progress, Written};
use crate::container::{Container, Tensors};
use crate::error::{Result, bail};
use std::path::Path;

/// Writes the model at `model` to `out`: sections in canonical order, tensors in directory order, payloads as they are.
///
/// Errors: the container's own; `HashMismatch` for damage; `SkillFile` for a skill file that is bound to no base; `Usage`
/// when `out` is an input; `Io`.
pub fn compact(model: &Path, out: &Path, progress: Progress) -> Result<Written> {
    let model = Container::open(model)?;
    let plan = plan(&model)?;
    let bytes = plan.write_one(&[&model], out, progress)?;
    Ok(Written {
        tensors: plan.parts.len(),
        bytes,
        notes: Vec::new(),
    })
}

/// The whole model as it is.
pub(super) fn plan(model: &Container) -> Result<Plan<'_>> {
    if model.is_skill_file() && !model.header().has_bound_skill() {
        bail!(
            SkillFile,
            "the file says that it is a skill, but no record names its base"
        );
    }
    let infos = model.infos().iter().enumerate();
    Ok(Plan {
        header: header_of(model),
        parts: infos.map(|(id, info)| Part::copy(model, id, info)).collect(),
        sections: model.sections()?,
        by_pass: model.has_loop_masks(),
    })
}

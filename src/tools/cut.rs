//! Skills of a model from which neurons or experts are dropped: their tensors are cut like the model's own, and statements
//! about the uncut model are removed from their records.

use super::rewrite::NewTensor;
use super::skill::record_of;
use crate::error::{Result, bail};
use crate::format::TensorInfo;
use crate::format::cmf::CmfContainer;
use crate::source::SkillView;
use serde_json::{Map, Value};

/// Errors: `SkillFile` for a skill file; `MissingTensor` and `Parse` for a skill whose tensors do not match the model, so
/// that they cannot be cut with it.
pub(super) fn check(model: &CmfContainer) -> Result<()> {
    if model.is_skill_file() {
        bail!(
            SkillFile,
            "this is a skill file, expected a model; apply the skill to its base first"
        );
    }
    model
        .skills()
        .iter()
        .try_for_each(|skill| SkillView::new(model, model.skills(), Some(&skill.id)).map(drop))
}

/// A tensor's name as the prefix of its skill, empty for the model's own tensors, and the name of the tensor that it is or
/// replaces.
pub(super) fn split<'a>(model: &CmfContainer, name: &'a str) -> (&'a str, &'a str) {
    let mut skills = model.skills().iter();
    let plain = skills.find_map(|skill| name.strip_prefix(&skill.tensor_name("")));
    match plain {
        Some(plain) => name.split_at(name.len() - plain.len()),
        None => ("", name),
    }
}

/// Rows and columns of a tensor that is cut along its rows: a vector has one value per row.
pub(super) fn rows_cols(info: &TensorInfo) -> (usize, usize) {
    match info.shape.as_slice() {
        [rows] => (*rows as usize, 1),
        _ => info.rows_cols(),
    }
}

/// Removes from the skill records in `header` what holds only for the uncut model: measurements, names of masks, and
/// selection data, which refers to hidden states from the first cut layer, `layer`, on. Returns notes about the removals.
///
/// Errors: `Parse` for a header without a record of a skill.
pub(super) fn skills(
    model: &CmfContainer,
    header: &mut Map<String, Value>,
    tensors: &[NewTensor],
    layer: Option<usize>,
) -> Result<Vec<String>> {
    let mut notes = Vec::new();
    for skill in model.skills() {
        let id = &skill.id;
        let record = record_of(header, id)?;
        let mut remove = |member: &str, why: &str| {
            record.insert(member.into(), Value::Null);
            notes.push(format!("skill '{id}': its {why}"));
        };
        if layer.is_some() && skill.quality.is_some() {
            remove(
                "quality",
                "quality is removed, because it was measured with the uncut model",
            );
        }
        if let (Some(selection), Some(layer)) = (&skill.selection, layer)
            && selection.phi_layer >= layer
        {
            let why = "hidden states differ from those it was fitted to; fit the skill again";
            remove("selection", &format!("selection is removed, because {why}"));
        }
        if let Some(task) = &skill.input_mask_task {
            let what = format!("task '{task}' is removed, because the masks are dropped");
            remove("input_mask_task", &what);
        }
        let prefix = skill.tensor_name("");
        if !tensors.iter().any(|tensor| tensor.spec.name.starts_with(&prefix)) {
            notes.push(format!("skill '{id}': every tensor that it replaces was dropped"));
        }
    }
    Ok(notes)
}

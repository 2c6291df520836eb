//! Skills of a model from which neurons or experts are dropped: their tensors are cut like the model's own, and statements
//! about the uncut model are removed from their records.

use super::registry::record_of;
use super::rewrite::NewTensor;
use crate::error::{Result, bail};
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
        if layer.is_some() && skill.quality.is_some() {
            record.insert("quality".into(), Value::Null);
            notes.push(format!(
                "skill '{id}': its quality is removed, because it was measured with the uncut model"
            ));
        }
        if let (Some(selection), Some(layer)) = (&skill.selection, layer)
            && selection.phi_layer >= layer
        {
            record.insert("selection".into(), Value::Null);
            notes.push(format!(
                "skill '{id}': its selection is removed, because hidden states differ from those it was fitted to; fit the \
                 skill again"
            ));
        }
        if let Some(task) = &skill.input_mask_task {
            record.insert("input_mask_task".into(), Value::Null);
            notes.push(format!(
                "skill '{id}': its task '{task}' is removed, because the masks are dropped"
            ));
        }
        let prefix = skill.tensor_name("");
        if !tensors.iter().any(|tensor| tensor.spec.name.starts_with(&prefix)) {
            notes.push(format!("skill '{id}': every tensor that it replaces was dropped"));
        }
    }
    Ok(notes)
}

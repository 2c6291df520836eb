//! Skills of a model that is cut down: what they replace is cut like the model's own, and what their records say of the
//! uncut model goes. Knows names and records, no payloads.

use super::rewrite::Part;
use crate::container::{Container, SkillView};
use crate::error::{Result, bail};
use serde_json::{Map, Value};

/// Errors: `SkillFile` for a file that is no model; `MissingTensor` and `Parse` for a skill whose tensors do not fit the
/// model: they could not be cut with it.
pub(super) fn check(model: &Container) -> Result<()> {
    if model.is_skill_file() {
        bail!(
            SkillFile,
            "a skill file holds replacements and no model; apply it to its base first"
        );
    }
    model
        .skills()
        .iter()
        .try_for_each(|skill| SkillView::new(model, Some(&skill.id)).map(drop))
}

/// A tensor's name in two parts: what says which skill it belongs to, empty for the model's own, and the name of the tensor
/// that it is or replaces.
pub(super) fn split<'a>(model: &Container, name: &'a str) -> (&'a str, &'a str) {
    let mut skills = model.skills().iter();
    let plain = skills.find_map(|skill| name.strip_prefix(&skill.tensor_name("")));
    match plain {
        Some(plain) => name.split_at(name.len() - plain.len()),
        None => ("", name),
    }
}

/// Takes out of the registry in `header` what was found with the uncut model: what was measured, the masks' names, and
/// subspaces of hidden states that are others now. `layer` is the first that was cut; prompts are compared by hidden states of
/// the full model, which from there on are others. Returns what a person should know.
///
/// Errors: `Parse` for a header that has no registry of the model's skills.
pub(super) fn skills(
    model: &Container,
    header: &mut Map<String, Value>,
    parts: &[Part],
    layer: Option<usize>,
) -> Result<Vec<String>> {
    let mut notes = Vec::new();
    let Some(Value::Array(records)) = header.get_mut("skills") else {
        return Ok(notes);
    };
    for skill in model.skills() {
        let id = &skill.id;
        let of_it = |record: &&mut Value| record.get("id").and_then(Value::as_str) == Some(id);
        let Some(Value::Object(record)) = records.iter_mut().find(of_it) else {
            bail!(Parse, "header.skills: no record of skill '{id}'");
        };
        if layer.is_some() && skill.quality.is_some() {
            record.insert("quality".into(), Value::Null);
            notes.push(format!(
                "skill '{id}': its quality is left out, it was measured with the whole model"
            ));
        }
        if let (Some(selection), Some(layer)) = (&skill.selection, layer)
            && selection.phi_layer >= layer
        {
            record.insert("selection".into(), Value::Null);
            notes.push(format!(
                "skill '{id}': its selection is left out, hidden states are no longer those it was fitted to; skill fit \
                 makes a new one"
            ));
        }
        if let Some(task) = &skill.input_mask_task {
            record.insert("input_mask_task".into(), Value::Null);
            notes.push(format!(
                "skill '{id}': the task '{task}' that it goes with is left out, the masks are gone"
            ));
        }
        let prefix = skill.tensor_name("");
        if !parts.iter().any(|part| part.spec.name.starts_with(&prefix)) {
            notes.push(format!("skill '{id}': nothing that it replaces is left"));
        }
    }
    Ok(notes)
}

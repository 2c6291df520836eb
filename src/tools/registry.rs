//! Changing the record of a skill in place (section 9 of the format).

use super::Written;
use super::skill::signature_note;
use crate::error::{Error, Kind, Result};
use crate::format::cmf::{Appender, CmfContainer, Selection};
use crate::format::{base64, hex};
use crate::source::SkillView;
use half::f16;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::path::Path;

/// Sets the selection data of a skill. Its other members are unchanged.
///
/// Errors: `Usage` for an unknown skill; those of [`Appender`].
pub fn set_selection(model: &Path, id: &str, selection: &Selection) -> Result<Written> {
    let halves = |values: &[f32]| {
        let bytes = values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes());
        base64(&bytes.collect::<Vec<u8>>())
    };
    let record = json!({
        "metric": selection.metric,
        "phi_layer": selection.phi_layer,
        "mean": halves(&selection.mean),
        "basis": halves(&selection.basis),
        "rank": selection.rank,
    });
    amend(model, id, "selection", record)
}

/// Sets the quality of a skill: the perplexity of `text` without and with it. Each comes with the task whose mask was active,
/// [`NO_TASK`](crate::format::cmf::NO_TASK) for the full model.
///
/// Errors: as [`set_selection`].
pub fn set_quality(
    model: &Path,
    id: &str,
    (backbone, backbone_task): (f64, &str),
    (overlaid, task): (f64, &str),
    text: &str,
) -> Result<Written> {
    let digest = Sha256::digest(text.as_bytes());
    let record = json!({
        "metric": "ppl", "backbone": backbone, "overlaid": overlaid, "dataset_sha256": hex(&digest),
        "backbone_task": backbone_task, "task": task,
    });
    amend(model, id, "quality", record)
}

/// The record of a skill in a header. Errors: `Parse` if there is none.
pub(super) fn record_of<'h>(header: &'h mut Map<String, Value>, id: &str) -> Result<&'h mut Map<String, Value>> {
    let records = header.get_mut("skills").and_then(Value::as_array_mut);
    let mut records = records.into_iter().flatten().filter_map(Value::as_object_mut);
    records
        .find(|record| record.get("id").and_then(Value::as_str) == Some(id))
        .ok_or_else(|| Error::new(Kind::Parse, format!("header.skills: no record of skill '{id}'")))
}

/// Sets one member of a skill's record.
fn amend(model: &Path, id: &str, member: &str, value: Value) -> Result<Written> {
    let container = CmfContainer::open(model)?;
    SkillView::new(&container, container.skills(), Some(id))?;
    let notes = signature_note(&container);
    let path = container.shard_paths()[0].clone();
    drop(container);
    let file = Appender::open(&path)?;
    let mut header: Map<String, Value> = file.header_json().clone();
    record_of(&mut header, id)?.insert(member.to_owned(), value);
    let before = file.bytes_before();
    let bytes = file.finish(header, &|_| false)?;
    Ok(Written {
        tensors: 0,
        bytes: bytes.saturating_sub(before),
        notes,
    })
}

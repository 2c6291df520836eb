//! Skills: sets of tensors that replace tensors of a base model, the backbone (section 9 of the format).
//!
//! The header has a registry with one record per skill. The tensors are in the directory as `skill.ID.NAME`.

use super::masks::{Masks, NO_TASK};
use crate::error::{Error, Kind, Result, bail};
use crate::format::arch::Arch;
use crate::format::bytes::{from_base64, hex_u64};
use crate::format::json::kind_of;
use crate::format::tensor::{TensorId, TensorInfo};
use half::f16;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::collections::HashSet;

/// The prefix of the names of skill tensors.
const PREFIX: &str = "skill.";
/// The longest id, in bytes.
const MAX_ID: usize = 128;
/// The most names in an error text.
const MAX_LISTED: usize = 10;
/// Ids that have another meaning where a skill is chosen.
const RESERVED: [&str; 2] = ["none", "auto"];

/// One skill of a registry.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Skill {
    /// The id, which is part of the names of its tensors.
    pub id: String,
    /// A name, for display.
    pub name: Option<String>,
    /// The layers that it changes, as stated by its creator.
    #[serde(default)]
    pub layers: Vec<u32>,
    /// The data for choosing this skill by a prompt.
    pub selection: Option<Selection>,
    /// The task whose mask is used with it.
    pub input_mask_task: Option<String>,
    /// Measurements of the model with this skill; `None`: not measured.
    pub quality: Option<Value>,
    /// In a skill file: hash64 of the directory of the base model.
    #[serde(default, deserialize_with = "hash")]
    pub base_dir_hash: Option<u64>,
    /// The name of the base model's network.
    pub base_arch: Option<String>,
    /// The task that it was made for.
    pub task: Option<String>,
    /// Its origin, free-form.
    pub provenance: Option<Value>,
}

/// An affine subspace of hidden states that the skill's prompts are close to.
///
/// φ is the mean of the outputs of layer `phi_layer` over a prompt's tokens. With r = φ − mean and the basis B,
/// E = ‖r − BᵀB·r‖² / ‖φ‖². The skill with the smallest E is chosen.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "SelectionRecord")]
pub struct Selection {
    /// The name of the metric E, as stated by the skill's creator.
    pub metric: Option<String>,
    /// The layer whose outputs φ is the mean of.
    pub phi_layer: usize,
    /// \[hidden\]
    pub mean: Vec<f32>,
    /// \[rank, hidden\], row-major.
    pub basis: Vec<f32>,
    /// Rows of the basis.
    pub rank: usize,
}

/// [`Selection`] as a record has it.
#[derive(Deserialize)]
struct SelectionRecord {
    metric: Option<String>,
    phi_layer: usize,
    mean: String,
    basis: String,
    rank: Option<usize>,
}

impl Skill {
    /// The name of this skill's replacement for the tensor `name`.
    pub fn tensor_name(&self, name: &str) -> String {
        format!("{PREFIX}{}.{name}", self.id)
    }

    /// The skill id in a tensor's name, if the name has the form of a skill tensor.
    pub fn of_tensor(name: &str) -> Option<&str> {
        split_name(name).map(|(id, _)| id)
    }

    /// The task whose mask is used with the skill, which must be in `masks`, or [`NO_TASK`]; `None`: unspecified.
    ///
    /// Errors: `Parse` for a task without a mask, with the existing names.
    pub fn mask_task(&self, masks: Option<&Masks>) -> Result<Option<&str>> {
        let Some(task) = self.input_mask_task.as_deref() else {
            return Ok(None);
        };
        let all = masks.map_or(&[][..], |masks| &masks.masks);
        if task == NO_TASK || all.iter().any(|mask| mask.name == task) {
            return Ok(Some(task));
        }
        let mut names: Vec<&str> = all.iter().take(MAX_LISTED).map(|mask| mask.name.as_str()).collect();
        match all.len() {
            0 => names.push("none"),
            count if count > MAX_LISTED => names.push("..."),
            _ => {}
        }
        bail!(
            Parse,
            "skill '{}' uses the mask of task '{task}', which does not exist; existing masks: {}",
            self.id,
            names.join(", ")
        );
    }

    /// The task under whose mask the skill was measured, [`NO_TASK`] for the full model; `None`: it was not measured. If the
    /// record names no task, the measurement used the skill's own task or, without one, the file's default mask.
    pub fn measured_task<'s>(&'s self, masks: Option<&'s Masks>) -> Option<&'s str> {
        let named = self.quality.as_ref()?.get("task").and_then(Value::as_str);
        let default = || Some(masks?.default_mask()?.name.as_str());
        let task = named.or(self.input_mask_task.as_deref()).or_else(default);
        Some(task.unwrap_or(NO_TASK))
    }
}

/// Errors: `Usage` if `id` is not a valid skill id.
pub fn check_id(id: &str) -> Result<()> {
    let plain = |c: char| !(c.is_control() || c.is_whitespace() || ['.', '/', '\\', ':', ','].contains(&c));
    if id.is_empty() || id.len() > MAX_ID || !id.chars().all(plain) || RESERVED.contains(&id) {
        bail!(
            Usage,
            "invalid skill id '{id}': wanted 1 to {MAX_ID} bytes without blanks, control characters and . / \\ : , and not one \
             of {}",
            RESERVED.join(", ")
        );
    }
    Ok(())
}

/// Errors: `Usage` if `id` is not valid for a new skill: also if it could be mistaken for a flag, or has invisible characters.
pub fn check_new_id(id: &str) -> Result<()> {
    check_id(id)?;
    // Zero-width characters, direction marks, and the byte order mark.
    let ranges = [
        '\u{200b}'..='\u{200f}',
        '\u{202a}'..='\u{202e}',
        '\u{2060}'..='\u{206f}',
        '\u{feff}'..='\u{feff}',
    ];
    let hidden = |c: char| ranges.iter().any(|range| range.contains(&c));
    let what = match (id.starts_with('-'), id.contains(hidden)) {
        (true, _) => "it starts with '-'",
        (_, true) => "it has invisible characters",
        _ => return Ok(()),
    };
    bail!(Usage, "invalid id '{}' for a new skill: {what}", id.escape_debug());
}

/// The skill id and the replaced tensor's name, in the name of a skill tensor.
fn split_name(name: &str) -> Option<(&str, &str)> {
    // An id has no dots.
    name.strip_prefix(PREFIX)?.split_once('.')
}

/// As `split_name`, if the skill is one of these.
pub(crate) fn registered<'a>(skills: &HashSet<&str>, name: &'a str) -> Option<(&'a str, &'a str)> {
    split_name(name).filter(|(id, _)| skills.contains(id))
}

/// Types and validates the registry. Errors: `Parse`, with the record.
pub(super) fn parse(records: &[Value], arch: &Arch) -> Result<Vec<Skill>> {
    let parse = |(i, record)| parse_record(record, arch).map_err(|err| err.context(format_args!("header.skills[{i}]")));
    let skills: Vec<Skill> = records.iter().enumerate().map(parse).collect::<Result<_>>()?;
    let mut ids: Vec<&str> = skills.iter().map(|skill| skill.id.as_str()).collect();
    ids.sort_unstable();
    if let Some([id, _]) = ids.array_windows().find(|[a, b]| a == b) {
        bail!(Parse, "header.skills: two skills have the id '{id}'");
    }
    Ok(skills)
}

fn parse_record(record: &Value, arch: &Arch) -> Result<Skill> {
    if !record.is_object() {
        bail!(Parse, "expected an object, found {}", kind_of(record));
    }
    let parse_error = |text: String| Error::new(Kind::Parse, text);
    let skill = Skill::deserialize(record).map_err(|err| parse_error(err.to_string()))?;
    check_id(&skill.id).map_err(|err| parse_error(err.message))?;
    if let Some(selection) = &skill.selection {
        let (layers, hidden) = (arch.num_layers, arch.hidden_size);
        let (layer, rank) = (selection.phi_layer, selection.rank);
        let (mean, basis) = (selection.mean.len(), selection.basis.len());
        if layer >= layers {
            bail!(
                Parse,
                "selection: phi_layer is {layer}, the network has {layers} layers"
            );
        }
        if mean != hidden {
            bail!(Parse, "selection: mean has {mean} values, expected {hidden}");
        }
        if rank == 0 || rank.checked_mul(hidden) != Some(basis) {
            bail!(
                Parse,
                "selection: basis has {basis} values, expected {hidden} × rank; rank is {rank}"
            );
        }
    }
    Ok(skill)
}

fn hash<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Option<u64>, D::Error> {
    let Some(hex) = Option::<String>::deserialize(deserializer)? else {
        return Ok(None);
    };
    let invalid = || D::Error::custom(format!("base_dir_hash is '{hex}', expected 16 hex digits"));
    hex_u64(&hex).ok_or_else(invalid).map(Some)
}

impl TryFrom<SelectionRecord> for Selection {
    type Error = String;

    fn try_from(record: SelectionRecord) -> std::result::Result<Selection, String> {
        let mean = halves("mean", &record.mean)?;
        let basis = halves("basis", &record.basis)?;
        let rank = record.rank.unwrap_or(basis.len() / mean.len().max(1));
        Ok(Selection {
            metric: record.metric,
            phi_layer: record.phi_layer,
            mean,
            basis,
            rank,
        })
    }
}

/// Half floats in base64.
fn halves(name: &str, text: &str) -> std::result::Result<Vec<f32>, String> {
    let Some(bytes) = from_base64(text.as_bytes()).filter(|bytes| bytes.len() % 2 == 0) else {
        return Err(format!("selection: {name} is not base64 of 2-byte values"));
    };
    let halves = bytes.as_chunks().0.iter();
    let values: Vec<f32> = halves.map(|&half| f16::from_le_bytes(half).to_f32()).collect();
    match values.iter().find(|value| !value.is_finite()) {
        Some(value) => Err(format!(
            "selection: {name} has the value {value}, expected finite numbers"
        )),
        None => Ok(values),
    }
}

/// Checks that a skill tensor has the shape of the backbone tensor that it replaces, and returns the latter's id.
///
/// Errors: `MissingTensor` if the backbone has no such tensor, `Parse` for another shape.
pub(crate) fn replaced_by(info: &TensorInfo, base: Option<(TensorId, &[u64])>) -> Result<TensorId> {
    match base {
        None => bail!(
            MissingTensor,
            "'{}' replaces a tensor that the backbone does not have",
            info.name
        ),
        Some((_, shape)) if shape != info.shape => bail!(
            Parse,
            "'{}' has shape {:?}, the tensor that it replaces has {shape:?}",
            info.name,
            info.shape
        ),
        Some((id, _)) => Ok(id),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_plain() {
        for id in ["a", "sql", "skill-7_b", "код", &"x".repeat(128)] {
            assert!(check_id(id).is_ok(), "{id}");
        }
        for id in [
            "",
            "none",
            "auto",
            ".",
            "..",
            "a.b",
            "a/b",
            "a\\b",
            "a b",
            "a\n",
            "\0",
            "a:b",
            "a,b",
            &"x".repeat(129),
        ] {
            assert_eq!(check_id(id).unwrap_err().kind, Kind::Usage, "{id:?}");
        }
        // Existing files may have such ids.
        for id in ["-x", "--id", "a\u{200b}b", "\u{202e}a"] {
            assert!(check_id(id).is_ok(), "{id:?}");
            assert_eq!(check_new_id(id).unwrap_err().kind, Kind::Usage, "{id:?}");
        }
        assert!(check_new_id("a-x").is_ok());
    }
}

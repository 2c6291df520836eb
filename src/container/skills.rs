//! Skills: replacements for tensors of one backbone (section 9 of the format).
//!
//! The registry, and the view of a model with one skill active. Knows names and shapes, not what a skill is good for.

use super::arch::Arch;
use super::cmf::Container;
use super::json::kind_of;
use super::masks::{Masks, NO_TASK};
use super::{TensorId, TensorInfo, Tensors};
use crate::error::{Error, Kind, Result, bail};
use half::f16;
use serde::Deserialize;
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::ops::Deref;

/// What the names of all skills' tensors start with.
const PREFIX: &str = "skill.";
/// The longest id, in bytes.
const MAX_ID: usize = 128;
/// Most names in a message that is made once for each skill.
const MAX_LISTED: usize = 10;
/// What a skill may not be called: they say something else where a skill is chosen.
const RESERVED: [&str; 2] = ["none", "auto"];

/// One skill of a registry.
#[derive(Clone, Debug, PartialEq)]
pub struct Skill {
    /// What it is asked for by, and part of its tensors' names.
    pub id: String,
    /// For people.
    pub name: Option<String>,
    /// The layers it changes, as its maker says.
    pub layers: Vec<u32>,
    /// How a prompt is found to be one for this skill.
    pub selection: Option<Selection>,
    /// The task whose mask belongs to it.
    pub input_mask_task: Option<String>,
    /// What was measured with it; `None`: nothing.
    pub quality: Option<Value>,
    /// hash64 of the directory of the model it was cut from: the skill of a skill file.
    pub base_dir_hash: Option<u64>,
    /// The network it was cut from, by name.
    pub base_arch: Option<String>,
    /// The task it was made for.
    pub task: Option<String>,
    /// Where it comes from, free-form.
    pub provenance: Option<Value>,
}

/// An affine subspace of hidden states: the prompts of a skill lie near it.
///
/// With φ the mean over a prompt's tokens of the hidden state behind layer `phi_layer`, r = φ − mean and B the basis,
/// E = ‖r − BᵀB·r‖² / ‖φ‖²; the skill with the smallest E is chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Selection {
    /// What E measures, as its maker says.
    pub metric: Option<String>,
    /// The layer behind which hidden states are taken.
    pub phi_layer: usize,
    /// \[hidden\]
    pub mean: Vec<f32>,
    /// \[rank, hidden\], row-major.
    pub basis: Vec<f32>,
    /// Rows of the basis.
    pub rank: usize,
}

/// The members as they lie in the header.
#[derive(Deserialize)]
struct Record {
    id: String,
    name: Option<String>,
    #[serde(default)]
    layers: Vec<u32>,
    selection: Option<SelectionRecord>,
    input_mask_task: Option<String>,
    quality: Option<Value>,
    base_dir_hash: Option<String>,
    base_arch: Option<String>,
    task: Option<String>,
    provenance: Option<Value>,
}

#[derive(Deserialize)]
struct SelectionRecord {
    metric: Option<String>,
    phi_layer: usize,
    mean: String,
    basis: String,
    rank: Option<usize>,
}

impl Skill {
    /// The name of this skill's replacement for a tensor.
    pub fn tensor_name(&self, name: &str) -> String {
        format!("{PREFIX}{}.{name}", self.id)
    }

    /// The id in the name of a tensor that would be a skill's.
    pub fn of_tensor(name: &str) -> Option<&str> {
        split_name(name).map(|(id, _)| id)
    }

    /// The task whose mask goes with the skill, one of those of `masks`, or [`NO_TASK`].
    ///
    /// Errors: `Parse` for a task without a mask, with those that have one.
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
            "skill '{}' goes with the mask of task '{task}', and there is no such mask, there are: {}",
            self.id,
            names.join(", ")
        );
    }

    /// The task under whose mask it was measured, [`NO_TASK`] for the full model; `None`: it was not measured. A record that
    /// names none was made under the skill's own task or, if it has none, under the file's default mask.
    pub fn measured_task<'s>(&'s self, masks: Option<&'s Masks>) -> Option<&'s str> {
        let named = self.quality.as_ref()?.get("task").and_then(Value::as_str);
        let default = || Some(masks?.default_mask()?.name.as_str());
        let task = named.or(self.input_mask_task.as_deref()).or_else(default);
        Some(task.unwrap_or(NO_TASK))
    }
}

/// Whether `id` can name a skill. Errors: `Usage`.
pub fn check_id(id: &str) -> Result<()> {
    let plain = |c: char| !(c.is_control() || c.is_whitespace() || ['.', '/', '\\', ':', ','].contains(&c));
    if id.is_empty() || id.len() > MAX_ID || !id.chars().all(plain) || RESERVED.contains(&id) {
        bail!(
            Usage,
            "a skill cannot have the id '{id}': wanted 1 to {MAX_ID} bytes without blanks, control characters and . / \\ : , \
             and neither of {}",
            RESERVED.join(", ")
        );
    }
    Ok(())
}

/// Whether a new skill can have this id: one that can be typed after a flag, and is what it looks like. Errors: `Usage`.
pub fn check_new_id(id: &str) -> Result<()> {
    check_id(id)?;
    // Marks of no width, marks of direction, and the byte order mark.
    let ranges = [
        '\u{200b}'..='\u{200f}',
        '\u{202a}'..='\u{202e}',
        '\u{2060}'..='\u{206f}',
        '\u{feff}'..='\u{feff}',
    ];
    let hidden = |c: char| ranges.iter().any(|range| range.contains(&c));
    let what = match (id.starts_with('-'), id.contains(hidden)) {
        (true, _) => "it begins like a flag",
        (_, true) => "it has characters that cannot be seen",
        _ => return Ok(()),
    };
    bail!(Usage, "a new skill cannot have the id '{}': {what}", id.escape_debug());
}

/// Skill and plain name of a tensor that replaces another.
pub(super) fn split_name(name: &str) -> Option<(&str, &str)> {
    // An id has no dots.
    name.strip_prefix(PREFIX)?.split_once('.')
}

/// The same, if the skill is one of these.
fn registered<'a>(skills: &HashSet<&str>, name: &'a str) -> Option<(&'a str, &'a str)> {
    split_name(name).filter(|(id, _)| skills.contains(id))
}

/// The typed registry. Errors: `Parse`, naming the skill.
pub(super) fn parse(records: &[Value], arch: &Arch) -> Result<Vec<Skill>> {
    let mut skills: Vec<Skill> = Vec::new();
    for (i, record) in records.iter().enumerate() {
        let skill = one(record, arch).map_err(|err| err.context(format_args!("header.skills[{i}]")))?;
        skills.push(skill);
    }
    let mut ids: Vec<&str> = skills.iter().map(|skill| skill.id.as_str()).collect();
    ids.sort_unstable();
    if let Some(pair) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
        bail!(Parse, "header.skills: two skills have the id '{}'", pair[0]);
    }
    Ok(skills)
}

fn one(record: &Value, arch: &Arch) -> Result<Skill> {
    if !record.is_object() {
        bail!(Parse, "wanted an object, found {}", kind_of(record));
    }
    let record = Record::deserialize(record).map_err(|err| Error::new(Kind::Parse, err.to_string()))?;
    check_id(&record.id).map_err(|err| Error::new(Kind::Parse, err.message))?;
    let base_dir_hash = record.base_dir_hash.as_deref().map(hash).transpose()?;
    let selection = record.selection.map(|record| selection(record, arch)).transpose();
    Ok(Skill {
        selection: selection.map_err(|err| err.context("selection"))?,
        base_dir_hash,
        id: record.id,
        name: record.name,
        layers: record.layers,
        input_mask_task: record.input_mask_task,
        quality: record.quality,
        base_arch: record.base_arch,
        task: record.task,
        provenance: record.provenance,
    })
}

fn hash(hex: &str) -> Result<u64> {
    let digits = (1..=16).contains(&hex.len()) && hex.bytes().all(|byte| byte.is_ascii_hexdigit());
    match u64::from_str_radix(hex, 16) {
        Ok(hash) if digits => Ok(hash),
        _ => bail!(Parse, "base_dir_hash is '{hex}', wanted 16 hex digits"),
    }
}

fn selection(record: SelectionRecord, arch: &Arch) -> Result<Selection> {
    let hidden = arch.hidden_size;
    if record.phi_layer >= arch.num_layers {
        bail!(
            Parse,
            "phi_layer is {}, the network has {} layers",
            record.phi_layer,
            arch.num_layers
        );
    }
    let mean = halves("mean", &record.mean)?;
    let basis = halves("basis", &record.basis)?;
    if mean.len() != hidden {
        bail!(Parse, "mean has {} values, wanted {hidden}", mean.len());
    }
    let rank = basis.len() / hidden.max(1);
    if rank == 0 || rank * hidden != basis.len() || record.rank.is_some_and(|said| said != rank) {
        let rows = record.rank.map_or("some".to_owned(), |said| said.to_string());
        bail!(
            Parse,
            "basis has {} values, wanted {rows} rows of {hidden}",
            basis.len()
        );
    }
    Ok(Selection {
        metric: record.metric,
        phi_layer: record.phi_layer,
        mean,
        basis,
        rank,
    })
}

/// Half floats in base64.
fn halves(name: &str, text: &str) -> Result<Vec<f32>> {
    let Some(bytes) = base64(text.as_bytes()).filter(|bytes| bytes.len() % 2 == 0) else {
        bail!(Parse, "{name} is no base64 of 2-byte values");
    };
    let values: Vec<f32> = bytes
        .as_chunks()
        .0
        .iter()
        .map(|&half| f16::from_le_bytes(half).to_f32())
        .collect();
    match values.iter().find(|value| !value.is_finite()) {
        Some(value) => bail!(Parse, "{name} has a value of {value}"),
        None => Ok(values),
    }
}

/// The bytes of padded base64 (RFC 4648, section 4).
fn base64(text: &[u8]) -> Option<Vec<u8>> {
    let padding = text.iter().rev().take_while(|&&c| c == b'=').count();
    if !text.len().is_multiple_of(4) || padding > 2 {
        return None;
    }
    let digits = &text[..text.len() - padding];
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut word, mut bits) = (0u32, 0);
    for &digit in digits {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        word = word << 6 | u32::from(value);
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            bytes.push((word >> bits) as u8);
        }
    }
    // What is left over belongs to no byte and must be zero.
    (word & ((1 << bits) - 1) == 0).then_some(bytes)
}

/// The place of what a skill's tensor replaces, if it is there and has its shape. Errors: `MissingTensor`, `Parse`.
fn replaced_by(info: &TensorInfo, base: Option<(TensorId, &[u64])>) -> Result<TensorId> {
    match base {
        None => bail!(
            MissingTensor,
            "'{}' replaces a tensor that the backbone does not have",
            info.name
        ),
        Some((_, shape)) if shape != info.shape => bail!(
            Parse,
            "'{}' has shape {:?}, what it replaces {shape:?}",
            info.name,
            info.shape
        ),
        Some((place, _)) => Ok(place),
    }
}

/// What is wrong with the skills of a model: their masks, and what their tensors replace; each with the skill or the tensor.
pub(super) fn unsound(container: &Container) -> Vec<(String, Error)> {
    let ids: HashSet<&str> = container.skills().iter().map(|skill| skill.id.as_str()).collect();
    let masks = container.masks();
    // Of a skill file both are its base's.
    let is_skill = container.is_skill_file();
    let without_mask = container.skills().iter().filter_map(|skill| {
        let err = skill.mask_task(masks).err().filter(|_| !is_skill || masks.is_some())?;
        Some((format!("skill '{}'", skill.id), err))
    });
    let infos = container.infos();
    let misplaced = infos.iter().filter(|_| !is_skill).filter_map(|info| {
        let (_, name) = registered(&ids, &info.name)?;
        let base = container.find(name).filter(|_| registered(&ids, name).is_none());
        let err = replaced_by(info, base.map(|base| (base, infos[base].shape.as_slice()))).err()?;
        Some((info.name.clone(), err))
    });
    without_mask.chain(misplaced).collect()
}

/// A model with one skill active, or with none: each tensor is read from the skill where that has it, else from the
/// backbone. Costs names, no weights.
///
/// `C` is a container by reference, or shared.
pub struct SkillView<C> {
    container: C,
    infos: Vec<TensorInfo>,
    /// The tensor of the container behind each of `infos`.
    sources: Vec<TensorId>,
    ids: HashMap<String, TensorId>,
    replaced: Vec<TensorId>,
}

impl<C: Deref<Target = Container>> SkillView<C> {
    /// The model with the skill of this id, or the bare backbone. Tensors of registered skills appear under no other name.
    ///
    /// Errors: `Usage` for an id that is not in the registry, listing those that are; `MissingTensor` when the skill
    /// replaces what the backbone does not have, `Parse` when it does so in another shape.
    pub fn new(container: C, skill: Option<&str>) -> Result<SkillView<C>> {
        let skills = container.skills();
        if let Some(id) = skill
            && !skills.iter().any(|skill| skill.id == id)
        {
            let ids: Vec<&str> = skills.iter().map(|skill| skill.id.as_str()).collect();
            let ids = match ids.is_empty() {
                true => "none".to_owned(),
                false => ids.join(", "),
            };
            bail!(Usage, "no skill '{id}', there are: {ids}");
        }
        let skills: HashSet<&str> = skills.iter().map(|skill| skill.id.as_str()).collect();
        let mut replaced = Vec::new();
        let (mut infos, mut sources, mut ids) = (Vec::new(), Vec::new(), HashMap::new());
        for (id, info) in container.infos().iter().enumerate() {
            if registered(&skills, &info.name).is_none() {
                ids.insert(info.name.clone(), infos.len());
                infos.push(info.clone());
                sources.push(id);
            }
        }
        for (id, info) in container.infos().iter().enumerate() {
            let Some((_, name)) = registered(&skills, &info.name).filter(|(of, _)| Some(*of) == skill) else {
                continue;
            };
            let place = ids.get(name).copied();
            let place = replaced_by(info, place.map(|place| (place, infos[place].shape.as_slice())))?;
            infos[place] = TensorInfo {
                name: name.to_owned(),
                ..info.clone()
            };
            sources[place] = id;
            replaced.push(place);
        }
        replaced.sort_unstable();
        Ok(SkillView {
            container,
            infos,
            sources,
            ids,
            replaced,
        })
    }

    /// The container that is looked at.
    pub fn container(&self) -> &Container {
        &self.container
    }

    /// Tensors that the skill replaces, in order.
    pub fn replaced(&self) -> &[TensorId] {
        &self.replaced
    }

    /// The container's own id of a tensor of the view.
    pub fn source(&self, id: TensorId) -> Option<TensorId> {
        self.sources.get(id).copied()
    }
}

impl<C: Deref<Target = Container> + Send + Sync> Tensors for SkillView<C> {
    fn infos(&self) -> &[TensorInfo] {
        &self.infos
    }

    fn find(&self, name: &str) -> Option<TensorId> {
        self.ids.get(name).copied()
    }

    fn bytes(&self, id: TensorId) -> Result<&[u8]> {
        match self.source(id) {
            Some(id) => self.container.bytes(id),
            None => bail!(Usage, "tensor {id} of {}", self.infos.len()),
        }
    }

    fn masks(&self) -> Option<&Masks> {
        self.container.masks()
    }

    fn release(&self, id: TensorId) {
        if let Some(id) = self.source(id) {
            self.container.release(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_read_and_what_is_none_is_refused() {
        for (text, bytes) in [
            ("", ""),
            ("Zg==", "f"),
            ("Zm8=", "fo"),
            ("Zm9v", "foo"),
            ("Zm9vYmE=", "fooba"),
        ] {
            assert_eq!(base64(text.as_bytes()).as_deref(), Some(bytes.as_bytes()), "{text}");
        }
        assert_eq!(base64(b"+/8="), Some(vec![0xFB, 0xFF]));
        for text in ["Zg", "Zg=", "Z===", "====", "Zh==", "Zm9=", "Zm 9", "Zm-_", "Zg==Zg=="] {
            assert_eq!(base64(text.as_bytes()), None, "{text}");
        }
    }

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
        // A file may have them already.
        for id in ["-x", "--id", "a\u{200b}b", "\u{202e}a"] {
            assert!(check_id(id).is_ok(), "{id:?}");
            assert_eq!(check_new_id(id).unwrap_err().kind, Kind::Usage, "{id:?}");
        }
        assert!(check_new_id("a-x").is_ok());
    }
}

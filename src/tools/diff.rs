//! `diff`: the differences between two models. The layout of their files is not compared.

use crate::error::Result;
use crate::format::cmf::CmfContainer;
use crate::format::hash64;
use crate::format::json::without_nulls;
use serde::Serialize;
use serde_json::{Map, Value, json};

/// Header members that describe files or are compared separately.
const NOT_COMPARED: [&str; 6] = ["format", "version", "section_hashes", "shard", "arch", "skills"];

/// One difference.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// The name of the member, tensor, mask, skill or section.
    pub name: String,
    /// The value in the first model; `None`: absent.
    pub a: Option<Value>,
    /// The value in the second model; `None`: absent.
    pub b: Option<Value>,
}

/// All differences, by subject. Payloads are compared by type, shape and stored checksum.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Differences {
    /// Members of `arch`; absent ones have the format's defaults.
    pub arch: Vec<Difference>,
    /// Other members of the header.
    pub header: Vec<Difference>,
    /// Tensors.
    pub tensors: Vec<Difference>,
    /// Task masks, by name.
    pub masks: Vec<Difference>,
    /// Skills, by id.
    pub skills: Vec<Difference>,
    /// Tokenizer and sparse index.
    pub sections: Vec<Difference>,
}

impl Differences {
    /// Whether there are no differences.
    pub fn is_empty(&self) -> bool {
        self.lists().iter().all(|(_, list)| list.is_empty())
    }

    /// The lists with their names.
    pub fn lists(&self) -> [(&'static str, &[Difference]); 6] {
        [
            ("arch", &self.arch),
            ("header", &self.header),
            ("tensors", &self.tensors),
            ("masks", &self.masks),
            ("skills", &self.skills),
            ("sections", &self.sections),
        ]
    }
}

/// Compares two open models. Reads no weights.
///
/// Errors: `Parse` if the description of a network cannot be written as JSON, which does not happen for opened models.
pub fn diff(a: &CmfContainer, b: &CmfContainer) -> Result<Differences> {
    let compared = |describe: fn(&CmfContainer) -> Map<String, Value>| compare(&describe(a), &describe(b));
    Ok(Differences {
        arch: compare(&arch(a)?, &arch(b)?),
        header: compared(header),
        tensors: compared(tensors),
        masks: compared(masks),
        skills: compared(skills),
        sections: compared(sections),
    })
}

fn compare(a: &Map<String, Value>, b: &Map<String, Value>) -> Vec<Difference> {
    let changed = a
        .iter()
        .filter(|(name, value)| b.get(*name).is_none_or(|other| !same(value, other)));
    let added = b.iter().filter(|(name, _)| !a.contains_key(*name));
    changed
        .chain(added)
        .map(|(name, _)| Difference {
            name: name.clone(),
            a: a.get(name).cloned(),
            b: b.get(name).cloned(),
        })
        .collect()
}

/// Whether two values are equal; 1 and 1.0 are. Parsing has bounded the depth.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(x), Value::Number(y)) => x == y || x.as_f64() == y.as_f64() && !(x.is_u64() && y.is_u64()),
        (Value::Array(x), Value::Array(y)) => x.len() == y.len() && x.iter().zip(y).all(|(x, y)| same(x, y)),
        (Value::Object(x), Value::Object(y)) => {
            x.len() == y.len() && x.iter().all(|(key, x)| y.get(key).is_some_and(|y| same(x, y)))
        }
        _ => a == b,
    }
}

fn arch(model: &CmfContainer) -> Result<Map<String, Value>> {
    let mut members = match model.header_json().get("arch").map(without_nulls) {
        Some(Value::Object(members)) => members,
        _ => Map::new(),
    };
    if let Value::Object(typed) = model.header().arch.to_json()? {
        members.extend(typed);
    }
    Ok(members)
}

fn header(model: &CmfContainer) -> Map<String, Value> {
    let members = model.header_json().iter();
    let mut members: Map<String, Value> = members
        .filter(|(key, value)| !NOT_COMPARED.contains(&key.as_str()) && !value.is_null())
        .map(|(key, value)| (key.clone(), without_nulls(value)))
        .collect();
    if let Some(masks) = model.masks() {
        members.insert("masks.default_task".into(), masks.default_task.clone().into());
        members.insert("masks.by_pass".into(), model.has_loop_masks().into());
    }
    members
}

fn tensors(model: &CmfContainer) -> Map<String, Value> {
    let described = model.infos().iter().zip(model.payloads()).map(|(info, payload)| {
        let value = json!({
            "dtype": info.dtype.name(), "shape": info.shape, "hash": format!("{:016x}", payload.hash)
        });
        (info.name.clone(), value)
    });
    described.collect()
}

fn masks(model: &CmfContainer) -> Map<String, Value> {
    let masks = model.masks().into_iter().flat_map(|masks| &masks.masks);
    let described = masks.map(|mask| {
        let value = json!({
            "task_id": mask.task_id, "description": mask.description, "sparsity": mask.sparsity, "quality": mask.quality,
            "other": mask.other, "hash": format!("{:016x}", mask.bits_hash()),
        });
        (mask.name.clone(), value)
    });
    described.collect()
}

fn skills(model: &CmfContainer) -> Map<String, Value> {
    let records = model.skills().iter().zip(&model.header().skills);
    records
        .map(|(skill, record)| (skill.id.clone(), record.clone()))
        .collect()
}

fn sections(model: &CmfContainer) -> Map<String, Value> {
    let named = [("tokenizer", model.tokenizer_json()), ("index", model.index_section())];
    let described = named.into_iter().filter_map(|(name, bytes)| {
        let bytes = bytes?;
        let value = json!({"bytes": bytes.len(), "hash": format!("{:016x}", hash64(bytes))});
        Some((name.to_owned(), value))
    });
    described.collect()
}

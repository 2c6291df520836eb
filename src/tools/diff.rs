//! `diff`: what two models have not in common. How a model is laid out in files is not part of it.

use crate::container::json::without_nulls;
use crate::container::{Container, Tensors, hash64};
use crate::error::{Error, Kind, Result};
use serde_json::{Map, Value, json};

/// Members of the header that describe files, or are compared elsewhere.
const NOT_COMPARED: [&str; 6] = ["format", "version", "section_hashes", "shard", "arch", "skills"];

/// Something that is not the same in both models.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// What it is.
    pub name: String,
    /// How the first model has it; `None`: not at all.
    pub a: Option<Value>,
    /// How the second has it.
    pub b: Option<Value>,
}

/// All differences, by what they are about. Payloads are compared by type, shape and the checksums that the files hold.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Differences {
    /// Members of `arch`, with the format's defaults where a file says nothing.
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
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.parts().iter().all(|(_, part)| part.is_empty())
    }

    /// The lists with their names.
    pub fn parts(&self) -> [(&'static str, &[Difference]); 6] {
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
/// Errors: `Parse` when a description cannot be put in words, which no opened model has.
pub fn diff(a: &Container, b: &Container) -> Result<Differences> {
    let compared = |describe: fn(&Container) -> Result<Map<String, Value>>| -> Result<Vec<Difference>> {
        Ok(compare(&describe(a)?, &describe(b)?))
    };
    Ok(Differences {
        arch: compared(arch)?,
        header: compared(header)?,
        tensors: compared(tensors)?,
        masks: compared(masks)?,
        skills: compared(skills)?,
        sections: compared(sections)?,
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

/// Whether two values are equal, where 1 and 1.0 are. The depth of what was parsed is bounded.
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

fn arch(model: &Container) -> Result<Map<String, Value>> {
    let mut members = match model.header_json().get("arch").map(without_nulls) {
        Some(Value::Object(members)) => members,
        _ => Map::new(),
    };
    let typed = serde_json::to_value(&model.header().arch)
        .map_err(|err| Error::new(Kind::Parse, format!("the network's description is no JSON: {err}")))?;
    if let Value::Object(typed) = without_nulls(&typed) {
        members.extend(typed);
    }
    Ok(members)
}

fn header(model: &Container) -> Result<Map<String, Value>> {
    let members = model.header_json().iter();
    let mut members: Map<String, Value> = members
        .filter(|(key, value)| !NOT_COMPARED.contains(&key.as_str()) && !value.is_null())
        .map(|(key, value)| (key.clone(), without_nulls(value)))
        .collect();
    if let Some(masks) = model.masks() {
        members.insert("masks.default_task".into(), masks.default_task.clone().into());
        members.insert("masks.by_pass".into(), model.has_loop_masks().into());
    }
    Ok(members)
}

fn tensors(model: &Container) -> Result<Map<String, Value>> {
    let infos = model.infos().iter();
    let described = infos.map(|info| {
        let value = json!({
            "dtype": info.dtype.name(), "shape": info.shape, "hash": format!("{:016x}", info.hash)
        });
        (info.name.clone(), value)
    });
    Ok(described.collect())
}

fn masks(model: &Container) -> Result<Map<String, Value>> {
    let masks = model.masks().into_iter().flat_map(|masks| &masks.masks);
    let described = masks.map(|mask| {
        let value = json!({
            "task_id": mask.task_id, "description": mask.description, "sparsity": mask.sparsity, "quality": mask.quality,
            "other": mask.other, "hash": format!("{:016x}", mask.bits_hash()),
        });
        (mask.name.clone(), value)
    });
    Ok(described.collect())
}

fn skills(model: &Container) -> Result<Map<String, Value>> {
    let records = model.skills().iter().zip(&model.header().skills);
    Ok(records
        .map(|(skill, record)| (skill.id.clone(), record.clone()))
        .collect())
}

fn sections(model: &Container) -> Result<Map<String, Value>> {
    let named = [("tokenizer", model.tokenizer_json()), ("index", model.index_section())];
    let described = named.into_iter().filter_map(|(name, bytes)| {
        let bytes = bytes?;
        let value = json!({"bytes": bytes.len(), "hash": format!("{:016x}", hash64(bytes))});
        Some((name.to_owned(), value))
    });
    Ok(described.collect())
}

//! What the registry says about a skill, changed in place (section 9 of the format).

use super::Written;
use super::skill::signature_note;
use crate::container::{Appender, Container, Selection, SkillView};
use crate::error::{Error, Kind, Result};
use half::f16;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::path::Path;

/// Writes which prompts a skill is for. Everything else that is said about it stays.
///
/// Errors: `Usage` for a skill that there is not; those of writing in place.
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

/// Writes what was measured with a skill: the perplexity of `text` without it and with it, each with the task under whose mask
/// it was found, [`NO_TASK`](crate::container::NO_TASK) for the full model. It says nothing about other tasks.
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
    let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    let record = json!({
        "metric": "ppl", "backbone": backbone, "overlaid": overlaid, "dataset_sha256": digest,
        "backbone_task": backbone_task, "task": task,
    });
    amend(model, id, "quality", record)
}

/// Sets one member of a skill's record.
fn amend(model: &Path, id: &str, member: &str, value: Value) -> Result<Written> {
    let container = Container::open(model)?;
    SkillView::new(&container, Some(id))?;
    let notes = signature_note(&container);
    let path = container.shard_paths()[0].clone();
    drop(container);
    let file = Appender::open(&path)?;
    let mut header: Map<String, Value> = file.header_json().clone();
    let records = header.get_mut("skills").and_then(Value::as_array_mut);
    let record = records
        .and_then(|records| {
            let own = |record: &&mut Value| record.get("id").and_then(Value::as_str) == Some(id);
            records.iter_mut().find(own)
        })
        .and_then(Value::as_object_mut);
    let Some(record) = record else {
        return Err(Error::new(
            Kind::Parse,
            format!("header.skills has no record of '{id}'"),
        ));
    };
    record.insert(member.to_owned(), value);
    let before = file.bytes_before();
    let bytes = file.finish(header, &|_| false)?;
    Ok(Written {
        tensors: 0,
        bytes: bytes.saturating_sub(before),
        notes,
    })
}

/// Padded base64 (RFC 4648, section 4).
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let at = |i: usize| u32::from(three.get(i).copied().unwrap_or(0));
        let word = at(0) << 16 | at(1) << 8 | at(2);
        for digit in 0..4 {
            match digit <= three.len() {
                true => text.push(char::from(DIGITS[(word >> (18 - 6 * digit)) as usize & 63])),
                false => text.push('='),
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_padded() {
        for (bytes, text) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
        ] {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
        assert_eq!(base64(&[0xFB, 0xFF]), "+/8=");
    }
}

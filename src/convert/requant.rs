//! A container as a source: the same model with other types.
//!
//! Header, tokenizer and masks are copied. Knows no family.

use super::model::Model;
use crate::error::{Result, bail};
use crate::format::cmf::CmfContainer;
use crate::format::{TensorInfo, check_hash};
use crate::import::{Matrix, Tensor};
use std::path::Path;
use std::sync::Arc;

/// Members of the header that describe the file and not the model.
const OWN: [&str; 4] = ["format", "version", "section_hashes", "shard"];

/// Opens and checks a file, or all shards of a model.
///
/// Errors: `SkillFile` for a file that holds a skill; `HashMismatch` for damaged sections; those of the container.
pub(super) fn open(path: &Path) -> Result<Model> {
    let container = Arc::new(CmfContainer::open(path)?);
    if container.is_skill_file() {
        bail!(
            SkillFile,
            "the file holds a skill, which is not a whole model; apply it to its base model first"
        );
    }
    let mut header = container.header_json().clone();
    header.retain(|key, _| !OWN.contains(&key.as_str()));
    let mut notes = Vec::new();
    if container.index_section().is_some() {
        notes.push("the sparse index is left out".to_owned());
    }
    let hashes = &container.header().section_hashes;
    // Sections are copied, and their new checksums would hide damage.
    for (name, section, stored) in [
        ("vocab section", container.tokenizer_json(), hashes.vocab),
        ("masks section", container.masks_section(), hashes.masks),
    ] {
        section.map(|section| check_hash(name, section, stored)).transpose()?;
    }
    let tensor = |(id, info): (usize, &TensorInfo)| Tensor {
        name: info.name.clone(),
        data: Matrix::in_container(&container, id),
    };
    Ok(Model {
        header,
        vocab: container.tokenizer_json().map(<[u8]>::to_vec),
        tensors: container.infos().iter().enumerate().map(tensor).collect(),
        dropped: Vec::new(),
        notes,
        files: container.shard_paths().to_vec(),
        container: Some(container),
    })
}

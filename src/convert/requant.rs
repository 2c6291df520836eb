//! A container as a source: the same model with other types.
//!
//! Header, tokenizer and masks are copied. Knows no family.

use super::matrix::Matrix;
use super::model::{Masks, Model, Tensor};
use crate::error::{Result, bail};
use crate::format::cmf::CmfContainer;
use crate::format::{TensorInfo, check_hash};
use std::borrow::Cow;
use std::path::{Path, PathBuf};

/// Members of the header that describe the file and not the model.
const OWN: [&str; 4] = ["format", "version", "section_hashes", "shard"];

/// An open container.
pub(super) struct Source(CmfContainer);

impl Source {
    /// Opens and checks a file, or all shards of a model.
    pub fn open(path: &Path) -> Result<Source> {
        CmfContainer::open(path).map(Source)
    }

    /// The files that are read.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.0.shard_paths().iter().map(PathBuf::as_path)
    }

    /// The model in the container. Errors: `SkillFile` for a file that holds a skill; `HashMismatch` for damaged sections.
    pub fn model(&self) -> Result<Model<'_>> {
        let Source(container) = self;
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
        let tensor = |(id, info): (usize, &TensorInfo)| {
            Ok(Tensor {
                name: info.name.clone(),
                data: Matrix::in_container(container, id)?,
            })
        };
        let infos = container.infos().iter().enumerate();
        let vocab = container.tokenizer_json().map(Cow::Borrowed);
        let by_pass = container.has_loop_masks();
        let masks = container.masks_section().map(|bytes| Masks { bytes, by_pass });
        Ok(Model {
            header,
            vocab,
            masks,
            tensors: infos.map(tensor).collect::<Result<_>>()?,
            dropped: Vec::new(),
            notes,
        })
    }
}

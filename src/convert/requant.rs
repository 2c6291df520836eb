//! A container as a source: the same model with other types.
//!
//! Header, tokenizer and masks are carried over as they are. Knows no family.

use super::{Masks, Matrix, Model, Tensor};
use crate::container::{Container, TensorInfo, Tensors, hash64};
use crate::error::{Result, bail};
use std::borrow::Cow;
use std::path::Path;

/// Members of the header that describe the old file and not the model.
const OWN: [&str; 4] = ["format", "version", "section_hashes", "shard"];

/// An open container.
pub(super) struct Source(Container);

impl Source {
    /// Opens and checks a file, or all shards of a model.
    pub fn open(path: &Path) -> Result<Source> {
        Container::open(path).map(Source)
    }

    /// The files that are read.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.0.shard_paths().iter().map(|path| path.as_path())
    }

    /// Reads what the container describes. Errors: `SkillFile` for a file that is no model.
    pub fn model(&self) -> Result<Model<'_>> {
        let Source(container) = self;
        if container.is_skill_file() {
            bail!(
                SkillFile,
                "a skill file holds replacements and no model; apply it to its base first"
            );
        }
        let mut header = container.header_json().clone();
        header.retain(|key, _| !OWN.contains(&key.as_str()));
        let mut notes = Vec::new();
        if container.index_section().is_some() {
            notes.push("the sparse index is left out".to_owned());
        }
        let hashes = &container.header().section_hashes;
        intact("vocab", container.tokenizer_json(), hashes.vocab)?;
        intact("masks", container.masks_section(), hashes.masks)?;
        let tensor = |(id, info): (usize, &TensorInfo)| {
            Ok(Tensor {
                name: info.name.clone(),
                data: Matrix::in_container(container, id, info)?,
            })
        };
        let tensors = container
            .infos()
            .iter()
            .enumerate()
            .map(tensor)
            .collect::<Result<_>>()?;
        let vocab = container.tokenizer_json().map(Cow::Borrowed);
        let by_pass = container.has_loop_masks();
        let masks = container.masks_section().map(|bytes| Masks { bytes, by_pass });
        Ok(Model {
            header,
            vocab,
            masks,
            tensors,
            dropped: Vec::new(),
            notes,
        })
    }
}

/// What is carried over must be what was written: a new checksum over damage would hide it.
fn intact(name: &str, section: Option<&[u8]>, stored: Option<u64>) -> Result<()> {
    let (Some(section), Some(stored)) = (section, stored) else {
        return Ok(());
    };
    let found = hash64(section);
    if found != stored {
        bail!(HashMismatch, "{name} section: stored {stored:016x}, found {found:016x}");
    }
    Ok(())
}

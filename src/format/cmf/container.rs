//! An open model: one file or all its shards, checked and joined into one set of tensors.

use super::directory::{Entry, Payload};
use super::envelope::{LOOP_MASKS, SKILL_FILE};
use super::file::CmfFile;
use super::header::Header;
use super::index::IndexEntry;
use super::masks::Masks;
use super::sections::Sections;
use super::shards;
use super::skills::Skill;
use crate::error::{Result, bail};
use crate::format::hash::hash64;
use crate::format::tensor::{TensorId, TensorInfo};
use serde_json::{Map, Value};
use std::collections::{HashMap, hash_map};
use std::path::{Path, PathBuf};

/// A validated, memory-mapped model of one or several files.
///
/// Opening checks everything except the bytes of the weights, which [`CmfContainer::verify`] checks. The files must not be
/// truncated or rewritten while the container exists: a truncation is reported before a tensor is returned, but faults if
/// it happens while bytes are read or removes a section (tokenizer, masks, index) that is read later. Replacing a file by
/// renaming another one over it is harmless.
pub struct CmfContainer {
    /// Shard 1 first.
    pub(super) files: Vec<CmfFile>,
    paths: Vec<PathBuf>,
    infos: Vec<TensorInfo>,
    payloads: Vec<Payload>,
    ids: HashMap<String, TensorId>,
}

impl CmfContainer {
    /// Opens the model of which `path` is the file or one of the files. Reads headers and directories, no weights.
    ///
    /// Errors: `InvalidMagic`, `UnsupportedVersion`, `UnsupportedFeature`, `Parse`, `Bounds`, `HashMismatch`, `ShardMismatch`;
    /// `Io`, also if `path` is not a regular file.
    pub fn open(path: &Path) -> Result<CmfContainer> {
        let mut files = shards::with_siblings(CmfFile::open(path)?)?;
        let count = files.iter().map(|file| file.entries.len()).sum();
        let (mut infos, mut payloads) = (Vec::<TensorInfo>::with_capacity(count), Vec::with_capacity(count));
        for (shard, file) in files.iter_mut().enumerate() {
            for Entry { info, payload } in std::mem::take(&mut file.entries) {
                infos.push(info);
                payloads.push(Payload { shard, ..payload });
            }
        }
        let paths: Vec<PathBuf> = files.iter().map(|file| file.path().to_owned()).collect();
        let mut ids = HashMap::with_capacity(infos.len());
        for (id, info) in infos.iter().enumerate() {
            let first = match ids.entry(info.name.clone()) {
                hash_map::Entry::Vacant(free) => {
                    free.insert(id);
                    continue;
                }
                hash_map::Entry::Occupied(taken) => payloads[*taken.get()].shard,
            };
            let (name, shard) = (&info.name, payloads[id].shard);
            let path = paths[shard].display();
            if first != shard {
                bail!(
                    ShardMismatch,
                    "{path}: tensor '{name}' is also in {}",
                    paths[first].display()
                );
            }
            bail!(Parse, "{path}: tensor '{name}' occurs twice");
        }
        Ok(CmfContainer {
            files,
            paths,
            infos,
            payloads,
            ids,
        })
    }

    /// Shard 1, which has the sections of the whole model.
    fn main(&self) -> &CmfFile {
        // `open` always puts at least one file into the list.
        &self.files[0]
    }

    /// The header of shard 1.
    pub fn header(&self) -> &Header {
        &self.main().header
    }

    /// The header's JSON, unknown members included.
    pub fn header_json(&self) -> &Map<String, Value> {
        &self.main().header_json
    }

    /// The `tokenizer.json` of the model, verbatim.
    pub fn tokenizer_json(&self) -> Option<&[u8]> {
        self.main().unchecked_sections().vocab
    }

    /// The optional sections, verbatim, checked against their checksums so that a copy never hides damage.
    ///
    /// Errors: `HashMismatch`.
    pub fn sections(&self) -> Result<Sections<'_>> {
        self.main().sections()
    }

    /// The task masks, if the file has any.
    pub fn masks(&self) -> Option<&Masks> {
        self.main().masks.as_ref()
    }

    /// The sparse index, if the file has one.
    pub fn index(&self) -> Option<&[IndexEntry]> {
        self.main().index.as_deref()
    }

    /// The registry of skills.
    pub fn skills(&self) -> &[Skill] {
        &self.main().skills
    }

    /// hash64 of the directory, by which a skill file identifies its base.
    ///
    /// Errors: `Usage` for a model in several files.
    pub fn directory_hash(&self) -> Result<u64> {
        let [file] = self.files.as_slice() else {
            bail!(
                Usage,
                "{}: a model in several files has several directories; compact it first",
                self.main().path().display()
            );
        };
        Ok(hash64(file.envelope.directory.of(file.mapped.bytes())))
    }

    /// The raw masks section.
    pub fn masks_section(&self) -> Option<&[u8]> {
        self.main().unchecked_sections().masks
    }

    /// The raw sparse index section.
    pub fn index_section(&self) -> Option<&[u8]> {
        self.main().unchecked_sections().index
    }

    /// Whether masks have a row for every loop of every layer, instead of one per layer.
    pub fn has_loop_masks(&self) -> bool {
        self.main().envelope.features & LOOP_MASKS != 0
    }

    /// Whether the file holds only the tensors of a skill. Such a file cannot run.
    pub fn is_skill_file(&self) -> bool {
        self.main().envelope.features & SKILL_FILE != 0 || self.header().has_bound_skill()
    }

    /// Bytes of all files.
    pub fn file_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.mapped.len()).sum()
    }

    /// The files, shard 1 first.
    pub fn shard_paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// Every tensor: directory order, shard 1's tensors first. A [`TensorId`] indexes this.
    pub fn infos(&self) -> &[TensorInfo] {
        &self.infos
    }

    /// The stored payload of each of [`CmfContainer::infos`].
    pub fn payloads(&self) -> &[Payload] {
        &self.payloads
    }

    /// The tensor of this name.
    pub fn find(&self, name: &str) -> Option<TensorId> {
        self.ids.get(name).copied()
    }

    /// The payload of a tensor. Pages of the file are read when they are touched.
    ///
    /// Errors: `Internal` for an invalid id, `Io` if the file was truncated.
    pub fn bytes(&self, id: TensorId) -> Result<&[u8]> {
        let (file, start, len) = self.place(id)?;
        file.mapped.check_length()?;
        Ok(&file.mapped.bytes()[start..][..len])
    }

    /// Declares a payload unused for now, so that its pages can be given back. Its bytes stay readable.
    pub fn release(&self, id: TensorId) {
        if let Ok((file, start, len)) = self.place(id) {
            file.mapped.release(start, len);
        }
    }

    /// The file of a tensor, the payload's first byte in it, and its length.
    fn place(&self, id: TensorId) -> Result<(&CmfFile, usize, usize)> {
        let (Some(info), Some(payload)) = (self.infos.get(id), self.payloads.get(id)) else {
            bail!(Internal, "tensor {id} of {}", self.infos.len());
        };
        let file = &self.files[payload.shard];
        let start = file.envelope.data.off + payload.offset;
        Ok((file, start as usize, info.nbytes as usize))
    }
}

//! Opening a model: one file or all its shards, checked and joined into one set of tensors.

use super::directory;
use super::envelope::{Envelope, LOOP_MASKS, SKILL_FILE, Span};
use super::file::MappedFile;
use super::hash::hash64;
use super::header::Header;
use super::verify::{self, VerifyReport};
use super::{TensorId, TensorInfo, Tensors, json, shards};
use crate::error::{Error, Kind, Result, bail};
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::{Path, PathBuf};

/// One file of a model.
pub(super) struct CmfFile {
    pub mapped: MappedFile,
    pub envelope: Envelope,
    pub header: Header,
    pub header_json: Map<String, Value>,
    infos: Vec<TensorInfo>,
}

impl CmfFile {
    /// Maps and checks one file on its own. Errors carry its path.
    pub fn open(path: &Path) -> Result<CmfFile> {
        let mapped = MappedFile::open(path)?;
        Self::parse(mapped).map_err(|err| err.context(path.display()))
    }

    fn parse(mapped: MappedFile) -> Result<CmfFile> {
        let file = mapped.bytes();
        let envelope = Envelope::parse(file)?;
        let header = envelope.header.of(file);
        if header.len() > json::MAX_BYTES {
            bail!(
                Parse,
                "header of {} bytes, allowed are {}",
                header.len(),
                json::MAX_BYTES
            );
        }
        check_hash("header", envelope.header, envelope.header_hash, file)?;
        let header_json = json::parse_object(header, "header")?;
        let header = Header::from_json(&header_json)?;
        if envelope.features & LOOP_MASKS != 0 && header.arch.num_loops == 1 {
            bail!(Parse, "feature bit 5 (LOOP_MASKS), but arch.num_loops is 1");
        }
        let infos = directory::parse(file, &envelope)?;
        check_hash("directory", envelope.directory, envelope.directory_hash, file)?;
        Ok(CmfFile {
            envelope,
            header,
            header_json,
            infos,
            mapped,
        })
    }

    pub fn path(&self) -> &Path {
        self.mapped.path()
    }

    /// An optional section's bytes.
    fn section(&self, span: Option<Span>) -> Option<&[u8]> {
        span.map(|span| span.of(self.mapped.bytes()))
    }
}

/// Compares a section with its stored checksum, if there is one.
pub(super) fn check_hash(what: &str, span: Span, stored: Option<u64>, file: &[u8]) -> Result<()> {
    let Some(stored) = stored else { return Ok(()) };
    let found = hash64(span.of(file));
    if found != stored {
        bail!(
            HashMismatch,
            "{what} at {:#x}: stored {stored:016x}, found {found:016x}",
            span.off
        );
    }
    Ok(())
}

/// A validated, memory-mapped model of one or several files.
///
/// Everything but the weights' own bytes was checked when it was opened; [`Container::verify`] checks those. The files
/// must not be cut or rewritten while the container lives: a cut is noticed before a tensor is handed out, and faults
/// when it happens while bytes are being read. Replacing a file by renaming another over it is harmless.
pub struct Container {
    /// Shard 1 first.
    pub(super) files: Vec<CmfFile>,
    paths: Vec<PathBuf>,
    infos: Vec<TensorInfo>,
    ids: HashMap<String, TensorId>,
}

impl Container {
    /// Opens the model that `path` is, or is a shard of. Reads headers and directories, no weights.
    ///
    /// Errors: as the format says for each rule; `ShardMismatch`; `Io`, also when `path` is no regular file.
    pub fn open(path: &Path) -> Result<Container> {
        let mut files = shards::with_siblings(CmfFile::open(path)?)?;
        let mut infos: Vec<TensorInfo> = Vec::with_capacity(files.iter().map(|file| file.infos.len()).sum());
        for (shard, file) in files.iter_mut().enumerate() {
            infos.extend(
                std::mem::take(&mut file.infos)
                    .into_iter()
                    .map(|info| TensorInfo { shard, ..info }),
            );
        }
        let paths: Vec<PathBuf> = files.iter().map(|file| file.path().to_owned()).collect();
        let mut ids = HashMap::with_capacity(infos.len());
        for (id, info) in infos.iter().enumerate() {
            let first = match ids.entry(info.name.clone()) {
                Entry::Vacant(free) => {
                    free.insert(id);
                    continue;
                }
                Entry::Occupied(taken) => infos[*taken.get()].shard,
            };
            let (name, path) = (&info.name, paths[info.shard].display());
            if first != info.shard {
                bail!(
                    ShardMismatch,
                    "{path}: tensor '{name}' is also in {}",
                    paths[first].display()
                );
            }
            bail!(Parse, "{path}: tensor '{name}' is there twice");
        }
        Ok(Container {
            files,
            paths,
            infos,
            ids,
        })
    }

    /// Shard 1, which carries what belongs to the whole model.
    fn main(&self) -> &CmfFile {
        // `open` always puts a file there.
        &self.files[0]
    }

    /// The header, that of shard 1.
    pub fn header(&self) -> &Header {
        &self.main().header
    }

    /// The header as it lies in the file, unknown members included.
    pub fn header_json(&self) -> &Map<String, Value> {
        &self.main().header_json
    }

    /// The `tokenizer.json` of the model, verbatim.
    pub fn tokenizer_json(&self) -> Option<&[u8]> {
        self.main().section(self.main().envelope.vocab)
    }

    /// The masks section, raw; its blobs are aligned to 8 from its start.
    pub fn masks_section(&self) -> Option<&[u8]> {
        self.main().section(self.main().envelope.masks)
    }

    /// The sparse index section, raw.
    pub fn index_section(&self) -> Option<&[u8]> {
        self.main().section(self.main().envelope.index)
    }

    /// Whether the rows of masks are those of every pass over the stack, instead of those of the layers.
    pub fn has_loop_masks(&self) -> bool {
        self.main().envelope.features & LOOP_MASKS != 0
    }

    /// Whether the file holds only what a skill changes in a base model; such a file is never run.
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

    /// Checks every byte that has a checksum and the inside of every payload.
    ///
    /// `progress` is told the weight bytes checked so far and their total, on the calling thread. Nothing is an error
    /// here: whatever is wrong is listed, all of it.
    pub fn verify(&self, progress: &mut dyn FnMut(u64, u64)) -> VerifyReport {
        verify::verify(self, progress)
    }

    fn info(&self, id: TensorId) -> Result<&TensorInfo> {
        self.infos
            .get(id)
            .ok_or_else(|| Error::new(Kind::Usage, format!("tensor {id} of {}", self.infos.len())))
    }

    /// Where a checked tensor starts in its file.
    fn start(&self, info: &TensorInfo) -> usize {
        (self.files[info.shard].envelope.data.off + info.offset) as usize
    }
}

impl Tensors for Container {
    fn infos(&self) -> &[TensorInfo] {
        &self.infos
    }

    fn find(&self, name: &str) -> Option<TensorId> {
        self.ids.get(name).copied()
    }

    fn bytes(&self, id: TensorId) -> Result<&[u8]> {
        let info = self.info(id)?;
        let mapped = &self.files[info.shard].mapped;
        mapped.check_length()?;
        Ok(&mapped.bytes()[self.start(info)..][..info.nbytes as usize])
    }

    fn release(&self, id: TensorId) {
        if let Ok(info) = self.info(id) {
            self.files[info.shard]
                .mapped
                .release(self.start(info), info.nbytes as usize);
        }
    }
}

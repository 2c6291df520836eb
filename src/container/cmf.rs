//! Opening a model: one file or all its shards, checked and joined into one set of tensors.

use super::directory;
use super::envelope::{Envelope, LOOP_MASKS, SKILL_FILE, Span};
use super::file::MappedFile;
use super::hash::hash64;
use super::header::Header;
use super::index::{self, IndexEntry};
use super::masks::{MaskShape, Masks};
use super::skills::{self, Skill};
use super::verify::{self, VerifyReport};
use super::writer::Sections;
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
    pub infos: Vec<TensorInfo>,
    masks: Option<Masks>,
    index: Option<Vec<IndexEntry>>,
    skills: Vec<Skill>,
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
        let shape = MaskShape::of(&header.arch, envelope.features & LOOP_MASKS != 0);
        let masks = envelope
            .masks
            .map(|span| Masks::parse(span.of(file), shape))
            .transpose()?;
        let index = envelope
            .index
            .map(|span| index::parse(span.of(file), &header.arch, shape.rows));
        let skills = skills::parse(&header.skills, &header.arch)?;
        Ok(CmfFile {
            index: index.transpose()?,
            masks,
            skills,
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

    /// The optional sections, held against their checksums. Errors: `HashMismatch`.
    pub fn sections(&self) -> Result<Sections<'_>> {
        let CmfFile {
            mapped,
            envelope,
            header,
            ..
        } = self;
        mapped.check_length()?;
        let hashes = &header.section_hashes;
        let checked = |name: &str, span: Option<Span>, stored: Option<u64>| {
            let Some(span) = span else { return Ok(None) };
            check_hash(name, span, stored, mapped.bytes()).map_err(|err| err.context(mapped.path().display()))?;
            Ok(Some(span.of(mapped.bytes())))
        };
        Ok(Sections {
            vocab: checked("vocab", envelope.vocab, hashes.vocab)?,
            masks: checked("masks", envelope.masks, hashes.masks)?,
            index: checked("index", envelope.index, hashes.index)?,
        })
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
/// must not be cut or rewritten while the container lives: a cut is noticed before a tensor is handed out, but faults when
/// it happens while bytes are being read, or takes away a section (tokenizer, masks, index) that is read later. Replacing
/// a file by renaming another over it is harmless.
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

    /// The optional sections, verbatim, held against their checksums: what is carried over must be what was written.
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

    /// hash64 of the directory of a model in one file: what a skill file names its base by.
    ///
    /// Errors: `Usage` for a model in several files, which has no such thing.
    pub fn directory_hash(&self) -> Result<u64> {
        let [file] = self.files.as_slice() else {
            bail!(
                Usage,
                "{}: a model in several files has no one directory; compact it first",
                self.main().path().display()
            );
        };
        Ok(hash64(file.envelope.directory.of(file.mapped.bytes())))
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
    fn masks(&self) -> Option<&Masks> {
        Container::masks(self)
    }

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

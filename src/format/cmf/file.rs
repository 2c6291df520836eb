//! One file of a model, mapped and checked.

use super::directory::{self, Entry};
use super::envelope::{Envelope, LOOP_MASKS, Span};
use super::header::Header;
use super::index::{self, IndexEntry};
use super::masks::{MaskShape, Masks};
use super::sections::Sections;
use super::skills::{self, Skill};
use crate::error::{Result, bail};
use crate::format::file::MappedFile;
use crate::format::hash::check_hash;
use crate::format::json;
use serde_json::{Map, Value};
use std::path::Path;

/// One file of a model.
pub(super) struct CmfFile {
    pub mapped: MappedFile,
    pub envelope: Envelope,
    pub header: Header,
    pub header_json: Map<String, Value>,
    pub entries: Vec<Entry>,
    pub masks: Option<Masks>,
    pub index: Option<Vec<IndexEntry>>,
    pub skills: Vec<Skill>,
}

impl CmfFile {
    /// Maps and checks one file. Errors name its path.
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
                "header of {} bytes, expected at most {}",
                header.len(),
                json::MAX_BYTES
            );
        }
        check_section("header", envelope.header, envelope.header_hash, file)?;
        let header_json = json::parse_object(header, "header")?;
        let header = Header::from_json(&header_json)?;
        if envelope.features & LOOP_MASKS != 0 && header.arch.num_loops == 1 {
            bail!(Parse, "feature bit 5 (LOOP_MASKS), but arch.num_loops is 1");
        }
        let entries = directory::parse(file, &envelope)?;
        check_section("directory", envelope.directory, envelope.directory_hash, file)?;
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
            entries,
            mapped,
        })
    }

    pub fn path(&self) -> &Path {
        self.mapped.path()
    }

    /// The optional sections, checked against their checksums. Errors: `HashMismatch`.
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
            check_section(name, span, stored, mapped.bytes()).map_err(|err| err.context(mapped.path().display()))?;
            Ok(Some(span.of(mapped.bytes())))
        };
        Ok(Sections {
            vocab: checked("vocab", envelope.vocab, hashes.vocab)?,
            masks: checked("masks", envelope.masks, hashes.masks)?,
            index: checked("index", envelope.index, hashes.index)?,
        })
    }

    /// An optional section's bytes.
    pub fn section(&self, span: Option<Span>) -> Option<&[u8]> {
        span.map(|span| span.of(self.mapped.bytes()))
    }
}

/// Compares a section with its stored checksum, if it has one. Errors: `HashMismatch`.
pub(super) fn check_section(what: &str, span: Span, stored: Option<u64>, file: &[u8]) -> Result<()> {
    if stored.is_some() {
        check_hash(format_args!("{what} at {:#x}", span.off), span.of(file), stored)?;
    }
    Ok(())
}

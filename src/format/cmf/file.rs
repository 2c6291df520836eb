//! One file of a model, mapped and checked.

use super::directory::{self, Entry};
use super::envelope::{Envelope, LOOP_MASKS, PRISM_HADAMARD, Span};
use super::header::Header;
use super::index::{self, IndexEntry};
use super::masks::{MaskShape, Masks};
use super::sections::{PerSection, Sections};
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
        let (rotated, bit) = (&header.arch.prism_hadamard, envelope.features & PRISM_HADAMARD != 0);
        if rotated.is_some() != bit {
            bail!(
                Parse,
                "arch.prism_hadamard and feature bit 7 (PRISM_HADAMARD) occur only together"
            );
        }
        let shape = MaskShape::of(&header.arch, envelope.features & LOOP_MASKS != 0);
        let sections = envelope.sections.map(|span| span.of(file));
        let masks = sections.masks.map(|masks| Masks::parse(masks, shape)).transpose()?;
        let index = sections
            .index
            .map(|index| index::parse(index, &header.arch, shape.rows));
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
        self.mapped.check_length()?;
        for (name, span, stored) in self.section_spans() {
            check_section(name, span, stored, self.mapped.bytes()).map_err(|err| err.context(self.path().display()))?;
        }
        Ok(self.unchecked_sections())
    }

    /// The optional sections.
    pub fn unchecked_sections(&self) -> Sections<'_> {
        self.envelope.sections.map(|span| span.of(self.mapped.bytes()))
    }

    /// Name, position and stored checksum of every optional section that there is.
    pub fn section_spans(&self) -> impl Iterator<Item = (&'static str, Span, Option<u64>)> {
        let spans = self.envelope.sections.in_order().into_iter();
        let hashes = self.header.section_hashes.in_order();
        let all = PerSection::<Span>::NAMES.into_iter().zip(spans.zip(hashes));
        all.filter_map(|(name, (span, stored))| Some((name, *span?, stored.copied())))
    }
}

/// Compares a section with its stored checksum, if it has one. Errors: `HashMismatch`.
pub(super) fn check_section(what: &str, span: Span, stored: Option<u64>, file: &[u8]) -> Result<()> {
    if stored.is_some() {
        check_hash(format_args!("{what} at {:#x}", span.off), span.of(file), stored)?;
    }
    Ok(())
}

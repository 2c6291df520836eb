//! The parts of a file that describe the rest: envelope, header and directory.

use super::directory::{self, Entry};
use super::envelope::{
    self, BINARY_MASKS, Envelope, LOOP_MASKS, PRISM_HADAMARD, QUANT_2F, SKILL_FILE, Span, TENSOR_DIR,
};
use super::header::Header;
use super::masks::{MaskShape, Masks};
use super::sections::Sections;
use super::{index, skills};
use crate::dtype::Dtype;
use crate::error::{Error, Result, bail};
use crate::format::arch::Arch;
use crate::format::hash::hash64;
use crate::format::json;
use crate::format::tensor::TensorSpec;
use serde_json::{Map, Value};
use std::collections::HashSet;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

/// Directory entries for tensors that are not written yet.
///
/// Errors: `Usage` for names or shapes that a directory cannot hold, and for duplicate names.
pub(super) fn unwritten(tensors: Vec<TensorSpec>) -> Result<Vec<Entry>> {
    let mut names = HashSet::new();
    for spec in &tensors {
        directory::check_writable(&spec.name, spec.dtype, &spec.shape)?;
        if !names.insert(spec.name.as_str()) {
            bail!(Usage, "duplicate tensor '{}'", spec.name);
        }
    }
    Ok(tensors.into_iter().map(Entry::unwritten).collect())
}

/// The header of a file to be written, its features and its network.
pub(super) struct Head {
    /// The text of the header.
    pub header: Vec<u8>,
    pub features: u32,
    arch: Arch,
}

impl Head {
    /// Takes a header with `arch` and any other members, and adds `format`, `version` and `section_hashes`. `loop_masks`:
    /// masks have a row for every loop.
    ///
    /// Errors: `Parse` for a header that opening would refuse; `Usage` for an empty section, and for masks per loop without
    /// masks or loops.
    pub fn new(header: Map<String, Value>, entries: &[Entry], sections: Sections, loop_masks: bool) -> Result<Head> {
        if sections
            .in_order()
            .into_iter()
            .flatten()
            .any(|section| section.is_empty())
        {
            bail!(Usage, "empty sections cannot be written");
        }
        let header = complete(header, sections);
        let typed = Header::from_json(&header)?;
        skills::parse(&typed.skills, &typed.arch)?;
        let loops = typed.arch.num_loops;
        if loop_masks && (sections.masks.is_none() || loops == 1) {
            bail!(
                Usage,
                "masks per loop need a masks section and a looped network; arch.num_loops is {loops}"
            );
        }
        let two_fields = |entry: &Entry| matches!(entry.info.dtype, Dtype::Vbit | Dtype::Q82f | Dtype::VbitRo);
        let features = [
            (TENSOR_DIR, true),
            (BINARY_MASKS, sections.masks.is_some()),
            (QUANT_2F, entries.iter().any(two_fields)),
            (LOOP_MASKS, loop_masks),
            (SKILL_FILE, typed.has_bound_skill()),
            (PRISM_HADAMARD, typed.arch.prism_hadamard.is_some()),
        ];
        // Checks the text as opening will.
        let header = Value::Object(header).to_string().into_bytes();
        json::parse_object(&header, "header")?;
        Ok(Head {
            header,
            features: features.into_iter().filter(|(_, set)| *set).map(|(bit, _)| bit).sum(),
            arch: typed.arch,
        })
    }

    /// Writes the sections after the blob at `data`, then envelope, header and directory before it, and syncs the file.
    /// Returns the length of the file. `path` names the file in errors.
    ///
    /// Errors: `Parse` or `Bounds` for sections that opening would refuse; `Bounds` if there is too little space before the
    /// blob; `Io`.
    pub fn seal(&self, path: &Path, file: &File, entries: &[Entry], data: Span, sections: Sections) -> Result<u64> {
        let shape = MaskShape::of(&self.arch, self.features & LOOP_MASKS != 0);
        if let Some(masks) = sections.masks {
            Masks::parse(masks, shape)?;
        }
        if let Some(index) = sections.index {
            index::parse(index, &self.arch, shape.rows)?;
        }
        let directory = directory::to_bytes(entries);
        let header_end = envelope::LEN + self.header.len() as u64;
        if header_end + directory.len() as u64 > data.off {
            bail!(
                Bounds,
                "header and directory end at {}, the blob starts at {}",
                header_end + directory.len() as u64,
                data.off
            );
        }
        let mut end = data.off + data.len;
        let spans = sections.in_order().map(|section| {
            let span = Span {
                off: end,
                len: section?.len() as u64,
            };
            end += span.len;
            Some(span)
        });
        let envelope = Envelope {
            features: self.features,
            header: Span {
                off: envelope::LEN,
                len: self.header.len() as u64,
            },
            directory: Span {
                off: header_end,
                len: directory.len() as u64,
            },
            data,
            sections: spans.into(),
            header_hash: Some(hash64(&self.header)),
            directory_hash: Some(hash64(&directory)),
        };
        let write = |mut file: &File| {
            file.seek(SeekFrom::Start(data.off + data.len))?;
            for section in sections.in_order().into_iter().flatten() {
                file.write_all(section)?;
            }
            file.seek(SeekFrom::Start(0))?;
            for part in [&envelope.to_bytes()[..], &self.header, &directory] {
                file.write_all(part)?;
            }
            // Without tensors and sections nothing was written after the gap before the blob.
            file.set_len(end)?;
            file.sync_all()
        };
        write(file).map_err(|err| Error::io(path, &err))?;
        Ok(end)
    }
}

/// `header` with the members that every file must have.
fn complete(header: Map<String, Value>, sections: Sections) -> Map<String, Value> {
    let mut complete = Map::new();
    complete.insert("format".into(), "cmf".into());
    complete.insert("version".into(), 2.into());
    let ours = ["format", "version", "section_hashes"];
    complete.extend(header.into_iter().filter(|(key, _)| !ours.contains(&key.as_str())));
    let named = Sections::NAMES.into_iter().zip(sections.in_order());
    let hashes: Map<String, Value> = named
        .filter_map(|(name, bytes)| Some((name.to_owned(), format!("{:016x}", hash64(bytes?)).into())))
        .collect();
    if !hashes.is_empty() {
        complete.insert("section_hashes".into(), hashes.into());
    }
    complete
}

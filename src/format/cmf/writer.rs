//! Writing a model to one file, under a temporary name that is renamed at the end.
//!
//! Header and directory come before the blob but contain checksums of payloads. Their lengths are known from the start, so
//! space is left for them and they are written last.

use super::blob::Blob;
use super::directory::{self, Entry};
use super::envelope::{self, BLOB_ALIGN};
use super::head::{Head, unwritten};
use super::sections::{OwnedSections, Sections};
use crate::error::{Result, bail};
use crate::format::output::{publish, target};
use crate::format::tensor::TensorSpec;
use serde_json::{Map, Value};
use std::path::Path;

/// Writes one file, tensor by tensor. If dropped before [`CmfWriter::finish`], it leaves no file.
pub struct CmfWriter {
    blob: Blob,
    head: Head,
    sections: OwnedSections,
    entries: Vec<Entry>,
    /// How many of `entries` are written.
    written: usize,
}

impl CmfWriter {
    /// Starts a file that replaces any regular file at `path` when finished. A link is kept and its target replaced.
    ///
    /// `header` has `arch` and any other members; `format`, `version` and `section_hashes` are added. `tensors` are all
    /// tensors, in the order in which their payloads will be written.
    ///
    /// Errors: `Parse` for a header that opening would refuse; `Usage` for names or shapes that the directory cannot hold,
    /// duplicate names, and empty sections; `Io`.
    pub fn create(
        path: &Path,
        header: Map<String, Value>,
        tensors: Vec<TensorSpec>,
        sections: Sections,
    ) -> Result<CmfWriter> {
        let entries = unwritten(tensors)?;
        let head = Head::new(header, &entries, sections)?;
        let directory_len = directory::to_bytes(&entries).len() as u64;
        let data_off = (envelope::LEN + head.header.len() as u64 + directory_len).next_multiple_of(BLOB_ALIGN);
        Ok(CmfWriter {
            blob: Blob::create(&target(path)?, data_off)?,
            head,
            sections: OwnedSections::of(sections),
            entries,
            written: 0,
        })
    }

    /// Declares that masks have a row for every loop of every layer, instead of one per layer.
    ///
    /// Errors: `Usage` without masks, or if `arch.num_loops` is 1.
    pub fn with_loop_masks(mut self) -> Result<CmfWriter> {
        self.head.set_loop_masks(self.sections.borrowed())?;
        Ok(self)
    }

    /// Writes the payload of the next tensor.
    ///
    /// Errors: `Usage` if every tensor is written, `Parse` for a length that type and shape do not allow, `Io`.
    pub fn write(&mut self, payload: &[u8]) -> Result<()> {
        self.put(payload, None)
    }

    /// Writes the payload of the next tensor, after checking it against `hash`.
    ///
    /// Errors: as [`CmfWriter::write`]; `HashMismatch`.
    pub fn copy(&mut self, payload: &[u8], hash: u64) -> Result<()> {
        self.put(payload, Some(hash))
    }

    fn put(&mut self, payload: &[u8], stored: Option<u64>) -> Result<()> {
        let count = self.entries.len();
        let Some(entry) = self.entries.get_mut(self.written) else {
            bail!(Usage, "all {count} tensors are already written");
        };
        self.blob.put(entry, payload, stored)?;
        self.written += 1;
        Ok(())
    }

    /// Completes the file and renames it to its path. Returns its length in bytes. After an error no file is left.
    ///
    /// Errors: `Usage` if tensors are missing, `Parse` or `Bounds` for sections that opening would refuse, `Io`.
    pub fn finish(self) -> Result<u64> {
        if let Some(missing) = self.entries.get(self.written) {
            bail!(
                Usage,
                "{} of {} tensors are written, '{}' is next",
                self.written,
                self.entries.len(),
                missing.info.name
            );
        }
        let data = self.blob.data;
        let (path, file) = self.blob.into_file()?;
        let sections = self.sections.borrowed();
        let bytes = self.head.seal(&path, file.as_file(), &self.entries, data, sections)?;
        publish(file.into_temp_path(), &path)?;
        Ok(bytes)
    }
}

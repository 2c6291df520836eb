//! The weight blob of a file that is being written.

use super::directory::{Entry, TENSOR_ALIGN};
use super::envelope::Span;
use crate::error::{Error, Result};
use crate::format::hash::check_hash;
use crate::format::output::temporary_beside;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// A growing blob in a temporary file, with space before it for envelope, header and directory.
pub(super) struct Blob {
    path: PathBuf,
    out: BufWriter<NamedTempFile>,
    /// The blob's position.
    pub data: Span,
}

impl Blob {
    /// Creates a temporary file in the directory of `path`; errors name `path`. Errors: `Io`.
    pub fn create(path: &Path, data_off: u64) -> Result<Blob> {
        let mut out = BufWriter::new(temporary_beside(path)?);
        out.seek(SeekFrom::Start(data_off))
            .map_err(|err| Error::io(path, &err))?;
        Ok(Blob {
            path: path.to_owned(),
            out,
            data: Span { off: data_off, len: 0 },
        })
    }

    /// The bytes of the blob after `payload` more bytes.
    pub fn len_with(&self, payload: u64) -> u64 {
        self.data.len.saturating_add(aligned(payload))
    }

    /// Writes a payload, and stores its position and checksum in `entry`.
    ///
    /// Errors: `Parse` for a length that type and shape do not allow; `HashMismatch` if the payload's checksum is not
    /// `stored`; `Io`.
    pub fn put(&mut self, entry: &mut Entry, payload: &[u8], stored: Option<u64>) -> Result<()> {
        entry.check_length(payload)?;
        let hash = check_hash(format_args!("payload of tensor '{}'", entry.info.name), payload, stored)?;
        let len = payload.len() as u64;
        entry.place(self.data.len, len, hash);
        self.data.len = self.len_with(len);
        let padding = [0; TENSOR_ALIGN as usize];
        let pad = (aligned(len) - len) as usize;
        let io = |err: std::io::Error| Error::io(&self.path, &err);
        self.out.write_all(payload).map_err(io)?;
        self.out.write_all(&padding[..pad]).map_err(io)
    }

    /// The file, after writing buffered bytes. Errors: `Io`.
    pub fn into_file(self) -> Result<NamedTempFile> {
        let file = self.out.into_inner();
        file.map_err(|err| Error::io(&self.path, err.error()))
    }
}

/// The length of a payload with its padding.
pub(super) fn aligned(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(TENSOR_ALIGN).unwrap_or(u64::MAX)
}

//! A memory-mapped file: the only `unsafe` code for file formats.

use crate::error::{Error, Result, bail};
use memmap2::Mmap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// A regular file, mapped read-only as a whole.
///
/// If another process changes the file, the mapped bytes change. If it truncates the file, touching a lost page faults.
/// [`MappedFile::check_length`] reports a truncation as an error, except between the check and the read.
pub(crate) struct MappedFile {
    path: PathBuf,
    file: File,
    /// `None` for an empty file, which cannot be mapped.
    map: Option<Mmap>,
}

impl MappedFile {
    /// Maps `path`. Errors: `Io`, also for directories, pipes and devices, which are not opened; `InvalidMagic` for a git-lfs pointer.
    pub fn open(path: &Path) -> Result<MappedFile> {
        let file = open_regular(path)?;
        let len = file.metadata().map_err(|err| Error::io(path, &err))?.len();
        let map = if len == 0 {
            None
        } else {
            #[expect(unsafe_code, reason = "weights are used in place, without reading the whole file")]
            // SAFETY: the map is read-only and private to this struct. The user guarantees that nobody truncates or
            // rewrites the file while it is mapped; the length is checked again before a tensor is returned.
            let map = unsafe { Mmap::map(&file) }.map_err(|err| Error::io(path, &err))?;
            Some(map)
        };
        let file = MappedFile {
            path: path.to_owned(),
            file,
            map,
        };
        refuse_pointer(path, file.bytes())?;
        Ok(file)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The bytes of the file, as many as it had when it was opened.
    pub fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }

    /// The length in bytes when the file was opened.
    pub fn len(&self) -> u64 {
        self.bytes().len() as u64
    }

    /// Errors: `Io` if the file is now shorter than its map.
    pub fn check_length(&self) -> Result<()> {
        let now = self.file.metadata().map_err(|err| Error::io(&self.path, &err))?.len();
        if now < self.len() {
            let (path, was) = (self.path.display(), self.len());
            bail!(
                Io,
                "{path}: the file was truncated from {was} to {now} bytes while it was open"
            );
        }
        Ok(())
    }

    /// Tells the system that `len` bytes from `offset` are not needed at present.
    pub fn release(&self, offset: usize, len: usize) {
        #[cfg(unix)]
        if let Some(map) = &self.map {
            #[expect(
                unsafe_code,
                reason = "weights that are on a device should not stay in host memory too"
            )]
            // SAFETY: the map is file-backed and never written, so a dropped page is read from the file again when it is
            // touched, and slices into the map stay valid. A refused hint has no effect.
            let _ = unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, offset, len) };
        }
        #[cfg(not(unix))]
        let _ = (offset, len);
    }
}

/// The first bytes of a regular file, at most `most`. Errors: `Io`.
pub(crate) fn read_start(path: &Path, most: u64) -> Result<Vec<u8>> {
    let mut start = Vec::new();
    let read = open_regular(path)?.take(most).read_to_end(&mut start);
    read.map_err(|err| Error::io(path, &err))?;
    Ok(start)
}

/// Errors: `InvalidMagic` for the text that git stores in place of a large file.
pub(crate) fn refuse_pointer(path: &Path, bytes: &[u8]) -> Result<()> {
    if bytes.starts_with(b"version https://git-lfs") {
        bail!(
            InvalidMagic,
            "{}: this is a git-lfs pointer; the file itself was not downloaded (`git lfs pull` fetches it)",
            path.display()
        );
    }
    Ok(())
}

/// Opens a regular file. Errors: `Io`.
fn open_regular(path: &Path) -> Result<File> {
    let io = |err: std::io::Error| Error::io(path, &err);
    // Checked before opening, because opening a pipe blocks until its other end is open.
    regular(path, &std::fs::metadata(path).map_err(io)?)?;
    let file = File::open(path).map_err(io)?;
    regular(path, &file.metadata().map_err(io)?)?;
    Ok(file)
}

fn regular(path: &Path, meta: &std::fs::Metadata) -> Result<()> {
    if !meta.is_file() {
        let what = if meta.is_dir() {
            "a directory"
        } else {
            "a pipe, a device or another special file"
        };
        bail!(Io, "{}: expected a regular file, found {what}", path.display());
    }
    Ok(())
}

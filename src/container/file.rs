//! One mapped file: the only `unsafe` of the container. Knows bytes, not what they mean.

use crate::error::{Error, Kind, Result, bail};
use memmap2::Mmap;
use std::fs::File;
use std::path::{Path, PathBuf};

/// A regular file, mapped whole and read-only.
///
/// A file that another process changes under the map changes what is read; one that is cut short faults when the lost
/// pages are touched. [`MappedFile::check_length`] turns the second into an error, except in the instant between the
/// check and the read.
pub(crate) struct MappedFile {
    path: PathBuf,
    file: File,
    /// `None` for an empty file, which cannot be mapped.
    map: Option<Mmap>,
}

impl MappedFile {
    /// Maps `path`. Errors: `Io`; also for a directory, a pipe or a device, which are never opened.
    pub fn open(path: &Path) -> Result<MappedFile> {
        // Before opening: opening a pipe waits for its other end.
        regular(path, &std::fs::metadata(path).map_err(|err| Error::io(path, &err))?)?;
        let file = File::open(path).map_err(|err| Error::io(path, &err))?;
        let meta = file.metadata().map_err(|err| Error::io(path, &err))?;
        regular(path, &meta)?;
        let map = if meta.len() == 0 {
            None
        } else {
            #[expect(unsafe_code, reason = "a model is used where it lies, without reading it whole")]
            // SAFETY: the map is read-only and private to this struct. That nobody cuts or rewrites the file meanwhile is
            // the user's promise; every length is checked again before a tensor is handed out.
            let map = unsafe { Mmap::map(&file) }.map_err(|err| Error::io(path, &err))?;
            Some(map)
        };
        Ok(MappedFile {
            path: path.to_owned(),
            file,
            map,
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The bytes of the file as it was when it was opened.
    pub fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }

    /// Length in bytes when the file was opened.
    pub fn len(&self) -> u64 {
        self.bytes().len() as u64
    }

    /// Refuses to go on with a file that is shorter than its map.
    pub fn check_length(&self) -> Result<()> {
        let now = self.file.metadata().map_err(|err| Error::io(&self.path, &err))?.len();
        if now < self.len() {
            let (path, was) = (self.path.display(), self.len());
            bail!(
                Io,
                "{path}: the file was cut from {was} to {now} bytes while it was open"
            );
        }
        Ok(())
    }

    /// Tells the system that `len` bytes from `offset` are not needed for now.
    pub fn release(&self, offset: usize, len: usize) {
        #[cfg(unix)]
        if let Some(map) = &self.map {
            #[expect(unsafe_code, reason = "weights already on a device should not stay in memory twice")]
            // SAFETY: the map is file-backed and never written, so a dropped page is read again from the file when it is
            // touched; slices into it stay valid. A hint that the system refuses changes nothing.
            let _ = unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, offset, len) };
        }
        #[cfg(not(unix))]
        let _ = (offset, len);
    }
}

fn regular(path: &Path, meta: &std::fs::Metadata) -> Result<()> {
    if !meta.is_file() {
        let what = if meta.is_dir() {
            "a directory"
        } else {
            "a pipe, a device or another special file"
        };
        return Err(Error::new(
            Kind::Io,
            format!("{}: wanted a regular file, found {what}", path.display()),
        ));
    }
    Ok(())
}

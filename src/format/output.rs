//! Output files: written under a temporary name beside the target, renamed when complete.

use crate::error::{Error, Result, bail};
use std::path::{Path, PathBuf};
use tempfile::{NamedTempFile, TempPath};

/// Renames a complete file to `path`, replacing a regular file. Errors: `Io`.
pub(crate) fn publish(file: TempPath, path: &Path) -> Result<()> {
    file.persist(path).map_err(|err| Error::io(path, &err.error))?;
    sync_directory(path)
}

/// The path to write an output to: the target of a link, so that the link itself is kept.
///
/// Errors: `Io` for a dangling link.
pub fn target(path: &Path) -> Result<PathBuf> {
    if !std::fs::symlink_metadata(path).is_ok_and(|meta| meta.is_symlink()) {
        return Ok(path.to_owned());
    }
    path.canonicalize()
        .map_err(|err| Error::io(path, &err).context("the output is a dangling link"))
}

/// A temporary file in the directory of `path`, from where renaming is atomic. It is removed when dropped.
///
/// Errors: `Usage` for a path without a file name; `Io`, also if `path` exists and is not a regular file.
pub fn temporary_beside(path: &Path) -> Result<NamedTempFile> {
    if path.file_name().is_none() {
        bail!(Usage, "{}: expected the path of a file", path.display());
    }
    // A rename would replace a device, or fail late on a directory.
    if std::fs::metadata(path).is_ok_and(|meta| !meta.is_file()) {
        bail!(Io, "{}: exists and is not a regular file", path.display());
    }
    let directory = parent(path);
    if !directory.is_dir() {
        bail!(Io, "{}: there is no directory {}", path.display(), directory.display());
    }
    let mut builder = tempfile::Builder::new();
    builder.prefix(".cmf-").suffix(".partial");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // The usual mode of new files; the umask applies.
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    // Errors name `path`, not the temporary file.
    let failed = |err: std::io::Error| Error::io(path, &err.kind().into());
    builder.tempfile_in(directory).map_err(failed)
}

/// Errors: `Usage` if `out` and `input` are the same file, under any names.
pub fn not_the_output(input: &Path, out: &Path) -> Result<()> {
    let same = out
        .canonicalize()
        .ok()
        .is_some_and(|out| input.canonicalize().is_ok_and(|input| input == out));
    if same {
        bail!(Usage, "{}: the output would replace an input", out.display());
    }
    Ok(())
}

fn parent(path: &Path) -> &Path {
    path.parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

/// Makes the rename durable.
fn sync_directory(path: &Path) -> Result<()> {
    #[cfg(unix)]
    std::fs::File::open(parent(path))
        .and_then(|dir| dir.sync_all())
        .map_err(|err| Error::io(path, &err))?;
    #[cfg(not(unix))]
    let _ = path;
    Ok(())
}

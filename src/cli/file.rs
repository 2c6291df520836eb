//! Files besides the model: texts to read, and outputs that get their name when they are complete.

use super::context::{Result, usage};
use super::output::size;
use cmf_gpu::format::{not_the_output, target, temporary_beside};
use cmf_gpu::{Error, Kind};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Most bytes of a text file.
const MAX_TEXT: u64 = 64 << 20;

/// A text file, `-` for stdin. Errors: `Io`; `Parse` when it is not UTF-8; `Usage` when it is too long.
pub fn read_text(path: &Path) -> Result<String> {
    if path == Path::new("-") {
        return read_stream(std::io::stdin().lock(), Path::new("stdin"));
    }
    let file = File::open(path).map_err(|err| Error::io(path, &err))?;
    read_stream(file, path)
}

fn read_stream(stream: impl Read, path: &Path) -> Result<String> {
    let mut bytes = Vec::new();
    let read = stream.take(MAX_TEXT + 1).read_to_end(&mut bytes);
    read.map_err(|err| Error::io(path, &err))?;
    let shown = path.display();
    if bytes.len() as u64 > MAX_TEXT {
        return Err(usage(format!("{shown}: longer than {}", size(MAX_TEXT))));
    }
    String::from_utf8(bytes).map_err(|err| {
        let at = err.utf8_error().valid_up_to();
        Error::new(Kind::Parse, format!("{shown}: not UTF-8 at byte {at}"))
    })
}

/// A file to write. It has a temporary name until it is complete.
pub struct OutFile {
    path: PathBuf,
    to: NamedTempFile,
}

impl OutFile {
    /// Errors: `Usage` when `path` is one of `inputs`; `Io`.
    pub fn create<'a>(path: &Path, mut inputs: impl Iterator<Item = &'a Path>) -> Result<OutFile> {
        inputs.try_for_each(|input| not_the_output(input, path))?;
        let path = target(path)?;
        let to = temporary_beside(&path)?;
        Ok(OutFile { path, to })
    }

    /// Calls `write` with the temporary name and renames the file. Errors: those of `write`, as `Io`.
    pub fn write<E: std::fmt::Display>(self, write: impl FnOnce(&Path) -> Result<(), E>) -> Result<()> {
        let OutFile { path, to } = self;
        let io = |err: std::io::Error| Error::io(&path, &err);
        let permissions = to.as_file().metadata().map_err(io)?.permissions();
        write(to.path()).map_err(|err| Error::new(Kind::Io, format!("{}: {err}", path.display())))?;
        // Some writers replace the file, and its permissions with it.
        let written = File::options().write(true).open(to.path()).map_err(io)?;
        written.set_permissions(permissions).map_err(io)?;
        written.sync_all().map_err(io)?;
        to.persist(&path).map(drop).map_err(|err| Error::io(&path, &err.error))
    }
}

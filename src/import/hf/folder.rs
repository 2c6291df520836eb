//! The files of a Hugging Face model: the directory, and the small files beside the weights.

use crate::error::{Error, Kind, Result, bail};
use crate::format::{json, refuse_pointer};
use serde_json::{Map, Value};
use std::path::PathBuf;

/// Larger configuration files than this are refused.
pub const MAX_BYTES: u64 = 64 << 20;

/// Small files by name.
pub trait Files {
    /// The bytes of a file, `None` if it does not exist. Errors: `Io`, also for a file that is too large.
    fn bytes(&self, name: &str) -> Result<Option<Vec<u8>>>;

    /// The text of a file, `None` if it does not exist. Errors: `Io`, `Parse` when it is not UTF-8.
    fn text(&self, name: &str) -> Result<Option<String>> {
        let text = self.bytes(name)?.map(String::from_utf8).transpose();
        text.map_err(|_| Error::new(Kind::Parse, format!("{name} is not UTF-8")))
    }

    /// The JSON object in a file, `None` if it does not exist. Python's `NaN` and `Infinity` become null. Errors: `Io`, `Parse`.
    fn json(&self, name: &str) -> Result<Option<Map<String, Value>>> {
        self.bytes(name)?
            .map(|bytes| json::parse_object(&without_special_floats(bytes), name))
            .transpose()
    }
}

/// Replaces `NaN`, `Infinity` and `-Infinity` outside of strings by null: Python writes them, JSON does not have them.
fn without_special_floats(bytes: Vec<u8>) -> Vec<u8> {
    const SPECIAL: [&[u8]; 3] = [b"NaN", b"-Infinity", b"Infinity"];
    if !SPECIAL
        .iter()
        .any(|&word| bytes.windows(word.len()).any(|window| window == word))
    {
        return bytes;
    }
    let (mut out, mut quoted, mut rest) = (Vec::with_capacity(bytes.len()), false, bytes.as_slice());
    while let Some((&first, after)) = rest.split_first() {
        let special = SPECIAL.iter().find(|&&word| !quoted && rest.starts_with(word));
        // A backslash in a string keeps the next byte from ending it.
        let taken = match (first, special) {
            (b'\\', _) if quoted => rest.len().min(2),
            (_, Some(word)) => word.len(),
            _ => 1,
        };
        match special {
            Some(_) => out.extend(b"null"),
            None => out.extend(&rest[..taken]),
        }
        quoted ^= first == b'"';
        rest = if taken == 1 { after } else { &rest[taken..] };
    }
    out
}

/// The directory of a model.
pub struct Folder(pub PathBuf);

impl Folder {
    /// The path of a file of the directory. A link may lead to another file of the directory, or, in a cache of a hub, from
    /// `snapshots/REVISION` to `blobs`; not to other directories, because whoever made the directory chose the link.
    ///
    /// Errors: `Io` for a link that leads elsewhere.
    pub fn path(&self, name: &str) -> Result<PathBuf> {
        let path = self.0.join(name);
        let is_link = path.symlink_metadata().is_ok_and(|meta| meta.is_symlink());
        // A link to a missing file is reported when the file is opened.
        let (true, Ok(target), Ok(folder)) = (is_link, path.canonicalize(), self.0.canonicalize()) else {
            return Ok(path);
        };
        let snapshots = folder.parent().filter(|parent| parent.ends_with("snapshots"));
        let blobs = snapshots.and_then(|snapshots| Some(snapshots.parent()?.join("blobs")));
        if !target.starts_with(&folder) && !blobs.is_some_and(|blobs| target.starts_with(blobs)) {
            bail!(
                Io,
                "{}: expected a file of the directory, found a link to {}",
                path.display(),
                target.display()
            );
        }
        Ok(path)
    }
}

impl Files for Folder {
    fn bytes(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let path = self.path(name)?;
        match std::fs::metadata(&path) {
            Ok(meta) if meta.is_file() && meta.len() <= MAX_BYTES => {}
            Ok(meta) => bail!(
                Io,
                "{}: expected a file of at most {MAX_BYTES} bytes, found {}",
                path.display(),
                meta.len()
            ),
            Err(err) if err.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(err) => return Err(Error::io(&path, &err)),
        }
        let bytes = std::fs::read(&path).map_err(|err| Error::io(&path, &err))?;
        refuse_pointer(&path, &bytes)?;
        Ok(Some(bytes))
    }
}

//! The small files beside the weights of a Hugging Face model, in a directory or inside another file.

use crate::error::{Error, Kind, Result, bail};
use crate::format::json;
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

    /// The JSON object in a file, `None` if it does not exist. Errors: `Io`, `Parse`.
    fn json(&self, name: &str) -> Result<Option<Map<String, Value>>> {
        self.bytes(name)?
            .map(|bytes| json::parse_object(&bytes, name))
            .transpose()
    }
}

/// The directory of a model.
pub struct Folder(pub PathBuf);

impl Files for Folder {
    fn bytes(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let path = self.0.join(name);
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
        std::fs::read(&path).map(Some).map_err(|err| Error::io(&path, &err))
    }
}

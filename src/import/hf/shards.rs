//! The safetensors files of a folder: one, or several with an index.

use super::folder::{Files, Folder};
use crate::error::{Result, bail};
use crate::format::{MappedFile, safetensors};
use serde_json::Value;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::Arc;

/// One file of weights.
pub struct Shard {
    pub file: Arc<MappedFile>,
    pub tensors: Vec<safetensors::Tensor>,
}

impl Shard {
    /// Errors: those of the file and of [`safetensors::parse`].
    pub fn open(path: &Path) -> Result<Shard> {
        let file = MappedFile::open(path)?;
        let tensors = safetensors::parse(file.bytes()).map_err(|err| err.context(path.display()))?;
        Ok(Shard {
            file: Arc::new(file),
            tensors,
        })
    }
}

/// The weights in a folder: `{name}.safetensors`, else the files that `{name}.safetensors.index.json` lists.
///
/// Errors: `Io` when there is neither; `Parse` and `ShardMismatch` for an index that does not fit; those of the files.
pub fn open(folder: &Folder, name: &str) -> Result<Vec<Shard>> {
    let file = format!("{name}.safetensors");
    let single = folder.path(&file)?;
    if single.exists() {
        return Ok(vec![Shard::open(&single)?]);
    }
    let listed = format!("{file}.index.json");
    let Some(index) = folder.json(&listed)? else {
        let pickle = folder.0.join("pytorch_model.bin").exists();
        let hint = if pickle {
            "; pickled weights (.bin) are never read, convert them to safetensors"
        } else {
            ""
        };
        bail!(Io, "{}: there is neither {file} nor {listed}{hint}", folder.0.display());
    };
    let Some(Value::Object(map)) = index.get("weight_map") else {
        bail!(Parse, "{listed}: 'weight_map' is missing or not an object");
    };
    let mut wanted: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (name, file) in map {
        // A plain file name: an index must not reach out of its directory.
        let plain = |file: &&str| Path::new(file).file_name().is_some_and(|name| name == *file);
        let Some(file) = file.as_str().filter(plain) else {
            bail!(
                Parse,
                "{listed}: tensor '{name}' is in {file}, expected the name of a file in the same directory"
            );
        };
        wanted.entry(file).or_default().push(name);
    }
    let mut shards = Vec::new();
    for (file, names) in wanted {
        let path = folder.path(file)?;
        if !path.exists() {
            bail!(
                ShardMismatch,
                "{}: the file is in the index, and it is missing",
                path.display()
            );
        }
        let shard = Shard::open(&path)?;
        let present: HashSet<&str> = shard.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        if let Some(name) = names.iter().find(|name| !present.contains(*name)) {
            bail!(
                ShardMismatch,
                "{}: by the index tensor '{name}' is in this file, and it is not",
                path.display()
            );
        }
        shards.push(shard);
    }
    Ok(shards)
}

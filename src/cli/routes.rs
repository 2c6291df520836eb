//! The file of `--route-stats`: how often each expert was chosen.

use cmf_gpu::format::{not_the_output, target, temporary_beside};
use cmf_gpu::{Error, Result};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// A file that is written after the answer: `{"layers": {"3": [counts]}}`.
pub struct RouteFile {
    path: PathBuf,
    to: NamedTempFile,
}

impl RouteFile {
    /// Opens a temporary file next to `path`. Errors: `Usage` when `path` is a file of the model or the prompt; `Io`.
    pub fn create(path: &Path, model: &[PathBuf], prompt: Option<&Path>) -> Result<RouteFile> {
        let mut inputs = model.iter().map(PathBuf::as_path).chain(prompt);
        inputs.try_for_each(|input| not_the_output(input, path))?;
        let path = target(path)?;
        let to = temporary_beside(&path)?;
        Ok(RouteFile { path, to })
    }

    /// Writes the counts and renames the file. Errors: `Io`.
    pub fn write(mut self, counts: &BTreeMap<usize, Vec<u32>>) -> Result<()> {
        let layers: Map<String, Value> = counts
            .iter()
            .map(|(layer, counts)| (layer.to_string(), json!(counts)))
            .collect();
        let text = json!({ "layers": layers }).to_string();
        self.to
            .write_all(text.as_bytes())
            .map_err(|err| Error::io(&self.path, &err))?;
        let persisted = self.to.persist(&self.path);
        persisted.map(drop).map_err(|err| Error::io(&self.path, &err.error))
    }
}

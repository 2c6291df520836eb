//! Verification of a model, whatever the format of its files.

use super::model::ModelSource;
use crate::error::{Error, Result};
use crate::format::TensorId;
use crate::format::cmf::{Failure, VerifyReport, check_weights};

impl ModelSource {
    /// Bytes of all files. Errors: `Io`.
    pub fn file_bytes(&self) -> Result<u64> {
        let length = |path: &std::path::PathBuf| match std::fs::metadata(path) {
            Ok(meta) => Ok(meta.len()),
            Err(err) => Err(Error::io(path, &err)),
        };
        self.files.iter().map(length).sum()
    }

    /// Checks everything that the files allow: checksums, if they have any, the structure of every payload, and that every
    /// scale and every weight is finite.
    ///
    /// `progress` is called with the weight bytes checked so far and their total. Errors: `Io` for files that are gone.
    pub fn verify(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<VerifyReport> {
        if let Some(container) = &self.cmf {
            return Ok(container.verify(progress));
        }
        let infos = self.tensors.infos();
        let (mut done, total) = (0, infos.iter().map(|info| info.nbytes).sum());
        let mut failures = Vec::new();
        for (id, info) in infos.iter().enumerate() {
            if let Err(error) = self.check(id) {
                failures.push(Failure {
                    subject: info.name.clone(),
                    error: error.context(format_args!("tensor '{}'", info.name)),
                });
            }
            self.tensors.release(id);
            done += info.nbytes;
            progress(done, total);
        }
        Ok(VerifyReport {
            tensors: infos.len(),
            bytes: self.file_bytes()?,
            failures,
            notes: vec![format!(
                "{} files have no checksums: structure, scales and weights were checked",
                self.format
            )],
        })
    }

    fn check(&self, id: TensorId) -> Result<()> {
        let stored = self.tensors.stored(id)?;
        // The order of rows does not matter here, but a row number in a message is that of the file.
        check_weights(stored.info, &stored.bytes)
    }
}

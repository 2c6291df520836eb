//! The files that `imagine` writes.

use super::args::{Args, Outputs};
use super::{latents, png};
use crate::cli::context::Result;
use crate::cli::file::OutFile;
use cmf_gpu::image::{Image, Latents};
use cmf_gpu::source::ModelSource;
use std::path::{Path, PathBuf};

/// Where everything goes, and the files that must not be replaced.
pub struct Files {
    pub outputs: Outputs,
    inputs: Vec<PathBuf>,
}

impl Files {
    /// The files, after a check that each can be written. Errors: `Usage` for an output that is an input; `Io`.
    pub fn checked(args: &Args, source: &ModelSource) -> Result<Files> {
        let files = Files {
            outputs: args.outputs()?,
            inputs: source.files.iter().chain(&args.init_latents).cloned().collect(),
        };
        // Dropping a file removes it.
        files.outputs.all().try_for_each(|path| files.create(path).map(drop))?;
        Ok(files)
    }

    fn create(&self, path: &Path) -> Result<OutFile> {
        OutFile::create(path, self.inputs.iter().map(PathBuf::as_path))
    }

    /// Writes a picture. Errors: `Io`.
    pub fn picture(&self, path: &Path, image: &Image, settings: Option<&str>) -> Result<()> {
        self.create(path)?
            .write(|temporary| png::write(temporary, image, settings))
    }

    /// Writes latents. Errors: `Io`.
    pub fn latents(&self, path: &Path, latents: &Latents) -> Result<()> {
        self.create(path)?.write(|temporary| latents::write(temporary, latents))
    }
}

//! Sources that are pipelines: several networks in one file, which make something else than text.

use super::model::ModelSource;
use crate::error::{Result, bail};
use crate::format::pipeline::{self, LUMINA2};

impl ModelSource {
    /// The kind of pipeline, as `arch.arch_name` states it; `None` for a language model.
    pub fn pipeline(&self) -> Option<&str> {
        let name = self.arch.arch_name.as_str();
        let infos = self.tensors.infos();
        let is_pipeline =
            pipeline::is_known(name) || infos.iter().any(|info| info.name.starts_with(pipeline::DENOISER));
        is_pipeline.then_some(name)
    }

    /// Errors: `UnsupportedModel` for a pipeline.
    pub fn require_language(&self) -> Result<()> {
        match self.pipeline() {
            None => Ok(()),
            Some(LUMINA2) => bail!(
                UnsupportedModel,
                "'{LUMINA2}' is a text-to-image pipeline, and this needs a language model"
            ),
            Some(other) => bail!(
                UnsupportedModel,
                "'{other}' is a pipeline that cannot be run; it can be inspected and verified"
            ),
        }
    }

    /// Errors: `UnsupportedModel` for anything but a text-to-image pipeline.
    pub fn require_image(&self) -> Result<()> {
        match self.pipeline() {
            Some(LUMINA2) => Ok(()),
            Some(other) => bail!(
                UnsupportedModel,
                "'{other}' is a pipeline that cannot be run; it can be inspected and verified"
            ),
            None => bail!(
                UnsupportedModel,
                "'{}' is a language model, and this needs a text-to-image pipeline",
                self.arch.arch_name
            ),
        }
    }
}

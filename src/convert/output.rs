//! The file or the files that a conversion writes.

use super::options::Target;
use crate::error::Result;
use crate::format::cmf::{CmfWriter, Sections};
use crate::format::{TensorSpec, not_the_output};
use serde_json::{Map, Value};
use std::path::Path;

impl Target<'_> {
    /// The same target, after a check that it replaces none of the files that are read. Errors: `Usage` if it would.
    pub(super) fn keeping<'f>(self, files: impl Iterator<Item = &'f Path>) -> Result<Self> {
        Ok(match self {
            Target::One(out) => {
                files.into_iter().try_for_each(|file| not_the_output(file, out))?;
                Target::One(out)
            }
            Target::Several(mut split) => {
                split.inputs.extend(files.map(Path::to_owned));
                Target::Several(split)
            }
        })
    }

    /// Starts to write the target. Errors: those of [`CmfWriter`].
    pub(super) fn create(
        self,
        header: Map<String, Value>,
        specs: Vec<TensorSpec>,
        sections: Sections,
        by_pass: bool,
    ) -> Result<CmfWriter> {
        let writer = match self {
            Target::One(out) => CmfWriter::create(out, header, specs, sections)?,
            Target::Several(split) => {
                let sized = |spec: TensorSpec| {
                    let size = spec.dtype.size(&spec.shape)?;
                    Ok((spec, size))
                };
                let tensors = specs.into_iter().map(sized).collect::<Result<_>>()?;
                CmfWriter::split(split, header, tensors, sections)?
            }
        };
        if by_pass { writer.with_loop_masks() } else { Ok(writer) }
    }
}

//! The file or the files that a conversion writes.

use super::options::Target;
use crate::error::Result;
use crate::format::cmf::{CmfWriter, Sections, SplitFiles, SplitWriter};
use crate::format::{TensorSpec, not_the_output};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

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
}

/// Takes payloads in order.
pub(super) enum Output {
    One(PathBuf, Box<CmfWriter>),
    Several(Box<SplitWriter>),
}

impl Output {
    /// Errors: those of both writers.
    pub fn create(
        target: Target,
        header: Map<String, Value>,
        specs: Vec<TensorSpec>,
        sections: Sections,
        by_pass: bool,
    ) -> Result<Output> {
        Ok(match target {
            Target::One(out) => {
                let mut writer = CmfWriter::create(out, header, specs, sections)?;
                if by_pass {
                    writer = writer.with_loop_masks()?;
                }
                Output::One(out.to_owned(), Box::new(writer))
            }
            Target::Several(split) => {
                let sized = |spec: TensorSpec| {
                    let size = spec.dtype.size(&spec.shape)?;
                    Ok((spec, size))
                };
                let tensors = specs.into_iter().map(sized).collect::<Result<_>>()?;
                let writer = SplitWriter::create(split, header, tensors, sections, by_pass)?;
                Output::Several(Box::new(writer))
            }
        })
    }

    pub fn write(&mut self, payload: &[u8]) -> Result<()> {
        match self {
            Output::One(_, writer) => writer.write(payload),
            Output::Several(writer) => writer.write(payload, None),
        }
    }

    pub fn finish(self) -> Result<SplitFiles> {
        match self {
            Output::One(path, writer) => Ok(SplitFiles {
                bytes: writer.finish()?,
                paths: vec![path],
                larger: 0,
            }),
            Output::Several(writer) => writer.finish(),
        }
    }
}

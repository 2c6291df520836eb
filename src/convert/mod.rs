//! Conversion to containers, from Hugging Face and diffusers directories, GGUF and `.ninfer` files, and containers with other
//! types; and of ternary models between GGUF and `.ninfer` files.
//!
//! Every source is a `Model`: a header, and tensors as matrices that can be read row by row. The rest is the same for all
//! sources: every tensor gets a type, is encoded from the mapped file and written. Only the tensor in hand is in memory. Nothing
//! here knows a device.

mod bits;
mod keep;
mod loss;
mod model;
mod names;
mod options;
mod output;
mod pipeline;
mod plan;
mod quantised;
mod requant;
mod rotation;
mod router_stats;
mod ternary;
mod write;

use crate::error::{Error, Result};
use crate::format::cmf::WrittenFiles;
use crate::import::{self, Format};
use model::Model;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

pub use loss::{Group, Share};
pub use options::{Event, Options, Report, Target};
pub use quantised::quantised;
pub use router_stats::RouterStats;
pub use ternary::{Exchange, exchange};

/// Converts the model at `src` to the container `out`, which is written under another name and renamed at the end.
/// `progress` may end it; then no file is left.
///
/// `src` is a Hugging Face directory, the diffusers directory of a pipeline, a `.safetensors` file beside its `config.json`, a GGUF
/// file (any part of a split one), a `.ninfer` file or a container.
///
/// Errors: `UnsupportedModel` names the architecture, the configuration key or the tensor that is not supported, and with
/// [`Options::strict`] a tensor that would be left out; `UnsupportedTensorType` names the type that cannot be read, or the
/// tensor whose values do not fit its type; `MissingTensor` names the tensors that the source lacks; `Usage` when `out` is an
/// input, an override matches no name, or options about vbit affect no tensor; `Io`, `Parse`, `Bounds`, `HashMismatch` and
/// those of the container for damaged files.
pub fn convert(
    src: &Path,
    out: &Path,
    options: &Options,
    progress: &mut dyn FnMut(Event) -> ControlFlow<()>,
) -> Result<Report> {
    convert_to(src, Target::One(out), options, progress).map(|(report, _)| report)
}

/// Converts as [`convert`] does, to one file or to several. Also returns the files.
///
/// Errors: those of [`convert`], and of [`CmfWriter`](crate::format::cmf::CmfWriter).
pub fn convert_to(
    src: &Path,
    target: Target,
    options: &Options,
    progress: &mut dyn FnMut(Event) -> ControlFlow<()>,
) -> Result<(Report, WrittenFiles)> {
    let model = match Format::of(src)? {
        Format::HuggingFace => Model::imported(import::hugging_face(src)?)?,
        Format::Gguf => Model::imported(import::gguf(src)?)?,
        Format::Ninfer => Model::imported(import::ninfer(src)?)?,
        Format::Cmf => requant::open(src)?,
    };
    let files = model.files.iter().cloned().chain(described_by(src)?);
    let files: Vec<PathBuf> = files.collect();
    let target = target.keeping(files.iter().map(PathBuf::as_path))?;
    write::write(model, src, target, options, progress)
}

/// The files of a directory, and of the folders in it, that describe its model beside the weights: configuration, tokenizer,
/// template. Errors: `Io`.
fn described_by(src: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    if src.is_dir() {
        for path in entries(src)? {
            match path.is_dir() {
                true => files.append(&mut entries(&path)?),
                false => files.push(path),
            }
        }
        files.retain(|path| path.extension().is_some_and(|kind| kind == "json" || kind == "jinja"));
    }
    Ok(files)
}

/// What is in a directory. Errors: `Io`.
fn entries(dir: &Path) -> Result<Vec<PathBuf>> {
    let io = |err: std::io::Error| Error::io(dir, &err);
    let entries = std::fs::read_dir(dir).map_err(io)?;
    entries.map(|entry| Ok(entry.map_err(io)?.path())).collect()
}

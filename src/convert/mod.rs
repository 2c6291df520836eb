//! Conversion to containers, from Hugging Face directories, GGUF files, and containers with other types.
//!
//! An importer describes its source as a `Model`: a header, and tensors as matrices that can be read row by row. The rest is
//! the same for all sources: every tensor gets a type, is encoded from the mapped file and written. Only the tensor in hand is
//! in memory. Nothing here knows a device.

mod arch;
mod bind;
mod bits;
mod experts;
mod family;
mod gguf;
mod hf;
mod import;
mod loss;
mod matrix;
mod model;
mod names;
mod options;
mod order;
mod output;
mod plan;
mod requant;
mod roles;
mod rope;
mod router_stats;
mod tokenizer;
mod write;

use crate::error::{Result, bail};
use crate::format::cmf::WrittenFiles;
use crate::format::read_start;
use std::ops::ControlFlow;
use std::path::Path;

pub use loss::Group;
pub use options::{Event, Options, Report, Target};
pub use router_stats::RouterStats;

/// Converts the model at `src` to the container `out`, which is written under another name and renamed at the end.
/// `progress` may end it; then no file is left.
///
/// `src` is a Hugging Face directory, a `.safetensors` file beside its `config.json`, a GGUF file (any part of a split one) or a
/// container.
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
    match kind_of(src)? {
        SourceKind::HuggingFace => {
            let source = hf::Source::open(src)?;
            let target = target.keeping(source.files())?;
            write::write(source.model()?, src, target, options, progress)
        }
        SourceKind::Gguf => {
            let source = gguf::Source::open(src)?;
            let target = target.keeping(source.files())?;
            write::write(source.model()?, src, target, options, progress)
        }
        SourceKind::Container => {
            let source = requant::Source::open(src)?;
            let target = target.keeping(source.files())?;
            write::write(source.model()?, src, target, options, progress)
        }
    }
}

enum SourceKind {
    HuggingFace,
    Gguf,
    Container,
}

/// Tells the formats apart by the first bytes of the file, and by its name only if the format has no magic number.
fn kind_of(src: &Path) -> Result<SourceKind> {
    if src.is_dir() {
        return Ok(SourceKind::HuggingFace);
    }
    let start = read_start(src, 8)?;
    if start.starts_with(&crate::format::gguf::MAGIC) {
        return Ok(SourceKind::Gguf);
    }
    if start.starts_with(b"CMF") {
        return Ok(SourceKind::Container);
    }
    let extension = src.extension().unwrap_or_default();
    if extension.eq_ignore_ascii_case("safetensors") {
        return Ok(SourceKind::HuggingFace);
    }
    let shown = src.display();
    if start.starts_with(b"PK\x03\x04") || start.starts_with(b"\x80\x02") {
        bail!(
            InvalidMagic,
            "{shown}: pickled weights are never read, convert them to safetensors"
        );
    }
    bail!(
        InvalidMagic,
        "{shown}: expected a directory, a .safetensors, a GGUF or a CMF file, found bytes {start:02x?}"
    );
}

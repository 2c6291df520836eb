//! Models that were trained elsewhere, as GGUF files, `.ninfer` files and Hugging Face directories have them: found, checked, and
//! described under the container's names.
//!
//! [`gguf`], [`ninfer`] and [`hugging_face`] return a [`Model`]: the network, and tensors whose values are read from the mapped
//! files. What a file stores in another order or form than the container is described, not copied. The same tables say where
//! files of ternary models that are written have the tensors.

mod added;
mod arch;
mod bind;
mod diffusers;
mod experts;
mod family;
mod form;
mod gathered;
mod gguf;
mod hf;
mod matrix;
mod model;
mod ninfer;
mod roles;
mod rope;
mod stacked;
mod tokenizer;

pub use hf::keys::Keys;
pub use hf::text_encoder;
pub use model::{Model, Tensor};
#[cfg(feature = "tools")]
pub use {
    form::Applied,
    gguf::{Place, architecture, place},
    matrix::{Matrix, Reader},
    ninfer::{FRONTEND, Layout, Rows, SIGNS, WIDTHS, known, layout},
    roles::{EMBED, LAYER_PREFIX, LM_HEAD, MTP_PREFIX, is_recurrent_gate, is_router},
    rope::yarn_attention,
    stacked::StackedProjections,
    tokenizer::describe,
};

use crate::error::{Error, Result, bail};
use crate::format::{read_start, refuse_pointer};
use std::path::Path;

/// The formats of models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// A directory with safetensors files, of one network or of a pipeline, or one such file beside its configuration.
    HuggingFace,
    /// A GGUF file.
    Gguf,
    /// A `.ninfer` file.
    Ninfer,
    /// A CMF container.
    Cmf,
}

impl Format {
    /// Tells the formats apart by the first bytes of the file, and by its name only if the format has no magic number.
    ///
    /// Errors: `InvalidMagic` for a file of no such format; `Io`.
    pub fn of(path: &Path) -> Result<Format> {
        let meta = std::fs::metadata(path).map_err(|err| Error::io(path, &err))?;
        if meta.is_dir() {
            return Ok(Format::HuggingFace);
        }
        let shown = path.display();
        if !meta.is_file() {
            bail!(Io, "{shown}: expected a file or a directory, found a special file");
        }
        let start = read_start(path, 64)?;
        refuse_pointer(path, &start)?;
        if start.starts_with(&crate::format::gguf::MAGIC) {
            return Ok(Format::Gguf);
        }
        if start.starts_with(&crate::format::ninfer::MAGIC) {
            return Ok(Format::Ninfer);
        }
        if start.starts_with(b"CMF") {
            return Ok(Format::Cmf);
        }
        if path
            .extension()
            .is_some_and(|extension| extension.eq_ignore_ascii_case("safetensors"))
        {
            return Ok(Format::HuggingFace);
        }
        if start.starts_with(b"PK\x03\x04") || start.starts_with(b"\x80\x02") {
            bail!(
                InvalidMagic,
                "{shown}: pickled weights are never read, convert them to safetensors"
            );
        }
        bail!(
            InvalidMagic,
            "{shown}: expected a directory, a .safetensors, a GGUF, a .ninfer or a CMF file, found bytes {:02x?}",
            start.get(..8).unwrap_or(&start)
        );
    }
}

/// The model in a GGUF file (any part of a split one). Reads no weights.
///
/// Errors: `UnsupportedModel` names the architecture, the configuration key or the tensor that is not supported;
/// `UnsupportedTensorType` the type that cannot be read; `MissingTensor` the tensors that the files lack; `Tokenizer`;
/// `ShardMismatch`, `Io`, `Parse` and `Bounds` for damaged files.
pub fn gguf(path: &Path) -> Result<Model> {
    gguf::Source::open(path)?.model().map_err(|err| at(path, err))
}

/// The model in a `.ninfer` file. Reads no weights.
///
/// Errors: as [`gguf`], and `UnsupportedFeature` for rotations of weights that are not defined.
pub fn ninfer(path: &Path) -> Result<Model> {
    ninfer::Source::open(path)?.model().map_err(|err| at(path, err))
}

/// The model in a Hugging Face directory, the pipeline in a diffusers directory, or the model in one safetensors file beside
/// its configuration. Reads no weights.
///
/// Errors: as [`gguf`].
pub fn hugging_face(path: &Path) -> Result<Model> {
    let model = match diffusers::is_pipeline(path) {
        true => diffusers::read(path),
        false => hf::Source::open(path)?.model(),
    };
    model.map_err(|err| at(path, err))
}

/// The error with the path of the model in front, if it does not begin with it.
fn at(path: &Path, err: Error) -> Error {
    let shown = path.display().to_string();
    match err.message.starts_with(&shown) {
        true => err,
        false => err.context(shown),
    }
}

//! File formats of models: parsing, validation and writing. Bytes are checked before anything is used.
//!
//! `cmf` is the format this program writes; GGUF, `.ninfer` and safetensors are other people's. Shared pieces: the description of a
//! network, tensor descriptions, strict JSON, checksums, text encodings, mapped files and output files.

mod arch;
#[cfg_attr(not(feature = "tools"), allow(dead_code, reason = "parts that only tools use"))]
mod bytes;
pub mod cmf;
mod file;
pub mod gguf;
pub mod hadamard;
mod hash;
pub mod json;
pub mod ninfer;
#[cfg(feature = "tools")]
mod output;
pub mod pipeline;
pub mod safetensors;
mod tensor;

pub use arch::{Arch, HiddenAct, LayerType, Moe, Mtp, MtpHidden, NormStyle, Yarn};
pub(crate) use bytes::base64;
#[cfg(feature = "tools")]
pub(crate) use bytes::from_hex;
#[cfg(feature = "tools")]
pub use bytes::hex;
pub(crate) use file::{MappedFile, read_start, refuse_pointer};
pub(crate) use hash::check_hash;
pub use hash::hash64;
#[cfg(feature = "tools")]
pub(crate) use output::publish;
#[cfg(feature = "tools")]
pub use output::{not_the_output, target, temporary_beside};
pub use tensor::{TensorId, TensorInfo, TensorSpec};

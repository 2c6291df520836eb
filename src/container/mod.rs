//! A validated, memory-mapped model file: the rooms of the container and the face that the rest of the crate sees.
//!
//! A file is checked once, when it is opened: envelope, header, directory and the size of every payload. After that its
//! tensors are plain byte slices of the map. Nothing here knows a network, a kernel or a device.

mod append;
mod arch;
mod blend;
mod cmf;
mod directory;
mod envelope;
mod file;
pub mod gguf;
mod hash;
mod header;
mod index;
pub mod json;
pub mod masks;
mod memory;
mod payload;
pub mod safetensors;
mod shards;
pub mod skills;
mod split;
mod verify;
mod writer;

pub use append::Appender;
pub use arch::{Arch, HiddenAct, LayerType, Moe, Mtp, MtpHidden, NormStyle, Yarn};
pub use blend::BlendView;
pub use cmf::Container;
pub(crate) use file::MappedFile;
pub use hash::hash64;
pub use header::{Header, SectionHashes, Shard, TokenizerConfig};
pub use index::IndexEntry;
pub use masks::{Mask, MaskShape, Masks, NO_TASK};
pub use memory::MemoryTensors;
pub use shards::{base_name, shard_path};
pub use skills::{Selection, Skill, SkillView};
pub use split::{Parts, Split, SplitWriter};
pub use verify::{Failure, VerifyReport};
pub use writer::{Sections, TensorSpec, Writer, not_the_output, target, temporary_beside};

use crate::dtype::Dtype;
use crate::error::Result;

/// An index into [`Tensors::infos`]: directory order, shard 1's tensors first.
pub type TensorId = usize;

/// What a directory says about one tensor, already checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name, that of the source model.
    pub name: String,
    /// The element type.
    pub dtype: Dtype,
    /// One to six dimensions, none of them zero, row-major; a matrix is \[rows, columns\].
    pub shape: Vec<u64>,
    /// Where the payload starts, in bytes from the start of its shard's weight blob.
    pub offset: u64,
    /// Bytes of the payload.
    pub nbytes: u64,
    /// The stored [`hash64`] of the payload.
    pub hash: u64,
    /// Which file holds the payload, counted from 0.
    pub shard: usize,
}

impl TensorInfo {
    /// The tensor as a matrix: a vector is one row; of more dimensions the last is the row and the others count rows.
    pub fn rows_cols(&self) -> (usize, usize) {
        // Whoever makes an info has checked that the element count fits the address space.
        let cols = self.shape.last().copied().unwrap_or(0) as usize;
        let rows = self.shape.iter().rev().skip(1).product::<u64>() as usize;
        (rows, cols)
    }
}

/// A set of named tensors: a file, or tensors made in memory.
pub trait Tensors: Send + Sync {
    /// Every tensor; a [`TensorId`] indexes this.
    fn infos(&self) -> &[TensorInfo];

    /// The tensor of this name.
    fn find(&self, name: &str) -> Option<TensorId>;

    /// The payload. Pages of a file are read when they are touched.
    ///
    /// Errors: `Usage` for an id that is none, `Io` when the file has become shorter than it was.
    fn bytes(&self, id: TensorId) -> Result<&[u8]>;

    /// Task masks over these tensors, where there are any.
    fn masks(&self) -> Option<&Masks> {
        None
    }

    /// Says that the payload is not needed for now, so that its pages can be given back. Its bytes stay readable.
    fn release(&self, id: TensorId);
}

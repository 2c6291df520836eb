//! `.ninfer` files, version 2: a directory of named tensors and resources, checked before anything is used.
//!
//! Layout: magic, version byte, length of the directory u64, the directory as JSON, zeros up to a multiple of 4096, then the
//! objects. Offsets of objects count from there. A file states no network and no checksums; importers interpret names.

mod decode;
mod directory;
mod format;
mod row_split;
mod size;
#[cfg(feature = "tools")]
mod writer;

pub use decode::Decoder;
pub use directory::{Identity, MAGIC, Ninfer, Object, Tensor};
pub use format::Format;
pub use row_split::RowSplit;
#[cfg(feature = "tools")]
pub use writer::{NewObject, write};

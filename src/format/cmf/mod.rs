//! The CMF container: one model in one or several files.
//!
//! A file is checked once, when it is opened: envelope, header, directory and the size of every payload. After that its
//! tensors are plain byte slices of the map.

#[cfg(feature = "tools")]
mod append;
#[cfg(feature = "tools")]
mod blob;
mod container;
#[cfg_attr(not(feature = "tools"), allow(dead_code, reason = "parts that only writers use"))]
mod directory;
#[cfg_attr(not(feature = "tools"), allow(dead_code, reason = "parts that only writers use"))]
mod envelope;
mod file;
#[cfg(feature = "tools")]
mod head;
mod header;
mod index;
mod masks;
#[cfg_attr(not(feature = "tools"), allow(dead_code, reason = "parts that only writers use"))]
mod sections;
mod shards;
mod skills;
mod verify;
#[cfg(feature = "tools")]
mod writer;

#[cfg(feature = "tools")]
pub use append::Appender;
pub use container::CmfContainer;
pub use directory::Payload;
pub use header::{Header, Shard, TokenizerConfig};
pub use index::IndexEntry;
pub use masks::{Mask, MaskAxis, MaskShape, Masks, NO_TASK};
pub use sections::{PerSection, Sections};
pub use shards::{base_name, shard_path};
pub use skills::{Selection, Skill, check_id, check_new_id};
pub(crate) use skills::{registered, replaced_by};
pub(crate) use verify::check_weights;
pub use verify::{Failure, VerifyReport};
#[cfg(feature = "tools")]
pub use writer::{CmfWriter, SplitOptions, WrittenFiles};

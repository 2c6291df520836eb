//! Tools for model files: sign, split, join, compare, add skills, drop unused neurons and experts.
//!
//! Tools stream one tensor at a time from the mapped input to the output, which is renamed to its path when complete. A
//! payload is checked against its checksum before it is copied, so that damage never gets a valid checksum.

mod cut;
pub mod defrag;
pub mod diff;
mod gather;
pub mod moe;
mod rewrite;
pub mod shard;
pub mod sign;
pub mod skill;

use std::ops::ControlFlow;

/// The name and version of this program, for provenance records.
const TOOL: &str = concat!("cmf-gpu ", env!("CARGO_PKG_VERSION"));

/// Called with the bytes done and their total. Returning `Break` cancels the work, which then leaves no files.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64) -> ControlFlow<()>;

/// The result of a tool that writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// Tensors written.
    pub tensors: usize,
    /// Bytes of the new file, or bytes added to an existing one.
    pub bytes: u64,
    /// Remarks about the result, for display.
    pub notes: Vec<String>,
}

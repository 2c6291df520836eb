//! What is done to model files as files: signing, splitting, joining, comparing, adding skills, cutting down.
//!
//! Every tool streams: one tensor at a time goes from the map to the result, which gets its name when it is whole. A payload
//! is held against its checksum before it is copied, so that damage is never given a new one. Nothing here knows a device.

pub mod compact;
mod cut;
pub mod defrag;
pub mod diff;
mod gather;
pub mod moe;
pub mod registry;
mod rewrite;
pub mod shard;
pub mod sign;
pub mod skill;

use std::ops::ControlFlow;

/// Is told bytes done and their total, and may end the work; then nothing is left behind.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64) -> ControlFlow<()>;

/// What a tool wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// Tensors written.
    pub tensors: usize,
    /// Bytes of the file, or of what was added to it.
    pub bytes: u64,
    /// What a person should know about the result.
    pub notes: Vec<String>,
}

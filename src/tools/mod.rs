//! What is done to model files as files: signing, splitting, joining, comparing, adding skills, cutting down.
//!
//! Every tool streams: one tensor at a time goes from the map to the result, which gets its name when it is whole. A payload
//! is held against its checksum before it is copied, so that damage is never given a new one. Nothing here knows a device.

pub mod sign;

use std::ops::ControlFlow;

/// Is told bytes done and their total, and may end the work; then nothing is left behind.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64) -> ControlFlow<()>;

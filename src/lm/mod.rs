//! Decoder language models: lowering to a graph, task masks, paging of experts, and running sequences.

mod lower;
mod masks;
mod plan;
pub mod run;

pub use lower::{ExpertOptions, LowerOptions, lower};
pub use plan::{Plan, ProgramKind, RunBuffers, sequence_words, slot_words};

//! Options of a lowering, which device and caller decide.

use crate::model::HeadInput;
use crate::op::Kv;

/// Options of a lowering.
#[derive(Clone, Copy, Debug)]
pub struct LowerOptions {
    /// Positions of the context.
    pub ctx: u32,
    /// Tokens of a prefill chunk, a multiple of 8.
    pub chunk: u32,
    /// Element type of the key-value cache.
    pub kv: Kv,
    /// Largest storage binding, in bytes. Larger weights are cut into segments.
    pub max_binding: u64,
    /// Whether to include the program that computes the logits of every prompt token.
    pub all_logits: bool,
    /// Largest number of drafts in a speculative step, at most 7; 0 = no speculation. The model's draft head makes
    /// the drafts, or the caller if the model has no draft head. Recurrent layers keep one state more than this
    /// number.
    pub drafts: u32,
    /// The hidden state that the draft head reads, if the file does not tell.
    pub draft_input: HeadInput,
    /// How mixtures of experts are lowered.
    pub experts: ExpertOptions,
}

/// How mixtures of experts are lowered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertOptions {
    /// Whether to count how often each expert is chosen, see [`crate::graph::Graph::routed`].
    pub counted: bool,
    /// Slots of each bank: the experts that it holds at a time, at least as many as a token takes. `None` = all
    /// experts. See [`crate::graph::Graph::paged`].
    pub slots: Option<usize>,
}

//! The records of a run's tokens and of a sequence's state. `shaders/lib/tokens.wgsl` has the same structures.

use super::constants::MAX_WIDTH;
use bytemuck::{Pod, Zeroable};

/// One token of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Token {
    /// Index in the vocabulary.
    pub id: u32,
    /// The slot of its sequence, which decides the page table, the recurrent states and the sampler state.
    pub slot: u32,
    /// Position in the sequence, from 0.
    pub position: u32,
    /// Unused.
    pub spare: u32,
}

/// Words of a batch buffer before its records: the number of tokens, then padding.
pub const BATCH_HEADER: usize = 4;

/// The words of a batch buffer that holds these tokens.
pub fn batch_words(tokens: &[Token]) -> Vec<u32> {
    let mut words = vec![tokens.len() as u32, 0, 0, 0];
    words.extend_from_slice(bytemuck::cast_slice(tokens));
    words
}

/// Words of a batch buffer for this number of tokens.
pub fn batch_len(tokens: usize) -> usize {
    BATCH_HEADER + tokens * size_of::<Token>() / 4
}

/// The sampler state of one sequence. It is read back after a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct SlotState {
    /// The tokens that the last run sampled.
    pub sampled: [u32; MAX_WIDTH as usize],
    /// Number of tokens in `sampled`.
    pub count: u32,
    /// Drafts that the last run verified.
    pub drafted: u32,
    /// Tokens sampled since the state was written.
    pub step: u32,
    /// 0 = running, 1 = a stop token was sampled, 2 = the logits were not finite.
    pub stop: u32,
    /// Position of the last token that a speculative step may sample.
    pub last: u32,
    /// Unused.
    pub spare: [u32; 3],
}

impl SlotState {
    /// The tokens that the last run sampled, in order.
    pub fn sampled(&self) -> &[u32] {
        &self.sampled[..(self.count as usize).min(self.sampled.len())]
    }

    /// Its words.
    pub fn words(&self) -> &[u32] {
        bytemuck::cast_slice(std::slice::from_ref(self))
    }

    /// The state that a buffer's first words hold; `None` for too few words.
    pub fn from_words(words: &[u32]) -> Option<SlotState> {
        let words = words.get(..size_of::<SlotState>() / 4)?;
        Some(bytemuck::pod_read_unaligned(bytemuck::cast_slice(words)))
    }
}

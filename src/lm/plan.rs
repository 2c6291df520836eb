//! A language model lowered to a graph: its programs, and the buffers that a session writes and reads.

use super::masks::Masking;
use crate::error::{Result, bail};
use crate::graph::{Cost, Graph, Program, Selection};
use crate::op::{BufferId, SlotState, Token, batch_words};
use crate::source::Mask;
use std::sync::Arc;

/// The programs of a language model. The discriminants are indices in [`Graph::programs`] and of the names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramKind {
    /// Runs one token and samples the next.
    Decode,
    /// Runs a chunk of prompt tokens, which fills the caches.
    Prefill,
    /// Samples the first token, after the last token of a prefill.
    Head,
    /// As [`ProgramKind::Prefill`], and computes the logits of every token.
    PrefillLogits,
    /// A speculative step: the draft head, if there is one, drafts tokens; then the network verifies all drafts in
    /// one run.
    Speculate,
}

impl ProgramKind {
    /// All programs, in order.
    pub const ALL: [ProgramKind; 5] = [
        ProgramKind::Decode,
        ProgramKind::Prefill,
        ProgramKind::Head,
        ProgramKind::PrefillLogits,
        ProgramKind::Speculate,
    ];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        ["decode", "prefill", "head", "prefill_logits", "speculate"][self as usize]
    }
}

/// The buffers that a run writes or reads.
#[derive(Clone, Copy, Debug)]
pub struct RunBuffers {
    /// The tokens of a run, see `shaders/lib/tokens.wgsl`.
    pub batch: BufferId,
    /// The sampler state of each slot, which is read back.
    pub slots: BufferId,
    /// Page tables of the key-value cache, one for each slot.
    pub pages: BufferId,
    /// Sampler settings and tables.
    pub settings: BufferId,
    /// The tokens that a sequence contains, see `shaders/op/sample.wgsl`.
    pub seen: BufferId,
    /// The tokens that the draft head runs, if one is used. In a prefill each record has the id of the token that
    /// follows.
    pub draft_batch: Option<BufferId>,
}

/// A lowered language model under one task mask, or none. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Buffers, weights and programs, for all masks.
    pub graph: Arc<Graph>,
    /// The steps that run under the current mask.
    pub selection: Arc<Selection>,
    /// The parts of the graph that masks can leave out, for models with masks.
    pub masking: Option<Arc<Masking>>,
    /// The buffers that a session writes and reads.
    pub buffers: RunBuffers,
    /// Positions of the context.
    pub ctx: u32,
    /// Tokens of a prefill chunk.
    pub chunk: u32,
    /// Largest number of drafts in a speculative step; 0 = no speculation.
    pub drafts: u32,
    /// Tokens of the vocabulary.
    pub vocab: u32,
    /// Elements of the residual stream.
    pub hidden: u32,
    /// The number of last positions whose states recurrent layers keep. `None`: there are no recurrent layers, and a
    /// session can go back to any position.
    pub kept_states: Option<u32>,
}

impl Plan {
    /// One of the programs.
    pub fn program(&self, kind: ProgramKind) -> &Program {
        &self.graph.programs[kind as usize]
    }

    /// Bytes of weights that one run of a program reads, see [`Graph::weight_bytes_read`].
    pub fn weight_bytes_read(&self, kind: ProgramKind) -> u64 {
        self.graph.weight_bytes_read(self.program(kind), &self.selection)
    }

    /// The memory that the plan needs, and the costs of its programs.
    pub fn cost(&self) -> Cost {
        self.graph.cost(&self.selection)
    }

    /// Whether a program has steps.
    pub fn has(&self, kind: ProgramKind) -> bool {
        !self.program(kind).steps.is_empty()
    }

    /// The same plan under this mask, or under none. A mask that leaves nothing out is the same as none. The layers
    /// of a draft head are never masked.
    ///
    /// Errors: `UnsupportedModel`, with layer and axis, if the mask leaves something out that kernels cannot leave out;
    /// `Usage` for a mask of another model.
    pub fn with_mask(&self, mask: Option<&Mask>) -> Result<Plan> {
        let mask = mask.filter(|mask| !mask.is_open());
        let Some(masking) = &self.masking else {
            match mask {
                None => return Ok(self.clone()),
                Some(mask) => bail!(
                    Usage,
                    "mask '{}' belongs to another model, this model has no masks",
                    mask.name
                ),
            }
        };
        if let Some(mask) = mask {
            masking.check(mask)?;
        }
        Ok(Plan {
            selection: Arc::new(masking.selection(mask, &self.graph)),
            ..self.clone()
        })
    }
}

/// The words of a batch of consecutive tokens from a position, in slot 0.
pub fn sequence_words(ids: &[u32], position: u32) -> Vec<u32> {
    let tokens = ids.iter().zip(position..).map(|(&id, position)| Token {
        id,
        position,
        ..Token::default()
    });
    batch_words(&tokens.collect::<Vec<_>>())
}

/// The state of a slot whose next speculative step may sample up to the position `last`.
pub fn slot_words(last: u32) -> Vec<u32> {
    let state = SlotState {
        last,
        ..SlotState::default()
    };
    state.words().to_vec()
}

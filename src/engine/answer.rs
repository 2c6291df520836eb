//! A finished answer.

use crate::graph::Counters;
use crate::lm::run::{Finish, Speculated};
use crate::notice::Notice;

/// A finished answer.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Answer {
    /// The text, without stop texts and special tokens.
    pub text: String,
    /// The tokens, including a stop token.
    pub tokens: Vec<u32>,
    /// Number of tokens of the prompt.
    pub prompt_tokens: usize,
    /// Number of prompt tokens whose keys and values were already cached.
    pub cached_tokens: usize,
    /// Number of prompt tokens that were run: the others, unless the answer was cancelled.
    pub prefilled_tokens: usize,
    /// Why the answer ended.
    pub finish: Finish,
    /// Seconds from the start to the first token.
    pub prefill_s: f64,
    /// Seconds from the first token to the last.
    pub decode_s: f64,
    /// Decode runs. Each gives one token, or several with speculation. The first token needs none, and one run may be in
    /// flight when the answer ends.
    pub decode_runs: u64,
    /// The cost of these runs.
    pub decode_counters: Counters,
    /// Statistics of speculation.
    pub speculated: Speculated,
    /// Notices about this answer. Each is reported once per engine.
    pub notices: Vec<Notice>,
}

impl Answer {
    /// An answer that was cancelled before its first token.
    pub(super) fn new(prompt_tokens: usize) -> Answer {
        Answer {
            text: String::new(),
            tokens: Vec::new(),
            prompt_tokens,
            cached_tokens: 0,
            prefilled_tokens: 0,
            finish: Finish::Interrupted,
            prefill_s: 0.0,
            decode_s: 0.0,
            decode_runs: 0,
            decode_counters: Counters::default(),
            speculated: Speculated::default(),
            notices: Vec::new(),
        }
    }
}

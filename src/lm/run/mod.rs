//! Running a language model: prompts into the caches, answers with and without speculation, logits and hidden states.
//!
//! Knows token ids, not text.

mod answer;
mod drafting;
#[cfg(test)]
mod fake;
mod forward;
mod generate;
mod lookup;
mod prefill;
mod session;
mod speculate;
#[cfg(test)]
mod tests;
mod tuner;

pub use answer::{Cancel, Finish, Generation, TokenSink};
pub use drafting::{DraftMode, DraftNotice, Speculated};
pub use forward::LogitsSink;
pub use session::Session;

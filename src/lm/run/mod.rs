//! Running a language model: prompts into the caches, answers with and without speculation, logits and hidden states.
//!
//! Knows token ids, not text.

mod answer;
mod cancel;
mod decode;
mod drafting;
#[cfg(test)]
mod fake;
mod forward;
mod generate;
mod lookup;
mod mean_hidden;
mod pace;
mod prefill;
mod session;
mod speculate;
#[cfg(test)]
mod tests;
mod tuner;

pub use answer::{Finish, Generation, TokenSink};
pub use cancel::Cancel;
pub use drafting::{DraftMode, DraftNotice, Speculated};
pub use forward::LogitsSink;
pub use session::Session;

//! Text in, text out: the tokenizer, the chat template, and the stream that turns tokens back into text.
//!
//! All inputs come from the model file or the user and are untrusted. This module does not depend on tensors, kernels
//! or devices.
//!
//! A prompt is made in three steps, so that special tokens in messages stay ordinary text: [`guard_messages`],
//! [`ChatTemplate::render`], [`Tokenizer::encode_guarded`].

mod special;
mod stream;
mod template;
mod tokenizer;

pub use special::{guard_messages, special_tokens_map};
pub use stream::TextStream;
pub use template::{ChatTemplate, RenderOptions};
pub use tokenizer::Tokenizer;

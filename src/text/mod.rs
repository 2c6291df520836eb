//! Text in, text out: the tokenizer, the chat template, and the stream that turns tokens back into text.
//!
//! Everything here comes from the model file or the user and is untrusted. Knows no tensors, kernels or devices.

mod template;

pub use template::{ChatTemplate, RenderOptions};

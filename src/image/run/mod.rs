//! Runs the graphs of a pipeline on an executor: features of texts, velocities of latents, images of latents.

mod decoder;
mod denoiser;
mod encoder;
mod submit;

pub use decoder::Decoder;
pub use denoiser::{Branch, Denoiser};
pub use encoder::Encoder;

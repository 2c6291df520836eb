//! The typed network of a decoder language model: dimensions, constants and the tensor of each weight. No bytes, kernels or
//! devices here.
//!
//! [`bind()`] derives the parts of a layer from the tensors that are present, never from a family's name.

mod bind;
mod binder;
mod delta_net;
mod experts;
mod finder;
mod network;
mod rope;
mod rotation;
#[cfg(test)]
mod tests;

pub use bind::bind;
pub use finder::Finder;
pub use network::{
    Activation, Attention, DeltaGates, DeltaInputs, DeltaNet, FeedForward, Ffn, GateUp, HeadInput, Layer, Linear,
    Mixer, Model, Moe, Mtp, Rope, Rotation,
};

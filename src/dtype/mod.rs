//! Element types of weights: one table row for each, in one file per family of encodings.
//!
//! A family's file describes the payload, names the oracle that decodes it (in the reference crate), encodes it and says how
//! its rows become device planes. Nothing here knows a model or a device. The encodings are those of the container format's
//! section 3.1, and the block types of GGUF.

mod codes;
pub mod encode;
pub mod exact;
mod float;
mod gguf;
mod order;
mod payload;
pub mod planes;
mod q1;
mod q4;
mod q4tp;
mod q8;
mod quantise;
mod spec;
mod table;
mod vbit;

pub use cmf_kernels_ref::dtype::RowDecoder;
pub use order::{Order, Ordered, RowOrder, TiledHeads};
pub use spec::Size;
pub use table::Dtype;

//! Lowers the parts of a pipeline to graphs, each on its own, so that one can leave the device before the next comes.

mod block;
mod builder;
mod dit;
mod text;
mod vae;

pub use dit::{DitPlan, DitProgram, dit};
pub use text::{TextPlan, text};
pub use vae::{Part, Residual, VaePlan, vae};

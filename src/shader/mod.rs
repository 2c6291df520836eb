//! The WGSL of pipelines: the variants of an operator, and the text of one variant.

mod compose;
mod variant;

pub use compose::compose;
pub use variant::{Team, Variant};

//! What the encoders share: reading weights in blocks, rounding, and the choice of scales, bit widths and outliers.
//!
//! The bytes written do not depend on the number of threads.

pub mod levels;
pub mod outliers;
mod rounding;
mod settings;
mod weights;
pub mod widths;

pub use rounding::{absmax, half_up, round};
pub use settings::Settings;
#[cfg(test)]
pub use weights::BLOCK;
pub use weights::{Read, Weights};

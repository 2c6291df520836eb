//! Compares a device with the host: the same steps on the device and with the reference kernels.
//!
//! [`kernels`] judges every operator with every weight type on made-up data, [`programs()`] every step of a model's programs.
//! Recorded logits of whole models are compared in the tests. Outputs are NaN before a run, and each buffer ends with words that
//! nothing may write, so a value that is missing, or written elsewhere, is found.

mod alone;
mod case;
mod cases;
mod compare;
mod judge;
mod maker;
mod programs;
mod random;
mod rig;

pub use alone::alone;
pub use case::Case;
pub use cases::cases;
pub use compare::{Failure, Outcome, compare, kernels, outputs};
pub use programs::{Subject, programs};
pub use rig::{BATCH, Rig, Round, Rows};

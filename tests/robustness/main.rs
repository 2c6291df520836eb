//! Tests against failures that users have reported of inference engines. Each test names the failure.
//!
//! Most tests run a model whose answer is known in advance, see [`permutation`].

mod answers;
mod device_loss;
mod failures;
mod files;
mod permutation;
mod process;
mod signals;
mod terminal;

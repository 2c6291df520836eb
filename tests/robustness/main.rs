//! What breaks for people, reproduced: each test names the symptom that somebody reported of some engine.
//!
//! Most run a model whose answer is known beforehand, see [`permutation`].

mod answers;
mod device_loss;
mod failures;
mod files;
mod permutation;
mod process;
mod signals;
mod terminal;

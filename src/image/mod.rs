//! Text to image: the typed network of a Lumina 2 pipeline, its lowering to graphs, and the sampler.

mod bind;
pub mod config;
pub mod network;

pub use bind::{TIME_ELEMENTS, bind};
pub use config::Config;
pub use network::Network;

//! Text to image: the typed network of a Lumina 2 pipeline, its lowering to graphs, the sampler, and what runs them.

mod bind;
pub mod config;
pub mod grid;
pub mod lower;
pub mod network;
mod request;
pub mod run;
pub mod sampler;
mod tensors;

pub use bind::{TIME_ELEMENTS, bind};
pub use config::Config;
pub use network::Network;
pub use request::{Image, ImageRequest, Latents, SYSTEM_PROMPT};
pub use tensors::ImageTensors;

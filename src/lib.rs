//! Runs language models in the CMF container on any GPU through wgpu compute shaders.
//!
//! `Container → Model → Program → Session(Device) → Engine`: a checked, memory-mapped file; the typed network bound from the
//! tensors present; a flat list of steps; its realisation on a device with a KV cache; and the façade that chats.

mod budget;
pub mod container;
pub mod convert;
pub mod dtype;
pub mod engine;
pub mod error;
pub mod gpu;
pub mod host;
pub mod kernel;
pub mod model;
pub mod options;
pub mod parity;
pub mod program;
pub mod routing;
pub mod sampling;
pub mod session;
pub mod shader;
pub mod synthetic;
pub mod text;
pub mod tools;

pub use engine::Engine;
pub use error::{Error, Kind, Result};

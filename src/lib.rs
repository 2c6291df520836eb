//! Runs language models from CMF and GGUF files and Hugging Face directories on any GPU, through wgpu compute shaders.
//!
//! Load a model, send it a conversation, and receive the text while it is generated:
//!
//! ```no_run
//! use cmf_gpu::{AnswerOptions, Cancel, Engine, LoadOptions, Message, Result};
//! use std::ops::ControlFlow;
//!
//! fn main() -> Result<()> {
//!     // Called with the uploaded and the total bytes; `Break` cancels loading.
//!     let mut progress = |_done, _total| ControlFlow::Continue(());
//!     let options = LoadOptions::default().ctx(8192);
//!     let mut engine = Engine::load("model.cmf", &options, &mut progress)?;
//!     for notice in &engine.device_report().notices {
//!         eprintln!("note: {notice}");
//!     }
//!
//!     let messages = [
//!         Message::system("Answer in one sentence."),
//!         Message::user("Why is the sky blue?"),
//!     ];
//!     // Another thread may call `cancel.cancel()`.
//!     let cancel = Cancel::new();
//!     let answer = engine.chat(&messages, &AnswerOptions::default(), &cancel, &mut |text| {
//!         print!("{text}");
//!         ControlFlow::Continue(())
//!     })?;
//!     println!("\n[{} tokens, finish: {}]", answer.tokens.len(), answer.finish.name());
//!     Ok(())
//! }
//! ```
//!
//! [`ImagePipeline`] makes pictures from a text; `examples/imagine.rs` shows it.
//!
//! The library does not print, read the environment or end the process. Without the feature `cli` it has fewer
//! dependencies; the feature `tools` adds conversion, signing and writing of model files.

pub mod options;

pub use engine::{Answer, DeviceReport, Engine, ImageEvent, ImagePipeline, Message};
pub use error::{Error, Kind, Result};
/// The wgpu of [`Device::from_wgpu`].
#[doc(no_inline)]
pub use gpu::wgpu;
pub use gpu::{Device, DeviceOptions};
pub use image::{Image, ImageRequest, Latents};
pub use lm::run::{Cancel, Finish};
pub use notice::Notice;
#[doc(inline)]
pub use options::{AnswerOptions, LoadOptions};

mod budget;
mod import;
mod notice;

// The parts below are public for the command line, tests, fuzz targets and benchmarks. They change without notice.
#[cfg(feature = "tools")]
#[doc(hidden)]
pub mod convert;
#[doc(hidden)]
pub mod dtype;
#[doc(hidden)]
pub mod engine;
#[doc(hidden)]
pub mod error;
#[doc(hidden)]
pub mod format;
#[doc(hidden)]
pub mod gpu;
#[doc(hidden)]
pub mod graph;
#[doc(hidden)]
pub mod host;
#[doc(hidden)]
pub mod image;
#[doc(hidden)]
pub mod lm;
#[doc(hidden)]
pub mod model;
#[doc(hidden)]
pub mod op;
#[doc(hidden)]
pub mod parity;
#[doc(hidden)]
pub mod routing;
#[doc(hidden)]
pub mod sampling;
#[doc(hidden)]
pub mod shader;
#[doc(hidden)]
pub mod source;
#[doc(hidden)]
pub mod synthetic;
#[doc(hidden)]
pub mod text;
#[cfg(feature = "tools")]
#[doc(hidden)]
pub mod tools;

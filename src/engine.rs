//! Loading a model on a device, and answering.
//!
//! [`Engine`] combines the parts: `load` opens the file and the device, `planner` fits the programs into the memory, `loaded`
//! uploads the weights, `chat` answers, `switch` changes skills and tasks. Several engines can live in one process.

mod answer;
mod chat;
mod device;
mod image;
mod load;
mod loaded;
mod message;
mod planner;
mod skills;
mod switch;
mod task;

pub use answer::Answer;
pub use chat::OnText;
pub use device::open_device;
pub use image::{ImageEvent, ImagePipeline, Made, OnEvent};
pub use load::{Engine, sampling_defaults, stop_tokens};
pub use loaded::{DeviceReport, LoadProgress, LoadedModel};
pub use message::Message;
pub use planner::{AUTO_DRAFTS, Planned, check_budget, planned};
pub use skills::{Route, incomparable, overlaid, routable};
pub use task::{find_mask, resolve_task};

//! Devices: adapters, weights in device memory, and the executor of graphs. No other module uses wgpu.

mod adapter;
mod costs;
mod device;
mod exec;
mod memory;
mod module;
mod open;
mod pager;
mod pipelines;
mod probe;
mod repack;
mod replace;
mod run;
mod scope;
mod upload;

pub use adapter::{Adapter, DeviceKind, adapters, compiled_backends};
pub use costs::{Costs, costs};
pub use device::{Device, DeviceOptions, MAX_BINDING};
pub use exec::GpuExecutor;
/// For the tests of all shader variants.
#[doc(hidden)]
pub use module::simplify;
/// The wgpu that a host application shares its device through.
pub use wgpu;

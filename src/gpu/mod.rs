//! The only room that speaks wgpu: adapters and devices, weights in device memory, and the executor of programs.

mod costs;
mod device;
mod exec;
mod memory;
mod module;
mod pager;
mod probe;
mod replace;

pub use costs::{Costs, costs};
pub use device::{Adapter, Device, DeviceKind, DeviceOptions, MAX_BINDING, adapters, compiled_backends};
pub use exec::GpuExecutor;
/// The wgpu that a host application shares its device through.
pub use wgpu;

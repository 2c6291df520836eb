//! Opens devices, and finds out their properties by probes.

use super::adapter::Adapter;
use super::device::{Device, DeviceOptions, Properties};
use super::probe;
use crate::error::{Result, error};
use crate::shader::Team;

impl Device {
    /// Opens an adapter and tests it: whether its f16 conversion is exact, after how many iterations it ends loops, and
    /// whether the lanes of its subgroups are in order.
    ///
    /// Errors: `DeviceError` if the driver fails, or if the adapter's limits are below those that kernels need.
    pub fn open(adapter: &Adapter, options: DeviceOptions) -> Result<Device> {
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("cmf-gpu"),
            required_features: adapter.adapter.features() & wgpu::Features::SUBGROUP,
            required_limits: adapter.adapter.limits(),
            experimental_features: wgpu::ExperimentalFeatures::disabled(),
            memory_hints: wgpu::MemoryHints::MemoryUsage,
            trace: wgpu::Trace::Off,
        };
        let (device, queue) = pollster::block_on(adapter.adapter.request_device(&descriptor))
            .map_err(|err| error!(DeviceError, "{}: {err}", adapter.name))?;
        Device::from_wgpu(device, queue, options)
    }

    /// Uses a device that the host application made, and tests it. The device should have the adapter's own limits and,
    /// where the adapter has it, the feature `SUBGROUP`; with less, large models may not fit or run slower.
    ///
    /// Errors: as [`Device::open`].
    pub fn from_wgpu(device: wgpu::Device, queue: wgpu::Queue, options: DeviceOptions) -> Result<Device> {
        let device = Device::untested(device, queue, options)?;
        let properties = Properties {
            half_native: !options.force_exact_half && probe::halves_are_exact(&device)?,
            loop_limit: probe::loop_limit(&device)?,
            team: match options.force_tree {
                true => Team::Tree,
                false => team(&device)?,
            },
        };
        Ok(device.with(properties))
    }
}

/// The fastest way to realise teams. A team is a fixed set of lanes, so subgroups have to be of one size, and their
/// lanes in the order of the threads.
fn team(device: &Device) -> Result<Team> {
    let info = device.device.adapter_info();
    let size = info.subgroup_min_size;
    let subgroups = device.device.features().contains(wgpu::Features::SUBGROUP);
    let fixed = subgroups && size == info.subgroup_max_size && size.is_power_of_two() && size >= 4;
    Ok(match fixed && probe::lanes_are_in_order(device, size)? {
        true => Team::Subgroup { lanes: size.min(32) },
        false => Team::Tree,
    })
}

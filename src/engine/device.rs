//! The choice of a device.

use crate::error::{Result, bail};
use crate::gpu::{self, Adapter, Device, DeviceKind, DeviceOptions};
use crate::notice::Notice;
use crate::options::{DeviceChoice, LoadOptions};
use std::sync::Arc;

/// Opens the device that the options choose; `None` is the CPU reference. Also returns a notice if
/// [`DeviceChoice::Auto`] found no GPU.
///
/// Errors: `NoAdapter` with the names of all adapters if none matches; `DeviceError` if the device cannot be opened.
pub fn open_device(options: &LoadOptions) -> Result<(Option<Arc<Device>>, Option<Notice>)> {
    if options.device == DeviceChoice::Cpu {
        return Ok((None, None));
    }
    let adapters = gpu::adapters();
    let find = |matches: &dyn Fn(&Adapter) -> bool| adapters.iter().find(|adapter| matches(adapter));
    let hardware = find(&|adapter| adapter.kind != DeviceKind::Software);
    let software = find(&|adapter| adapter.kind == DeviceKind::Software);
    let (found, request) = match &options.device {
        DeviceChoice::Auto | DeviceChoice::Cpu => (hardware.or(software), String::new()),
        DeviceChoice::Gpu => (hardware, "no hardware GPU was found".to_owned()),
        DeviceChoice::Software => (software, "no software adapter was found".to_owned()),
        DeviceChoice::Index(index) => (adapters.get(*index), format!("no adapter has the index {index}")),
        DeviceChoice::Name(part) => {
            let lower = part.to_lowercase();
            let named = find(&|adapter| adapter.name.to_lowercase().contains(&lower));
            (named, format!("no adapter has '{part}' in its name"))
        }
    };
    let is_auto = options.device == DeviceChoice::Auto;
    let Some(adapter) = found else {
        if is_auto {
            return Ok((None, Some(Notice::CpuReference)));
        }
        let names: Vec<&str> = adapters.iter().map(|adapter| adapter.name.as_str()).collect();
        bail!(NoAdapter, "{request}; adapters: [{}]", names.join(", "));
    };
    let device_options = DeviceOptions {
        checked_shaders: options.checked_shaders,
        ..DeviceOptions::default()
    };
    let device = Device::open(adapter, device_options)?;
    let is_software = is_auto && adapter.kind == DeviceKind::Software;
    Ok((Some(Arc::new(device)), is_software.then_some(Notice::SoftwareAdapter)))
}

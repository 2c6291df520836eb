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
    let (adapter, notice) = choose(&adapters, &options.device)?;
    let device_options = DeviceOptions {
        checked_shaders: options.checked_shaders,
        ..DeviceOptions::default()
    };
    let device = adapter
        .map(|adapter| Device::open(adapter, device_options))
        .transpose()?;
    Ok((device.map(Arc::new), notice))
}

fn choose<'a>(adapters: &'a [Adapter], choice: &DeviceChoice) -> Result<(Option<&'a Adapter>, Option<Notice>)> {
    let hardware = adapters.iter().find(|adapter| adapter.kind != DeviceKind::Software);
    let software = adapters.iter().find(|adapter| adapter.kind == DeviceKind::Software);
    let (found, request) = match choice {
        DeviceChoice::Cpu => return Ok((None, None)),
        DeviceChoice::Auto => {
            let notice = match (hardware, software) {
                (Some(_), _) => None,
                (None, Some(_)) => Some(Notice::SoftwareAdapter),
                (None, None) => Some(Notice::CpuReference),
            };
            return Ok((hardware.or(software), notice));
        }
        DeviceChoice::Gpu => (hardware, "no hardware GPU was found".to_owned()),
        DeviceChoice::Software => (software, "no software adapter was found".to_owned()),
        DeviceChoice::Index(index) => (adapters.get(*index), format!("no adapter has the index {index}")),
        DeviceChoice::Name(part) => {
            let lower = part.to_lowercase();
            let named = adapters
                .iter()
                .find(|adapter| adapter.name.to_lowercase().contains(&lower));
            (named, format!("no adapter has '{part}' in its name"))
        }
    };
    if found.is_none() {
        let names: Vec<&str> = adapters.iter().map(|adapter| adapter.name.as_str()).collect();
        bail!(NoAdapter, "{request}; adapters: [{}]", names.join(", "));
    }
    Ok((found, None))
}

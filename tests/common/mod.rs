//! The device that tests run on. A test that needs one and finds none fails; software Vulkan counts.

use cmf_gpu::gpu::{Device, DeviceOptions, adapters};
use std::sync::{Arc, LazyLock};

/// The machine's best adapter, opened anew with these options.
pub fn open(options: DeviceOptions) -> Arc<Device> {
    let all = adapters();
    let Some(best) = all.first() else {
        panic!("this test needs an adapter and found none: install a Vulkan driver, lavapipe (mesa-vulkan-drivers) will do");
    };
    Arc::new(Device::open(best, options).unwrap_or_else(|err| panic!("adapter {}: {err}", best.name)))
}

static DEFAULT: LazyLock<Arc<Device>> = LazyLock::new(|| open(DeviceOptions::default()));

/// The device with default options, shared by the tests of one file: pipelines are made once.
pub fn device() -> Arc<Device> {
    DEFAULT.clone()
}

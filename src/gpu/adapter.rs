//! The adapters of this machine.

/// The type of an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceKind {
    /// A graphics card with its own memory.
    Discrete,
    /// A part of the processor, which shares its memory.
    Integrated,
    /// Hardware in a virtual machine, or of an unknown type.
    Other,
    /// A driver that runs kernels on the CPU.
    Software,
}

impl DeviceKind {
    /// The name that `devices` shows.
    pub fn name(self) -> &'static str {
        match self {
            DeviceKind::Discrete => "discrete",
            DeviceKind::Integrated => "integrated",
            DeviceKind::Other => "other",
            DeviceKind::Software => "software",
        }
    }
}

/// Vulkan, Metal or DX12, in lower case.
pub(super) fn backend(info: &wgpu::AdapterInfo) -> String {
    format!("{:?}", info.backend).to_lowercase()
}

/// The type of an adapter.
pub(super) fn kind(info: &wgpu::AdapterInfo) -> DeviceKind {
    match info.device_type {
        wgpu::DeviceType::DiscreteGpu => DeviceKind::Discrete,
        wgpu::DeviceType::IntegratedGpu => DeviceKind::Integrated,
        wgpu::DeviceType::Cpu => DeviceKind::Software,
        wgpu::DeviceType::VirtualGpu | wgpu::DeviceType::Other => DeviceKind::Other,
    }
}

/// An adapter's driver and its version.
pub(super) fn driver(info: &wgpu::AdapterInfo) -> String {
    format!("{} {}", info.driver, info.driver_info).trim().to_string()
}

/// An adapter of this machine.
pub struct Adapter {
    pub(super) adapter: wgpu::Adapter,
    /// Its name.
    pub name: String,
    /// Vulkan, Metal or DX12, in lower case.
    pub backend: String,
    /// Its type.
    pub kind: DeviceKind,
    /// Driver and its version.
    pub driver: String,
    /// Smallest and largest subgroup; 0 without subgroup operations.
    pub subgroup: [u32; 2],
    /// Largest buffer, in bytes.
    pub max_buffer: u64,
    /// Largest storage binding, in bytes.
    pub max_binding: u64,
    /// Largest workgroup memory, in bytes.
    pub max_workgroup_bytes: u32,
}

/// The adapters of this machine, best first: discrete, integrated, other, software.
pub fn adapters() -> Vec<Adapter> {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = wgpu::Backends::VULKAN | wgpu::Backends::METAL | wgpu::Backends::DX12;
    // The default flags depend on whether this is a debug build.
    descriptor.flags = wgpu::InstanceFlags::empty();
    let instance = wgpu::Instance::new(descriptor);
    let all = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::all()));
    let mut all: Vec<_> = all.into_iter().map(Adapter::new).collect();
    all.sort_by_key(|adapter| adapter.kind);
    all
}

/// The graphics interfaces that were compiled in, in lower case.
pub fn compiled_backends() -> Vec<&'static str> {
    let backends = wgpu::Instance::enabled_backend_features();
    let named = [
        (wgpu::Backends::VULKAN, "vulkan"),
        (wgpu::Backends::METAL, "metal"),
        (wgpu::Backends::DX12, "dx12"),
    ];
    let compiled = named.into_iter().filter(|(backend, _)| backends.contains(*backend));
    compiled.map(|(_, name)| name).collect()
}

impl Adapter {
    fn new(adapter: wgpu::Adapter) -> Adapter {
        let info = adapter.get_info();
        let limits = adapter.limits();
        Adapter {
            backend: backend(&info),
            kind: kind(&info),
            driver: driver(&info),
            subgroup: match has_subgroups(&adapter) {
                true => [info.subgroup_min_size, info.subgroup_max_size],
                false => [0, 0],
            },
            max_buffer: limits.max_buffer_size,
            max_binding: limits.max_storage_buffer_binding_size,
            max_workgroup_bytes: limits.max_compute_workgroup_storage_size,
            name: info.name,
            adapter,
        }
    }

    /// The optional features that a device of this adapter is opened with.
    pub fn features(&self) -> &'static [&'static str] {
        match has_subgroups(&self.adapter) {
            true => &["subgroup"],
            false => &[],
        }
    }
}

fn has_subgroups(adapter: &wgpu::Adapter) -> bool {
    adapter.features().contains(wgpu::Features::SUBGROUP)
}

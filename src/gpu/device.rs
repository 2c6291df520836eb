//! Adapters, and a device with what this program needs to know about it: limits, pipelines, its fate.

use super::module::module;
use super::probe;
use crate::error::{Error, Kind, Result, bail};
use crate::kernel::{Access, Kernel, Team, Variant};
use crate::shader::compose;
use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// No binding is larger than this, whatever the device offers: WGSL indexes with 32 bits.
pub const MAX_BINDING: u64 = (1 << 31) - 4;

/// What an adapter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceKind {
    /// A card of its own.
    Discrete,
    /// Part of the processor, sharing its memory.
    Integrated,
    /// Hardware seen through a virtual machine, or of an unknown sort.
    Other,
    /// A program that behaves like a card.
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

/// An adapter this machine offers.
pub struct Adapter {
    adapter: wgpu::Adapter,
    /// Its name.
    pub name: String,
    /// Vulkan, Metal or DX12, in lower case.
    pub backend: String,
    /// What it is.
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

fn driver(info: &wgpu::AdapterInfo) -> String {
    format!("{} {}", info.driver, info.driver_info).trim().to_string()
}

/// The adapters of this machine, best first: discrete, integrated, other, software.
pub fn adapters() -> Vec<Adapter> {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = wgpu::Backends::VULKAN | wgpu::Backends::METAL | wgpu::Backends::DX12;
    // Explicit, so that a debug build of the host changes nothing.
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
        let subgroups = adapter.features().contains(wgpu::Features::SUBGROUP);
        Adapter {
            name: info.name.clone(),
            backend: format!("{:?}", info.backend).to_lowercase(),
            kind: match info.device_type {
                wgpu::DeviceType::DiscreteGpu => DeviceKind::Discrete,
                wgpu::DeviceType::IntegratedGpu => DeviceKind::Integrated,
                wgpu::DeviceType::Cpu => DeviceKind::Software,
                wgpu::DeviceType::VirtualGpu | wgpu::DeviceType::Other => DeviceKind::Other,
            },
            driver: driver(&info),
            subgroup: if subgroups {
                [info.subgroup_min_size, info.subgroup_max_size]
            } else {
                [0, 0]
            },
            max_buffer: limits.max_buffer_size,
            max_binding: limits.max_storage_buffer_binding_size,
            max_workgroup_bytes: limits.max_compute_workgroup_storage_size,
            adapter,
        }
    }

    /// The optional features in use where the adapter has them.
    pub fn features(&self) -> Vec<&'static str> {
        let features = self.adapter.features();
        let named = [
            (wgpu::Features::SUBGROUP, "subgroup"),
            (wgpu::Features::SHADER_F16, "shader_f16"),
            (wgpu::Features::TIMESTAMP_QUERY, "timestamp_query"),
            (wgpu::Features::PIPELINE_CACHE, "pipeline_cache"),
        ];
        named
            .into_iter()
            .filter(|(feature, _)| features.contains(*feature))
            .map(|(_, name)| name)
            .collect()
    }
}

/// Choices about a device, beyond which one.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceOptions {
    /// Compile shaders with bounds checks. The results are the same; this is for finding out.
    pub checked_shaders: bool,
    /// Exchange through workgroup memory even where subgroups would serve.
    pub force_tree: bool,
    /// Decode halves by integer arithmetic even where the driver does it right.
    pub force_exact_half: bool,
    /// Cut weights into segments of at most so many bytes.
    pub max_segment: Option<u64>,
    /// How long one submission may take before the device counts as stuck, and as lost. `None`: 60 seconds on hardware, where
    /// submissions are made to take a fraction of one, and for ever on software adapters.
    pub patience: Option<Duration>,
}

/// What [`DeviceOptions::patience`] is on hardware.
const PATIENCE: Duration = Duration::from_secs(60);

/// What became of a device. That it is lost explains whatever else went wrong.
#[derive(Default)]
struct Fate {
    lost: OnceLock<Error>,
    failed: OnceLock<Error>,
}

/// An open device.
pub struct Device {
    pub(super) device: wgpu::Device,
    pub(super) queue: wgpu::Queue,
    /// The adapter's name.
    pub name: String,
    /// The adapter's backend.
    pub backend: String,
    /// What the adapter is.
    pub kind: DeviceKind,
    /// Its driver and version.
    pub driver: String,
    options: DeviceOptions,
    team: Team,
    half_native: bool,
    steps_of_loops: Option<u32>,
    limits: wgpu::Limits,
    fate: Arc<Fate>,
    layouts: Mutex<HashMap<Kernel, Arc<(wgpu::BindGroupLayout, wgpu::PipelineLayout)>>>,
    pipelines: Mutex<HashMap<Variant, Arc<wgpu::ComputePipeline>>>,
    /// Pipelines made so far, and the microseconds that took.
    pub(super) compiled: AtomicU64,
    pub(super) compile_us: AtomicU64,
}

impl Device {
    /// Opens an adapter and tests it: how it decodes halves, how long its loops run, and how subgroups lie in a workgroup.
    ///
    /// Errors: `DeviceError` when the driver refuses, or when the adapter's limits are below what kernels need.
    pub fn open(adapter: &Adapter, options: DeviceOptions) -> Result<Device> {
        let features = wgpu::Features::SUBGROUP & adapter.adapter.features();
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("cmf-gpu"),
            required_features: features,
            required_limits: adapter.adapter.limits(),
            experimental_features: wgpu::ExperimentalFeatures::disabled(),
            memory_hints: wgpu::MemoryHints::MemoryUsage,
            trace: wgpu::Trace::Off,
        };
        let (device, queue) = pollster::block_on(adapter.adapter.request_device(&descriptor))
            .map_err(|err| Error::new(Kind::DeviceError, format!("{}: {err}", adapter.name)))?;
        Device::from_wgpu(device, queue, options)
    }

    /// Uses a device that the host application made. It should have been given the adapter's own limits and, where the
    /// adapter has it, the feature `SUBGROUP`; with less, large models may not fit or run slower.
    pub fn from_wgpu(device: wgpu::Device, queue: wgpu::Queue, options: DeviceOptions) -> Result<Device> {
        let info = device.adapter_info();
        let fate = Arc::new(Fate::default());
        let lost = fate.clone();
        device.set_device_lost_callback(move |reason, message| {
            let _ = lost.lost.set(Error::new(
                Kind::DeviceLost,
                format!("the device was lost ({reason:?}): {message}"),
            ));
        });
        let failed = fate.clone();
        device.on_uncaptured_error(Arc::new(move |err: wgpu::Error| {
            let _ = failed.failed.set(device_error(&err));
        }));
        let limits = device.limits();
        let needs = [
            (
                "threads in a workgroup",
                limits.max_compute_invocations_per_workgroup,
                256,
            ),
            (
                "bytes of workgroup memory",
                limits.max_compute_workgroup_storage_size,
                16384,
            ),
            (
                "storage buffers in a stage",
                limits.max_storage_buffers_per_shader_stage,
                8,
            ),
        ];
        for (what, has, wants) in needs {
            if has < wants {
                bail!(
                    DeviceError,
                    "{}: kernels need {wants} {what}, the device allows {has}",
                    info.name
                );
            }
        }
        let mut open = Device {
            name: info.name.clone(),
            backend: format!("{:?}", info.backend).to_lowercase(),
            kind: match info.device_type {
                wgpu::DeviceType::DiscreteGpu => DeviceKind::Discrete,
                wgpu::DeviceType::IntegratedGpu => DeviceKind::Integrated,
                wgpu::DeviceType::Cpu => DeviceKind::Software,
                wgpu::DeviceType::VirtualGpu | wgpu::DeviceType::Other => DeviceKind::Other,
            },
            driver: driver(&info),
            device,
            queue,
            options,
            team: Team::Tree,
            half_native: false,
            steps_of_loops: None,
            limits,
            fate,
            layouts: Mutex::default(),
            pipelines: Mutex::default(),
            compiled: AtomicU64::new(0),
            compile_us: AtomicU64::new(0),
        };
        open.half_native = !options.force_exact_half && probe::halves_are_exact(&open)?;
        open.steps_of_loops = probe::steps_of_loops(&open)?;
        let subgroups = open.device.features().contains(wgpu::Features::SUBGROUP);
        let size = info.subgroup_min_size;
        // A team is a fixed set of lanes, so the subgroup's size must be one number, and lanes must lie in order.
        let uniform = subgroups && size == info.subgroup_max_size && size.is_power_of_two() && size >= 4;
        if uniform && !options.force_tree && probe::lanes_are_in_order(&open, size)? {
            open.team = Team::Subgroup { lanes: size.min(32) };
        }
        Ok(open)
    }

    /// Whether the kernels of a plan come to their end on this device. Mesa's software Vulkan ends the loops of a thread after
    /// 65,535 steps in all, done or not; what then comes out is wrong and looks right.
    ///
    /// Errors: `DeviceError` for a plan whose context is too long for that.
    pub(super) fn check_loops(&self, plan: &crate::program::Plan) -> Result<()> {
        let Some(most) = self.steps_of_loops else {
            return Ok(());
        };
        let longest = plan.loop_steps();
        if longest > u64::from(most) {
            bail!(
                DeviceError,
                "the driver of {} ends a kernel's loops after {most} steps, and attention over a context of {} positions takes \
                 {longest}: a smaller --ctx helps",
                self.name,
                plan.ctx
            );
        }
        Ok(())
    }

    /// Steps after which its driver ends the loops of a thread, done or not; `None` for drivers that let them end.
    pub fn steps_of_loops(&self) -> Option<u32> {
        self.steps_of_loops
    }

    /// How teams are realised on this device.
    pub fn team(&self) -> Team {
        self.team
    }

    /// Largest piece of a weight that one binding may hold.
    pub fn max_binding(&self) -> u64 {
        let limit = self
            .limits
            .max_storage_buffer_binding_size
            .min(self.limits.max_buffer_size)
            .min(MAX_BINDING);
        self.options.max_segment.map_or(limit, |bytes| bytes.min(limit))
    }

    /// The variant of a kernel that this device runs.
    pub fn variant(&self, step: &crate::program::Step, kv: crate::kernel::Kv) -> Variant {
        let kernel = step.op.kernel();
        let row = kernel.row();
        Variant {
            kernel,
            planes: step.planes,
            kv: row.kv.then_some(kv),
            team: row.threads.is_none().then_some(self.team),
            columns: if kernel.is_wide() { step.columns } else { 1 },
            half_native: !step.planes.is_some_and(crate::dtype::planes::Planes::has_halves) || self.half_native,
        }
    }

    /// Fails if the device is lost or has reported an error that nobody asked for.
    pub fn check(&self) -> Result<()> {
        match self.fate.lost.get().or_else(|| self.fate.failed.get()) {
            Some(err) => Err(err.clone()),
            None => Ok(()),
        }
    }

    /// The error for something that the driver failed to do: that the device is lost, if it is, else `what`.
    pub(super) fn failure(&self, what: impl Into<String>) -> Error {
        // Whoever polls is told of a loss.
        let _ = self.device.poll(wgpu::PollType::Poll);
        match self.check() {
            Err(err) => err,
            Ok(()) => Error::new(Kind::DeviceError, what),
        }
    }

    /// Pipelines made so far, and the milliseconds that took.
    pub fn compile_counters(&self) -> (u64, f64) {
        (
            self.compiled.load(Ordering::Relaxed),
            self.compile_us.load(Ordering::Relaxed) as f64 / 1000.0,
        )
    }

    pub(super) fn layout(&self, kernel: Kernel) -> Arc<(wgpu::BindGroupLayout, wgpu::PipelineLayout)> {
        let mut layouts = lock(&self.layouts);
        layouts
            .entry(kernel)
            .or_insert_with(|| Arc::new(self.make_layout(kernel)))
            .clone()
    }

    fn make_layout(&self, kernel: Kernel) -> (wgpu::BindGroupLayout, wgpu::PipelineLayout) {
        let entry = |binding: usize, ty: wgpu::BufferBindingType| wgpu::BindGroupLayoutEntry {
            binding: binding as u32,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer {
                ty,
                has_dynamic_offset: false,
                min_binding_size: None,
            },
            count: None,
        };
        let mut entries = vec![entry(0, wgpu::BufferBindingType::Uniform)];
        entries.extend(kernel.row().bindings.iter().enumerate().map(|(i, &(_, access))| {
            entry(
                i + 1,
                wgpu::BufferBindingType::Storage {
                    read_only: access == Access::Read,
                },
            )
        }));
        let layout = self.device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
            label: Some(kernel.stem()),
            entries: &entries,
        });
        let pipeline_layout = self.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some(kernel.stem()),
            bind_group_layouts: &[Some(&layout)],
            immediate_size: 0,
        });
        (layout, pipeline_layout)
    }

    /// Makes the pipelines of these variants, on as many threads as there are cores, the first ones first.
    ///
    /// Errors: `DeviceError` with the kernel's name when the driver refuses one.
    pub fn compile(&self, variants: &[Variant]) -> Result<()> {
        let missing: Vec<_> = {
            let pipelines = lock(&self.pipelines);
            variants
                .iter()
                .filter(|variant| !pipelines.contains_key(variant))
                .collect()
        };
        let next = std::sync::atomic::AtomicUsize::new(0);
        let threads = std::thread::available_parallelism()
            .map_or(1, |n| n.get())
            .min(missing.len());
        let work = || -> Result<()> {
            while let Some(variant) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
                let pipeline = self.make_pipeline(variant)?;
                lock(&self.pipelines).insert(**variant, Arc::new(pipeline));
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            workers.into_iter().try_for_each(|worker| match worker.join() {
                Ok(result) => result,
                Err(_) => bail!(DeviceError, "the driver's shader compiler crashed"),
            })
        })
    }

    /// A pipeline made by [`Device::compile`].
    pub(super) fn pipeline(&self, variant: &Variant) -> Result<Arc<wgpu::ComputePipeline>> {
        match lock(&self.pipelines).get(variant) {
            Some(pipeline) => Ok(pipeline.clone()),
            None => bail!(DeviceError, "pipeline {} was not compiled", variant.name()),
        }
    }

    fn make_pipeline(&self, variant: &Variant) -> Result<wgpu::ComputePipeline> {
        let name = variant.name();
        let layout = self.layout(variant.kernel);
        self.make(&name, &compose(variant), &layout.1)
    }

    /// One module, one entry point, one pipeline.
    pub(super) fn make(&self, name: &str, text: &str, layout: &wgpu::PipelineLayout) -> Result<wgpu::ComputePipeline> {
        let start = Instant::now();
        let guard = self.scope();
        let descriptor = wgpu::ShaderModuleDescriptor {
            label: Some(name),
            source: wgpu::ShaderSource::Naga(Cow::Owned(module(name, text)?)),
        };
        let module = if self.options.checked_shaders {
            self.device.create_shader_module(descriptor)
        } else {
            self.trusted(descriptor)
        };
        let compilation_options = wgpu::PipelineCompilationOptions {
            zero_initialize_workgroup_memory: self.options.checked_shaders,
            ..Default::default()
        };
        let pipeline = self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(name),
            layout: Some(layout),
            module: &module,
            entry_point: Some("main"),
            compilation_options,
            cache: None,
        });
        guard.finish().map_err(|err| err.context(format!("kernel {name}")))?;
        self.compiled.fetch_add(1, Ordering::Relaxed);
        self.compile_us
            .fetch_add(start.elapsed().as_micros() as u64, Ordering::Relaxed);
        Ok(pipeline)
    }

    #[expect(
        unsafe_code,
        reason = "bounds and loop checks cost up to a tenth of a kernel's speed"
    )]
    fn trusted(&self, descriptor: wgpu::ShaderModuleDescriptor<'_>) -> wgpu::ShaderModule {
        // SAFETY: every text comes from this crate's shader files. Loops are bounded by constants, parameters or sizes that
        // the plan made from buffers of at least that size; divisors are constants or checked dimensions; the tests run
        // every kernel with checks on and off and compare the bits.
        unsafe {
            self.device
                .create_shader_module_trusted(descriptor, wgpu::ShaderRuntimeChecks::unchecked())
        }
    }

    /// Waits until a submission is done. Errors: `DeviceLost` when that takes longer than a device has.
    pub(super) fn wait(&self, submission: wgpu::SubmissionIndex) -> Result<()> {
        let usual = (self.kind != DeviceKind::Software).then_some(PATIENCE);
        let timeout = self.options.patience.or(usual);
        let wait = wgpu::PollType::Wait {
            submission_index: Some(submission),
            timeout,
        };
        match self.device.poll(wait) {
            Ok(_) => {}
            Err(wgpu::PollError::Timeout) => {
                let _ = self.fate.lost.set(Error::new(
                    Kind::DeviceLost,
                    format!(
                        "{}: nothing came of what was submitted for {:?}; the device is taken for stuck",
                        self.name,
                        timeout.unwrap_or_default()
                    ),
                ));
            }
            Err(err) => return Err(self.failure(format!("waiting for the device: {err}"))),
        }
        self.check()
    }

    /// Watches for out-of-memory, validation and internal errors on this thread until finished.
    pub(super) fn scope(&self) -> Scope {
        let filters = [
            wgpu::ErrorFilter::Internal,
            wgpu::ErrorFilter::OutOfMemory,
            wgpu::ErrorFilter::Validation,
        ];
        Scope {
            guards: filters.map(|filter| self.device.push_error_scope(filter)).into(),
        }
    }
}

/// Error scopes that are open.
pub(super) struct Scope {
    guards: Vec<wgpu::ErrorScopeGuard>,
}

impl Scope {
    /// Closes the scopes. Errors: the first thing that was caught.
    pub(super) fn finish(mut self) -> Result<()> {
        let mut caught = None;
        while let Some(guard) = self.guards.pop() {
            caught = caught.or(pollster::block_on(guard.pop()));
        }
        match caught {
            Some(err) => Err(device_error(&err)),
            None => Ok(()),
        }
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        // Scopes close in the reverse of their order.
        while self.guards.pop().is_some() {}
    }
}

/// Our error for one of wgpu's.
pub(super) fn device_error(err: &wgpu::Error) -> Error {
    match err {
        wgpu::Error::OutOfMemory { .. } => Error::new(
            Kind::OutOfMemory,
            "the device has no memory left; a smaller --ctx or a smaller quantisation would help",
        ),
        wgpu::Error::Validation { description, .. } | wgpu::Error::Internal { description, .. } => {
            let mut lines = description.lines().map(str::trim).filter(|line| !line.is_empty());
            Error::new(Kind::DeviceError, lines.by_ref().take(6).collect::<Vec<_>>().join("; "))
        }
    }
}

/// A lock that a panic elsewhere does not poison: what it guards is valid after every statement.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

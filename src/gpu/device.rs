//! A device with its limits, properties, pipelines and status.

use super::adapter::{self, DeviceKind};
use super::pipelines::Pipelines;
use super::scope::{Scope, device_error};
use crate::dtype::planes::Planes;
use crate::error::{Error, Kind, Result, bail, error};
use crate::graph::{Graph, Step};
use crate::op::Kv;
use crate::shader::{Team, Variant};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Largest size of a binding in bytes, even if the device allows more: WGSL indexes with 32 bits.
pub const MAX_BINDING: u64 = (1 << 31) - 4;

/// The default of [`DeviceOptions::timeout`] on hardware.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Settings of a device.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceOptions {
    /// Compile shaders with bounds checks, for debugging. The results are the same.
    pub checked_shaders: bool,
    /// Exchange values through workgroup memory even if the device has subgroup operations.
    pub force_tree: bool,
    /// Decode f16 by integer arithmetic even if the driver's conversion is exact.
    pub force_exact_half: bool,
    /// Largest size of a segment of a weight, in bytes.
    pub max_segment: Option<u64>,
    /// How long one submission may take before the device is treated as hung and lost. `None`: 60 seconds on hardware,
    /// where a submission takes a fraction of a second, and no limit on software adapters.
    pub timeout: Option<Duration>,
}

/// Properties of a device that test kernels find out.
pub(super) struct Properties {
    /// How teams are realised.
    pub team: Team,
    /// Whether `unpack2x16float` is exact.
    pub half_native: bool,
    /// Iterations after which the driver ends the loops of a thread.
    pub loop_limit: Option<u32>,
}

/// The first errors that a device reported outside of any call.
#[derive(Default)]
struct Status {
    /// Set when the device is lost, which explains every other failure.
    lost: OnceLock<Error>,
    failed: OnceLock<Error>,
}

/// An open device.
pub struct Device {
    pub(super) device: wgpu::Device,
    pub(super) queue: wgpu::Queue,
    pub(super) pipelines: Pipelines,
    /// The adapter's name.
    pub name: String,
    /// The adapter's backend.
    pub backend: String,
    /// The adapter's type.
    pub kind: DeviceKind,
    /// Its driver and version.
    pub driver: String,
    options: DeviceOptions,
    properties: Properties,
    limits: wgpu::Limits,
    status: Arc<Status>,
}

impl Device {
    /// A device with properties that are safe on every device. Errors: `DeviceError` for limits below those that
    /// kernels need.
    pub(super) fn untested(device: wgpu::Device, queue: wgpu::Queue, options: DeviceOptions) -> Result<Device> {
        let info = device.adapter_info();
        let limits = device.limits();
        check_limits(&info.name, &limits)?;
        Ok(Device {
            status: watch(&device),
            pipelines: Pipelines::new(device.clone(), options.checked_shaders),
            device,
            queue,
            backend: adapter::backend(&info),
            kind: adapter::kind(&info),
            driver: adapter::driver(&info),
            name: info.name,
            options,
            properties: Properties {
                team: Team::Tree,
                half_native: false,
                loop_limit: None,
            },
            limits,
        })
    }

    /// The same device with tested properties.
    pub(super) fn with(self, properties: Properties) -> Device {
        Device { properties, ..self }
    }

    /// Checks that all kernels of a graph finish their loops on this device. Mesa's software Vulkan ends the loops of a
    /// thread after 65,535 iterations in total. Then the results are wrong, without any error.
    ///
    /// Errors: `DeviceError` if the context of the graph is too long.
    pub(super) fn check_loops(&self, graph: &Graph) -> Result<()> {
        let longest = graph.loop_steps();
        match self.properties.loop_limit {
            Some(limit) if longest > u64::from(limit) => bail!(
                DeviceError,
                "the driver of {} ends a kernel's loops after {limit} iterations, attention over this context needs \
                 {longest}; a shorter context would help",
                self.name
            ),
            _ => Ok(()),
        }
    }

    /// Iterations after which the driver ends the loops of a thread, finished or not; `None` for drivers that do not.
    pub fn loop_limit(&self) -> Option<u32> {
        self.properties.loop_limit
    }

    /// Whether its memory is that of the host.
    pub fn shares_host_memory(&self) -> bool {
        matches!(self.kind, DeviceKind::Software | DeviceKind::Integrated)
    }

    /// How teams are realised on this device.
    pub fn team(&self) -> Team {
        self.properties.team
    }

    /// Largest size of a weight's binding, in bytes.
    pub fn max_binding(&self) -> u64 {
        let binding = self.limits.max_storage_buffer_binding_size;
        let limit = binding.min(self.limits.max_buffer_size).min(MAX_BINDING);
        self.options.max_segment.map_or(limit, |bytes| bytes.min(limit))
    }

    /// The variant that runs a step on this device.
    pub fn variant(&self, step: &Step, kv: Kv, masked: bool) -> Variant {
        let kernel = step.op.kernel();
        let spec = kernel.spec();
        Variant {
            kernel,
            planes: step.planes,
            kv: spec.has_kv().then_some(kv),
            team: Variant::team_of(spec, self.properties.team),
            width: if spec.is_wide() { step.width } else { 1 },
            masked,
            half_native: !step.planes.is_some_and(Planes::has_halves) || self.properties.half_native,
        }
    }

    /// The variants that a graph's programs need, each once: the plain ones in the order of the steps, then the masked
    /// ones.
    pub(super) fn variants(&self, graph: &Graph) -> Vec<Variant> {
        let steps = || graph.programs.iter().flat_map(|program| &program.steps);
        let plain = steps().map(|step| self.variant(step, graph.kv, false));
        let masked = steps().filter(|step| step.masked.is_some());
        let mut variants = Vec::new();
        for variant in plain.chain(masked.map(|step| self.variant(step, graph.kv, true))) {
            if !variants.contains(&variant) {
                variants.push(variant);
            }
        }
        variants
    }

    /// Fails if the device is lost or has reported an error outside of any call.
    pub fn check(&self) -> Result<()> {
        let err = self.status.lost.get().or_else(|| self.status.failed.get());
        err.map_or(Ok(()), |err| Err(err.clone()))
    }

    /// The error for an operation that failed: if the device is lost, the error that says so, else a `DeviceError` with
    /// `message`.
    pub(super) fn failure(&self, message: impl Into<String>) -> Error {
        // A poll runs the callback that reports a loss. Its own failure adds nothing.
        let _ = self.device.poll(wgpu::PollType::Poll);
        self.check()
            .err()
            .unwrap_or_else(|| Error::new(Kind::DeviceError, message))
    }

    /// Waits until a submission is done. Errors: `DeviceLost` when that takes longer than [`DeviceOptions::timeout`].
    pub(super) fn wait(&self, submission: wgpu::SubmissionIndex) -> Result<()> {
        let default = (self.kind != DeviceKind::Software).then_some(TIMEOUT);
        let timeout = self.options.timeout.or(default);
        let wait = wgpu::PollType::Wait {
            submission_index: Some(submission),
            timeout,
        };
        match self.device.poll(wait) {
            Ok(_) => self.check(),
            Err(wgpu::PollError::Timeout) => {
                let (name, timeout) = (&self.name, timeout.unwrap_or_default());
                let _ = self.status.lost.set(error!(
                    DeviceLost,
                    "{name}: a submission did not finish within {timeout:?}; the device is treated as hung"
                ));
                self.check()
            }
            Err(err) => Err(self.failure(format!("waiting for the device: {err}"))),
        }
    }

    /// Catches the errors of this thread's calls until the scope is finished.
    pub(super) fn scope(&self) -> Scope {
        Scope::open(&self.device)
    }
}

/// Records from now on that a device is lost or reports an error.
fn watch(device: &wgpu::Device) -> Arc<Status> {
    let status = Arc::new(Status::default());
    let lost = status.clone();
    device.set_device_lost_callback(move |reason, message| {
        let err = error!(DeviceLost, "the device was lost ({reason:?}): {message}");
        let _ = lost.lost.set(err);
    });
    let failed = status.clone();
    device.on_uncaptured_error(Arc::new(move |err: wgpu::Error| {
        let _ = failed.failed.set(device_error(&err));
    }));
    status
}

fn check_limits(name: &str, limits: &wgpu::Limits) -> Result<()> {
    let threads = limits.max_compute_invocations_per_workgroup;
    let bytes = limits.max_compute_workgroup_storage_size;
    let buffers = limits.max_storage_buffers_per_shader_stage;
    let needed = [
        ("threads in a workgroup", threads, 256),
        ("bytes of workgroup memory", bytes, 16384),
        ("storage buffers in a stage", buffers, 8),
    ];
    for (limit, has, needs) in needed {
        if has < needs {
            bail!(
                DeviceError,
                "{name}: kernels need {needs} {limit}, the device allows {has}"
            );
        }
    }
    Ok(())
}

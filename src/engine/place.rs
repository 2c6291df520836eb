//! A network on a device: planned, compared with the memory there is, uploaded, ready to run. No text here.

use super::paging::{self, Fitted};
use super::task::{self, Task};
use crate::budget::available_memory;
use crate::container::{Arch, TensorId, Tensors};
use crate::error::{Result, bail};
use crate::gpu::{self, Device, DeviceKind, DeviceOptions, GpuExecutor, MAX_BINDING};
use crate::host::HostExecutor;
use crate::kernel::MAX_COLUMNS;
use crate::model::{self, Model};
use crate::options::{DeviceChoice, LoadOptions, Speculation, TaskChoice};
use crate::program::{Executor, ExpertOptions, Plan, PlanOptions};
use crate::session::Session;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

/// Columns of a prefill chunk on hardware, and on a software adapter or the CPU reference.
const CHUNK_HARDWARE: u32 = 256;
const CHUNK_SOFTWARE: u32 = 64;
/// Drafts a round when the caller does not say: with the token before them they fill a width of the kernels.
pub const AUTO_DRAFTS: u32 = 3;

/// What runs where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Name of the device.
    pub name: String,
    /// vulkan, metal, dx12, or cpu.
    pub backend: String,
    /// discrete, integrated, other, software, or cpu.
    pub kind: String,
    /// The driver and its version; nothing for the CPU reference.
    pub driver: String,
    /// Why it is not what might have been expected.
    pub notice: Option<String>,
    /// Layers that run there: all of them.
    pub layers: usize,
    /// Bytes of weights there.
    pub weight_bytes: u64,
    /// Bytes of caches, activations and state there.
    pub buffer_bytes: u64,
    /// Most experts of a layer that are there at a time; `None`: all are.
    pub expert_slots: Option<usize>,
    /// Positions of the context.
    pub ctx: u32,
}

/// Bytes uploaded so far, and in all.
pub type LoadProgress<'a> = &'a mut dyn FnMut(u64, u64) -> ControlFlow<()>;

/// A network that can run.
pub struct Placed {
    /// The network.
    pub model: Model,
    /// Its programs on the device, and the conversation's caches.
    pub session: Session,
    /// What runs where.
    pub placement: Placement,
    pub(super) task: Task,
    device: Option<Arc<Device>>,
    options: LoadOptions,
    /// Most bytes that the plan may take, where the device did not give more.
    room: Option<u64>,
}

impl Placed {
    /// Puts the network that `arch` describes, with these tensors, on the device that the options name.
    ///
    /// Errors: as [`Placed::new`], and `NoAdapter`.
    pub fn open(
        arch: &Arch,
        tensors: Arc<dyn Tensors>,
        options: &LoadOptions,
        progress: LoadProgress,
    ) -> Result<Placed> {
        let network = Network::of(arch, &*tensors, options)?;
        // What is wrong with a model or a flag is found before a device is opened.
        let (device, notice) = open_device(options)?;
        Placed::finish(network, tensors, device, notice, options, progress)
    }

    /// Puts the network on `device`, or on the CPU reference without one.
    ///
    /// Errors: `UnsupportedModel`, `MissingTensor`, `UnsupportedTensorType`, `OutOfMemory`, `DeviceError`, `DeviceLost`, and
    /// `Interrupted` when `progress` ends it.
    pub fn new(
        arch: &Arch,
        tensors: Arc<dyn Tensors>,
        device: Option<Arc<Device>>,
        notice: Option<String>,
        options: &LoadOptions,
        progress: LoadProgress,
    ) -> Result<Placed> {
        let network = Network::of(arch, &*tensors, options)?;
        Placed::finish(network, tensors, device, notice, options, progress)
    }

    fn finish(
        network: Network,
        tensors: Arc<dyn Tensors>,
        device: Option<Arc<Device>>,
        notice: Option<String>,
        options: &LoadOptions,
        progress: LoadProgress,
    ) -> Result<Placed> {
        let Network { model, ctx } = network;
        let fitted = |drafts, room| {
            let all = PlanOptions {
                drafts,
                ..plan_options(options, device.as_deref(), ctx)
            };
            fitted(&model, &*tensors, &all, (options, device.as_deref(), room))
        };
        let mut given = (None, None);
        let planned = |room| {
            let (fitted, notice) = with_drafts(options, &model, &|drafts| fitted(drafts, room))?;
            given = (room, notice);
            Ok(fitted)
        };
        let mask = task::chosen(&model.masks, &options.task)?;
        let mut upload = |done, total| match progress(done, total) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => bail!(Interrupted, "loading was cancelled"),
        };
        let realise = |plan: &Plan| -> Result<(Arc<Plan>, Box<dyn Executor>)> {
            let plan = Arc::new(plan.with_mask(mask)?);
            let executor: Box<dyn Executor> = match &device {
                Some(device) => {
                    let mut executor = GpuExecutor::new(device.clone(), plan.clone(), &*tensors, &mut upload)?;
                    if !plan.paged.is_empty() {
                        executor.page_from(tensors.clone())?;
                    }
                    Box::new(executor)
                }
                None => Box::new(HostExecutor::new(plan.clone(), tensors.clone())?),
            };
            Ok((plan, executor))
        };
        let (fitted, (plan, executor)) = paging::settled(planned, realise)?;
        let mut task = Task::default();
        let (room, of_plan) = given;
        let of_task = task.enter(mask);
        let unlimited = match (&device, options.vram_mb) {
            (None, Some(_)) => Some(
                "--vram-mb limits the caches and buffers of the CPU reference; its weights stay in the file, and no expert is \
                 fetched"
                    .to_string(),
            ),
            _ => None,
        };
        let placement = Placement {
            name: device
                .as_ref()
                .map_or("CPU reference".into(), |device| device.name.clone()),
            backend: device.as_ref().map_or("cpu".into(), |device| device.backend.clone()),
            kind: device.as_ref().map_or("cpu".into(), |device| device.kind.name().into()),
            driver: device.as_ref().map_or(String::new(), |device| device.driver.clone()),
            notice: beyond_training(ctx, &model)
                .into_iter()
                .chain(notice)
                .chain(of_task)
                .chain(of_plan)
                .chain(unlimited)
                .reduce(|a, b| format!("{a}; {b}")),
            layers: model.layers.len(),
            weight_bytes: plan.weight_bytes(),
            buffer_bytes: plan.buffer_bytes(),
            expert_slots: fitted.experts.map(|[slots, _]| slots),
            ctx,
        };
        let mut session = Session::new(plan, executor);
        if options.speculation == Speculation::Auto {
            session.draft_only_while_it_pays();
        }
        Ok(Placed {
            model,
            session,
            placement,
            task,
            device,
            options: options.clone(),
            room,
        })
    }

    /// Runs the same network with other tensors from now on, and under the mask of `task`: those that differ, `changed`, in
    /// order, are read. What is cached is forgotten. Returns what should be said about the task, once.
    ///
    /// Errors: as [`Placed::new`]. After one nothing has changed but the cache, unless the executor was half done: then it
    /// runs nothing until this has been done once more, without an error.
    pub fn replace(
        &mut self,
        arch: &Arch,
        tensors: Arc<dyn Tensors>,
        changed: &[TensorId],
        task: &TaskChoice,
    ) -> Result<Option<String>> {
        let model = model::bind(arch, &*tensors)?;
        let (device, before) = (self.device.as_deref(), self.session.plan());
        let all = PlanOptions {
            drafts: before.drafts,
            ..plan_options(&self.options, device, before.ctx)
        };
        let mask = task::chosen(&model.masks, task)?;
        let fitted = fitted(&model, &*tensors, &all, (&self.options, device, self.room))?;
        let plan = Arc::new(fitted.plan.with_mask(mask)?);
        let next = plan.clone();
        self.session
            .change(next, |executor| executor.replace(plan, tensors, changed))?;
        self.placement.weight_bytes = self.session.plan().weight_bytes();
        self.placement.buffer_bytes = self.session.plan().buffer_bytes();
        self.placement.expert_slots = fitted.experts.map(|[slots, _]| slots);
        let notice = self.task.enter(mask);
        self.model = model;
        Ok(notice)
    }
}

/// A network, and for how many positions it is to be placed.
struct Network {
    model: Model,
    ctx: u32,
}

impl Network {
    fn of(arch: &Arch, tensors: &dyn Tensors, options: &LoadOptions) -> Result<Network> {
        let model = model::bind(arch, tensors)?;
        let ctx = options.positions(model.max_positions)?;
        task::chosen(&model.masks, &options.task)?;
        Ok(Network { model, ctx })
    }
}

/// What should be said about a context that a model was not trained for.
fn beyond_training(ctx: u32, model: &Model) -> Option<String> {
    let trained = model.max_positions.filter(|&trained| trained < ctx as usize)?;
    Some(format!(
        "the model was trained for {trained} positions, fewer than the context of {ctx}; what it says beyond them is not to \
         be trusted"
    ))
}

/// The device that the options ask for, `None` for the CPU reference, and what should be said about it.
///
/// Errors: `NoAdapter` when there is none such, with those there are; `DeviceError` when it cannot be opened.
pub fn open_device(options: &LoadOptions) -> Result<(Option<Arc<Device>>, Option<String>)> {
    let device_options = DeviceOptions {
        checked_shaders: options.checked_shaders,
        ..DeviceOptions::default()
    };
    if options.device == DeviceChoice::Cpu {
        return Ok((None, None));
    }
    let adapters = gpu::adapters();
    let hardware = || adapters.iter().find(|adapter| adapter.kind != DeviceKind::Software);
    let software = || adapters.iter().find(|adapter| adapter.kind == DeviceKind::Software);
    let names = || {
        adapters
            .iter()
            .map(|adapter| adapter.name.as_str())
            .collect::<Vec<_>>()
            .join(", ")
    };
    let mut notice = None;
    let adapter = match &options.device {
        DeviceChoice::Cpu => None,
        DeviceChoice::Auto => match (hardware(), software()) {
            (Some(adapter), _) => Some(adapter),
            (None, Some(adapter)) => {
                notice = Some("no GPU was found; using a software adapter, which is slow".to_string());
                Some(adapter)
            }
            (None, None) => {
                notice = Some(
                    "no GPU and no software adapter was found; using the CPU reference kernels, which are slow"
                        .to_string(),
                );
                None
            }
        },
        DeviceChoice::Gpu => match hardware() {
            Some(adapter) => Some(adapter),
            None => bail!(NoAdapter, "no hardware GPU was found; adapters: [{}]", names()),
        },
        DeviceChoice::Software => match software() {
            Some(adapter) => Some(adapter),
            None => bail!(NoAdapter, "no software adapter was found; adapters: [{}]", names()),
        },
        DeviceChoice::Index(index) => match adapters.get(*index) {
            Some(adapter) => Some(adapter),
            None => bail!(NoAdapter, "there is no adapter number {index}; adapters: [{}]", names()),
        },
        DeviceChoice::Name(part) => {
            let matches = |name: &str| name.to_lowercase().contains(&part.to_lowercase());
            match adapters.iter().find(|adapter| matches(&adapter.name)) {
                Some(adapter) => Some(adapter),
                None => bail!(
                    NoAdapter,
                    "no adapter's name contains '{part}'; adapters: [{}]",
                    names()
                ),
            }
        }
    };
    match adapter {
        Some(adapter) => Ok((Some(Arc::new(Device::open(adapter, device_options)?)), notice)),
        None => Ok((None, notice)),
    }
}

/// A network that is planned and not placed.
pub struct Planned {
    /// The network.
    pub model: Model,
    /// Its programs.
    pub plan: Plan,
    /// The task whose mask they are under.
    pub task: Option<String>,
    /// What should be said about it.
    pub notice: Option<String>,
}

/// The plan that a GPU with the usual limits gets, under the mask that the options choose: no device is opened, nothing is
/// allocated, and of most types no weight is read.
///
/// Errors: as [`Placed::new`], less what a device has to say.
pub fn planned(arch: &Arch, tensors: &dyn Tensors, options: &LoadOptions) -> Result<Planned> {
    let Network { model, ctx } = Network::of(arch, tensors, options)?;
    let planned = |drafts| {
        let all = PlanOptions {
            drafts,
            ..plan_options_for(options, true, MAX_BINDING, ctx)
        };
        paging::fitted(&model, tensors, &all, true, options.vram_mb, &|plan| {
            check_limit(options, plan.weight_bytes(), plan)
        })
    };
    let (fitted, of_plan) = with_drafts(options, &model, &planned)?;
    let mask = task::chosen(&model.masks, &options.task)?;
    let plan = fitted.plan.with_mask(mask)?;
    let mut entered = Task::default();
    let notice = task::together(of_plan, entered.enter(mask));
    Ok(Planned {
        model,
        plan,
        task: entered.active,
        notice,
    })
}

/// The plan that the options and the device have memory for; of the device no more than `room` bytes.
fn fitted(
    model: &Model,
    tensors: &dyn Tensors,
    all: &PlanOptions,
    (options, device, room): (&LoadOptions, Option<&Device>, Option<u64>),
) -> Result<Fitted> {
    paging::fitted(model, tensors, all, device.is_some(), options.vram_mb, &|plan| {
        let need = plan.weight_bytes() + plan.buffer_bytes();
        if room.is_some_and(|room| need > room) {
            bail!(
                OutOfMemory,
                "the plan needs {} MiB, more than the device has left",
                mib(need)
            );
        }
        check_budget(options, device, plan)
    })
}

fn plan_options(options: &LoadOptions, device: Option<&Device>, ctx: u32) -> PlanOptions {
    let hardware = device.is_some_and(|device| device.kind != DeviceKind::Software);
    let max_binding = device.map_or(u64::MAX / 2, Device::max_binding);
    plan_options_for(options, hardware, max_binding, ctx)
}

fn plan_options_for(options: &LoadOptions, hardware: bool, max_binding: u64, ctx: u32) -> PlanOptions {
    PlanOptions {
        ctx,
        // No longer than the context, in whole groups of 8.
        chunk: if hardware { CHUNK_HARDWARE } else { CHUNK_SOFTWARE }.min(ctx.div_ceil(8).max(1).saturating_mul(8)),
        kv: options.kv,
        max_binding,
        all_logits: options.all_logits,
        drafts: 0,
        experts: ExpertOptions {
            counted: options.count_routes,
            slots: None,
        },
    }
}

/// The plan with as many drafts as the options ask for, made by `planned`, or without where that cannot be; and what should
/// be said about it.
///
/// Errors: `Usage` for a number of drafts that no round has, and those of `planned`.
fn with_drafts(
    options: &LoadOptions,
    model: &Model,
    planned: &dyn Fn(u32) -> Result<Fitted>,
) -> Result<(Fitted, Option<String>)> {
    let with = |fitted: Fitted, said: Option<String>| {
        let notice = task::together(said, fitted.notice());
        Ok((fitted, notice))
    };
    let drafts = drafts(options, model)?;
    if drafts != 0 && options.count_routes && model.has_experts() {
        let said = "nothing is drafted while it is counted how often experts are chosen";
        return with(planned(0)?, Some(said.into()));
    }
    let err = match planned(drafts) {
        Err(err) if drafts != 0 => err,
        other => return with(other?, None),
    };
    match (planned(0), options.speculation) {
        (Ok(fitted), _) if fitted.experts.is_some() => {
            with(fitted, Some("nothing is drafted while experts are fetched".into()))
        }
        // Nobody asked for drafts: what has no room for them runs without.
        (Ok(fitted), Speculation::Auto) => with(fitted, Some(format!("the draft head is not used: {}", err.message))),
        // What is wrong without drafts is what is wrong.
        (Err(undrafted), _) => Err(undrafted),
        _ => Err(err),
    }
}

/// Most drafts of a round. Errors: `Usage` for a number that no round has.
fn drafts(options: &LoadOptions, model: &Model) -> Result<u32> {
    match options.speculation {
        Speculation::Off => Ok(0),
        Speculation::Auto if model.mtp.is_some() => Ok(AUTO_DRAFTS),
        Speculation::Auto => Ok(0),
        Speculation::Drafts(drafts) if (1..MAX_COLUMNS).contains(&drafts) => Ok(drafts),
        Speculation::Drafts(drafts) => bail!(Usage, "{drafts} drafts a round, wanted 1 to {}", MAX_COLUMNS - 1),
    }
}

/// Compares a plan with the memory there is, before anything is allocated. Errors: `OutOfMemory`, with both sizes.
pub fn check_budget(options: &LoadOptions, device: Option<&Device>, plan: &Plan) -> Result<()> {
    let weights = if device.is_some() { plan.weight_bytes() } else { 0 };
    let need = weights + plan.buffer_bytes();
    check_limit(options, weights, plan)?;
    let shares_host_memory =
        device.is_none_or(|device| matches!(device.kind, DeviceKind::Software | DeviceKind::Integrated));
    if shares_host_memory
        && let Some(free) = available_memory(Path::new("/"))
        && need > free
    {
        bail!(
            OutOfMemory,
            "the plan needs {} MiB, {} MiB are free; {}",
            mib(need),
            mib(free),
            help(weights, free)
        );
    }
    Ok(())
}

/// Compares a plan, of whose weights so many bytes are on the device, with what the options allow. Errors: `OutOfMemory`.
fn check_limit(options: &LoadOptions, weights: u64, plan: &Plan) -> Result<()> {
    let need = weights + plan.buffer_bytes();
    if let Some(limit) = options.vram_mb
        && need > limit.saturating_mul(1 << 20)
    {
        bail!(
            OutOfMemory,
            "the plan needs {} MiB, --vram-mb allows {limit}; {}",
            mib(need),
            help(weights, limit.saturating_mul(1 << 20))
        );
    }
    Ok(())
}

fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

/// What could be done about too little memory.
fn help(weights: u64, have: u64) -> &'static str {
    match weights > have {
        true => "the weights alone need more, a smaller quantisation would help",
        false => "a smaller --ctx would help",
    }
}

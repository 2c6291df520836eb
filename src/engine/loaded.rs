//! A network on a device, ready to run. Knows no text.

use super::device::open_device;
use super::planner::{Planner, Target};
use super::task::{ActiveTask, find_mask};
use crate::error::{Result, bail};
use crate::gpu::{Device, GpuExecutor};
use crate::graph::Executor;
use crate::host::HostExecutor;
use crate::lm::Plan;
use crate::lm::run::Session;
use crate::model::{self, Model};
use crate::notice::Notice;
use crate::options::{LoadOptions, Speculation, TaskChoice};
use crate::source::{Arch, TensorId, Tensors};
use std::ops::ControlFlow;
use std::sync::Arc;

/// The device that runs a model, and the memory in use.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct DeviceReport {
    /// Name of the device.
    pub name: String,
    /// vulkan, metal, dx12, or cpu.
    pub backend: String,
    /// discrete, integrated, other, software, or cpu.
    pub kind: String,
    /// The driver and its version; empty for the CPU reference.
    pub driver: String,
    /// Notices of loading.
    pub notices: Vec<Notice>,
    /// Layers that run on the device: all of them.
    pub layers: usize,
    /// Bytes of weights on the device.
    pub weight_bytes: u64,
    /// Bytes of caches, activations and state on the device.
    pub buffer_bytes: u64,
    /// Experts per layer that are on the device at a time; `None`: all of them.
    pub expert_slots: Option<usize>,
    /// Length of the context in tokens.
    pub ctx: u32,
}

impl DeviceReport {
    fn new(device: Option<&Device>, layers: usize, plan: &Plan, expert_slots: Option<usize>) -> DeviceReport {
        DeviceReport {
            weight_bytes: plan.graph.weight_bytes(),
            buffer_bytes: plan.graph.buffer_bytes(),
            expert_slots,
            ..DeviceReport::bare(device, layers, plan.ctx)
        }
    }

    /// A report without any memory in use.
    pub(super) fn bare(device: Option<&Device>, layers: usize, ctx: u32) -> DeviceReport {
        let of = |cpu: &str, name: fn(&Device) -> &str| device.map_or(cpu, name).to_owned();
        DeviceReport {
            name: of("CPU reference", |device| &device.name),
            backend: of("cpu", |device| &device.backend),
            kind: of("cpu", |device| device.kind.name()),
            driver: of("", |device| &device.driver),
            notices: Vec::new(),
            layers,
            weight_bytes: 0,
            buffer_bytes: 0,
            expert_slots: None,
            ctx,
        }
    }
}

/// Receives the number of bytes uploaded so far and in all, and may cancel loading.
pub type LoadProgress<'a> = &'a mut dyn FnMut(u64, u64) -> ControlFlow<()>;

/// A network on a device.
pub struct LoadedModel {
    /// The network.
    pub model: Model,
    /// Its programs on the device, and the caches of the conversation.
    pub session: Session,
    /// The device and its memory.
    pub report: DeviceReport,
    pub(super) task: ActiveTask,
    device: Option<Arc<Device>>,
    options: LoadOptions,
    /// Most bytes of a plan, if the device had no memory for a larger one.
    limit: Option<u64>,
}

impl LoadedModel {
    /// Loads the network of `arch` and `tensors` on the device that the options choose.
    ///
    /// Errors: as [`LoadedModel::new`], and `NoAdapter`.
    pub fn open(
        arch: &Arch,
        tensors: Arc<dyn Tensors>,
        options: &LoadOptions,
        progress: LoadProgress,
    ) -> Result<LoadedModel> {
        LoadedModel::load(arch, tensors, || open_device(options), options, progress)
    }

    /// Loads the network on `device`, or on the CPU reference without one.
    ///
    /// Errors: `UnsupportedModel`, `MissingTensor`, `UnsupportedTensorType`, `OutOfMemory`, `DeviceError`, `DeviceLost`, and
    /// `Interrupted` when `progress` cancels it.
    pub fn new(
        arch: &Arch,
        tensors: Arc<dyn Tensors>,
        device: Option<Arc<Device>>,
        options: &LoadOptions,
        progress: LoadProgress,
    ) -> Result<LoadedModel> {
        LoadedModel::load(arch, tensors, || Ok((device, None)), options, progress)
    }

    /// Plans within the memory of the device that `open` returns, uploads the weights, and reports.
    fn load(
        arch: &Arch,
        tensors: Arc<dyn Tensors>,
        open: impl FnOnce() -> Result<(Option<Arc<Device>>, Option<Notice>)>,
        options: &LoadOptions,
        progress: LoadProgress,
    ) -> Result<LoadedModel> {
        let model = model::bind(arch, &*tensors)?;
        let ctx = options.positions(model.max_positions)?;
        let mask = find_mask(&model.masks, &options.task)?;
        // Errors in the model or the options come before a device is opened.
        let (device, notice) = open()?;
        let mut planner = Planner {
            model: &model,
            tensors: &*tensors,
            options,
            target: Target::of(device.as_deref()),
            ctx,
            limit: None,
        };
        let (fitted, (plan, executor)) = planner.plan_and_upload(|plan| {
            let plan = plan.with_mask(mask)?;
            let executor = upload(&plan, &tensors, device.as_ref(), progress)?;
            Ok((plan, executor))
        })?;
        let limit = planner.limit;
        let mut task = ActiveTask::default();
        let mut report = DeviceReport::new(device.as_deref(), model.layers.len(), &plan, fitted.expert_slots);
        let trained = model.max_positions.filter(|&trained| trained < ctx as usize);
        let beyond_training = trained.map(|trained| Notice::BeyondTraining { ctx, trained });
        report.notices.extend(beyond_training.into_iter().chain(notice));
        report.notices.extend(task.activate(mask));
        report.notices.extend(fitted.notices);
        if device.is_none() && options.vram_mb.is_some() {
            report.notices.push(Notice::WeightsNotLimited);
        }
        let mut session = Session::new(plan, executor);
        if options.speculation == Speculation::Auto {
            session.draft_only_while_it_pays();
        }
        Ok(LoadedModel {
            model,
            session,
            report,
            task,
            device,
            options: options.clone(),
            limit,
        })
    }

    /// Replaces tensors and activates the mask of `task`. Only the tensors of `changed`, in ascending order, differ. The
    /// cache is cleared. Returns the notices of the task.
    ///
    /// Errors: as [`LoadedModel::new`]. After an error only the cache has changed, unless the executor failed half-way: then
    /// it runs nothing until a later call succeeds.
    pub fn replace(
        &mut self,
        arch: &Arch,
        tensors: Arc<dyn Tensors>,
        changed: &[TensorId],
        task: &TaskChoice,
    ) -> Result<Vec<Notice>> {
        let model = model::bind(arch, &*tensors)?;
        let mask = find_mask(&model.masks, task)?;
        let before = self.session.plan();
        let planner = Planner {
            model: &model,
            tensors: &*tensors,
            options: &self.options,
            target: Target::of(self.device.as_deref()),
            ctx: before.ctx,
            limit: self.limit,
        };
        let fitted = planner.fit(before.drafts)?;
        let plan = fitted.plan.with_mask(mask)?;
        self.session.replace(plan, tensors, changed)?;
        let graph = &self.session.plan().graph;
        self.report.weight_bytes = graph.weight_bytes();
        self.report.buffer_bytes = graph.buffer_bytes();
        self.report.expert_slots = fitted.expert_slots;
        let notices = self.task.activate(mask);
        self.model = model;
        Ok(notices)
    }

    /// The task whose mask is active.
    pub fn task(&self) -> Option<&str> {
        self.task.name.as_deref()
    }

    /// Activates the mask of a task. Moves no weights and compiles nothing. Clears the cache, unless the mask is already
    /// active. Returns the notices of the task.
    ///
    /// Errors: `Usage` for an unknown task, with the names of all tasks; `UnsupportedModel` for a mask that the kernels
    /// cannot apply; those of the device. After the first two nothing has changed.
    pub fn set_task(&mut self, choice: &TaskChoice) -> Result<Vec<Notice>> {
        let mask = find_mask(&self.model.masks, choice)?;
        if mask.map(|mask| mask.name.as_str()) == self.task() {
            return Ok(Vec::new());
        }
        let plan = self.session.plan().with_mask(mask)?;
        let notices = self.task.activate(mask);
        self.session.select(plan)?;
        Ok(notices)
    }

    /// Calls `work` with no mask active. Clears the cache. Errors: those of `work` and of the device.
    pub(super) fn unmasked<T>(&mut self, work: impl FnOnce(&mut Session) -> Result<T>) -> Result<T> {
        if self.task.name.is_none() {
            return work(&mut self.session);
        }
        let masked = self.session.plan().clone();
        self.session.select(masked.with_mask(None)?)?;
        let result = work(&mut self.session);
        self.session.select(masked)?;
        result
    }
}

/// Creates the executor of a plan: uploads the weights to the device, or reads them from the file on the CPU reference.
fn upload(
    plan: &Plan,
    tensors: &Arc<dyn Tensors>,
    device: Option<&Arc<Device>>,
    progress: LoadProgress,
) -> Result<Box<dyn Executor>> {
    let (graph, selection, tensors) = (plan.graph.clone(), plan.selection.clone(), tensors.clone());
    let Some(device) = device else {
        return Ok(Box::new(HostExecutor::new(graph, selection, tensors)?));
    };
    let mut report = |done, total| match progress(done, total) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => bail!(Interrupted, "loading was cancelled"),
    };
    let executor = GpuExecutor::new(device.clone(), graph, selection, tensors, &mut report)?;
    Ok(Box::new(executor))
}

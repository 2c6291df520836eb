//! Planning: the programs of a network, with as many drafts and experts as the memory allows.

use super::task::{ActiveTask, find_mask};
use crate::budget::available_memory;
use crate::error::{Error, Kind, Result, bail};
use crate::gpu::{Device, DeviceKind, MAX_BINDING};
use crate::graph::Measured;
use crate::lm::{ExpertOptions, LowerOptions, Plan, lower};
use crate::model::{self, FeedForward, Model};
use crate::notice::Notice;
use crate::op::MAX_WIDTH;
use crate::options::{LoadOptions, Speculation};
use crate::source::{Arch, Tensors};
use std::path::Path;

/// Tokens of a prefill chunk on hardware.
const CHUNK_HARDWARE: u32 = 256;
/// Tokens of a prefill chunk on a software adapter or the CPU reference.
const CHUNK_SOFTWARE: u32 = 64;
/// Drafts per verify step by default: with the token before them they fill the tile width of the kernels.
pub const AUTO_DRAFTS: u32 = 3;

/// Where a plan will run.
#[derive(Clone, Copy)]
pub(super) enum Target<'a> {
    Gpu(&'a Device),
    CpuReference,
    /// A GPU with the usual limits, when no device is open.
    TypicalGpu,
}

impl<'a> Target<'a> {
    /// The device, or the CPU reference without one.
    pub fn of(device: Option<&'a Device>) -> Target<'a> {
        device.map_or(Target::CpuReference, Target::Gpu)
    }
}

/// Experts that a token chooses, and experts of a layer: the largest numbers of all mixtures.
fn expert_counts(model: &Model) -> (usize, usize) {
    let counts = model.layers.iter().filter_map(|layer| match &layer.ffn {
        FeedForward::Moe(moe) => Some((moe.top_k, moe.experts.len())),
        _ => None,
    });
    counts.fold((0, 0), |a, b| (a.0.max(b.0), a.1.max(b.1)))
}

/// A plan that fits, as far as the memory of the device is known.
pub(super) struct Fitted {
    pub plan: Plan,
    /// Experts per layer that are on the device at a time; `None`: all of them.
    pub expert_slots: Option<usize>,
    /// Whether a smaller plan may exist.
    pub can_shrink: bool,
    pub notices: Vec<Notice>,
}

/// Bytes of a plan on a device.
fn bytes(plan: &Plan) -> u64 {
    plan.graph.weight_bytes().saturating_add(plan.graph.buffer_bytes())
}

/// Plans a network within the memory of its target.
pub(super) struct Planner<'a> {
    pub model: &'a Model,
    pub tensors: &'a dyn Tensors,
    pub options: &'a LoadOptions,
    pub target: Target<'a>,
    /// Positions of the context.
    pub ctx: u32,
    /// Most bytes of a plan, if the device had no memory for a larger one.
    pub limit: Option<u64>,
}

impl Planner<'_> {
    /// Plans and uploads. If the device runs out of memory and experts can be paged, tries again with a plan that is an
    /// eighth smaller, and so on: a device does not report how much memory it has. Returns the plan and the result of
    /// `upload`.
    ///
    /// Errors: those of [`Planner::plan`] and `upload`.
    pub fn plan_and_upload<T>(&mut self, mut upload: impl FnMut(&Plan) -> Result<T>) -> Result<(Fitted, T)> {
        loop {
            let fitted = self.plan()?;
            match upload(&fitted.plan) {
                Ok(uploaded) => return Ok((fitted, uploaded)),
                Err(err) if err.kind == Kind::OutOfMemory && fitted.can_shrink => {
                    let bytes = bytes(&fitted.plan);
                    self.limit = Some(bytes - bytes.div_ceil(8));
                }
                Err(err) => return Err(err),
            }
        }
    }

    /// Plans with as many drafts as the options ask for, or without drafts if they do not fit.
    ///
    /// Errors: `Usage` for an invalid number of drafts; those of [`Planner::fit`].
    pub fn plan(&self) -> Result<Fitted> {
        let drafts = self.drafts()?;
        if drafts != 0 && self.options.count_routes && self.model.has_experts() {
            return Ok(self.fit(0)?.with(Notice::NoDraftsWhileCounting));
        }
        let refused = match self.fit(drafts) {
            Err(err) if drafts != 0 => err,
            fitted => return fitted,
        };
        // Planning fails without drafts too: that error is the root cause.
        let fitted = self.fit(0)?;
        if fitted.expert_slots.is_some() {
            Ok(fitted.with(Notice::NoDraftsWhilePaging))
        } else if self.options.speculation == Speculation::Auto {
            let reason = refused.message;
            Ok(fitted.with(Notice::DraftHeadUnused { reason }))
        } else {
            Err(refused)
        }
    }

    /// Drafts per verify step. Errors: `Usage` for a number that no step has.
    fn drafts(&self) -> Result<u32> {
        match self.options.speculation {
            Speculation::Auto if self.model.mtp.is_some() => Ok(AUTO_DRAFTS),
            Speculation::Auto | Speculation::Off => Ok(0),
            Speculation::Drafts(drafts) if (1..MAX_WIDTH).contains(&drafts) => Ok(drafts),
            Speculation::Drafts(drafts) => {
                bail!(Usage, "expected 1 to {} drafts per step, found {drafts}", MAX_WIDTH - 1)
            }
        }
    }

    /// Plans with `drafts` drafts and all experts, or with as many experts as fit.
    ///
    /// Errors: those of planning; `OutOfMemory` with the sizes of the whole plan and of the smallest one.
    pub fn fit(&self, drafts: u32) -> Result<Fitted> {
        let measured = Measured::default();
        let experts = expert_counts(self.model);
        let can_page = !matches!(self.target, Target::CpuReference) && experts.0 < experts.1;
        match self.checked(drafts, None, &measured) {
            Ok(plan) => Ok(Fitted {
                plan,
                expert_slots: None,
                can_shrink: can_page,
                notices: Vec::new(),
            }),
            Err(refused) if refused.kind == Kind::OutOfMemory && can_page => {
                self.fit_experts(drafts, experts, &measured, refused)
            }
            Err(err) => Err(err),
        }
    }

    /// Finds the largest number of experts per layer that fits, by bisection. `refused` is the error with all experts.
    fn fit_experts(
        &self,
        drafts: u32,
        (chosen, all): (usize, usize),
        measured: &Measured,
        refused: Error,
    ) -> Result<Fitted> {
        let with_fewest = |Error { message, .. }: Error| {
            let whole = &refused.message;
            let message = format!("{whole}; with {chosen} of {all} experts a layer at a time: {message}");
            Error::new(refused.kind, message)
        };
        let smallest = self.planned(drafts, Some(chosen), measured).map_err(with_fewest)?;
        if let Err(err) = self.check(&smallest) {
            let smallest_limit = bytes(&smallest).div_ceil(1 << 20);
            let mut err = with_fewest(err);
            if self.options.vram_mb.is_some_and(|limit| limit < smallest_limit) {
                err.message += &format!("; the smallest limit that works is {smallest_limit} MiB");
            }
            return Err(err);
        }
        let (mut low, mut high, mut plan) = (chosen, all - 1, smallest);
        while low < high {
            let middle = (low + high).div_ceil(2);
            match self.checked(drafts, Some(middle), measured) {
                Ok(larger) => (low, plan) = (middle, larger),
                Err(err) if err.kind == Kind::OutOfMemory => high = middle - 1,
                Err(err) => return Err(err),
            }
        }
        Ok(Fitted {
            plan,
            expert_slots: Some(low),
            can_shrink: true,
            notices: vec![Notice::ExpertsPaged {
                slots: low,
                experts: all,
            }],
        })
    }

    /// A plan that passes [`Planner::check`].
    fn checked(&self, drafts: u32, slots: Option<usize>, measured: &Measured) -> Result<Plan> {
        let plan = self.planned(drafts, slots, measured)?;
        self.check(&plan)?;
        Ok(plan)
    }

    /// The plan with `slots` experts per layer on the device at a time; `None`: all of them.
    fn planned(&self, drafts: u32, slots: Option<usize>, measured: &Measured) -> Result<Plan> {
        let (hardware, max_binding) = match self.target {
            Target::Gpu(device) => (device.kind != DeviceKind::Software, device.max_binding()),
            Target::CpuReference => (false, u64::MAX / 2),
            Target::TypicalGpu => (true, MAX_BINDING),
        };
        let chunk = if hardware { CHUNK_HARDWARE } else { CHUNK_SOFTWARE };
        let options = LowerOptions {
            ctx: self.ctx,
            // No longer than the context, rounded up to a multiple of 8.
            chunk: chunk.min(self.ctx.div_ceil(8).max(1).saturating_mul(8)),
            kv: self.options.kv,
            max_binding,
            all_logits: self.options.all_logits,
            drafts,
            draft_input: self.options.draft_input,
            experts: ExpertOptions {
                counted: self.options.count_routes,
                slots,
            },
        };
        lower(self.model, self.tensors, &options, measured)
    }

    /// Compares a plan with the available memory. Errors: `OutOfMemory` with both sizes.
    fn check(&self, plan: &Plan) -> Result<()> {
        if self.limit.is_some_and(|limit| bytes(plan) > limit) {
            let need = mib(bytes(plan));
            bail!(OutOfMemory, "the plan needs {need} MiB, more than the device has left");
        }
        match self.target {
            Target::Gpu(device) => check_budget(self.options, Some(device), plan),
            Target::CpuReference => check_budget(self.options, None, plan),
            Target::TypicalGpu => check_limit(self.options, plan.graph.weight_bytes(), plan),
        }
    }
}

impl Fitted {
    /// The same with a notice before the others.
    fn with(mut self, notice: Notice) -> Fitted {
        self.notices.insert(0, notice);
        self
    }
}

/// A planned network that is not loaded.
#[non_exhaustive]
pub struct Planned {
    /// The network.
    pub model: Model,
    /// Its programs.
    pub plan: Plan,
    /// The task whose mask is active.
    pub task: Option<String>,
    /// Notices of planning.
    pub notices: Vec<Notice>,
}

/// The plan for a GPU with the usual limits, with the mask that the options choose. Opens no device and reads weights of few
/// types.
///
/// Errors: as [`LoadedModel::new`](super::loaded::LoadedModel::new), except those of the device.
pub fn planned(arch: &Arch, tensors: &dyn Tensors, options: &LoadOptions) -> Result<Planned> {
    let model = model::bind(arch, tensors)?;
    let mask = find_mask(&model.masks, &options.task)?;
    let planner = Planner {
        model: &model,
        tensors,
        options,
        target: Target::TypicalGpu,
        ctx: options.positions(model.max_positions)?,
        limit: None,
    };
    let Fitted { plan, mut notices, .. } = planner.plan()?;
    let plan = plan.with_mask(mask)?;
    let mut task = ActiveTask::default();
    notices.extend(task.activate(mask));
    Ok(Planned {
        model,
        plan,
        task: task.name,
        notices,
    })
}

/// Compares a plan with the limit of the options and the free memory, before anything is allocated.
///
/// Errors: `OutOfMemory` with both sizes.
pub fn check_budget(options: &LoadOptions, device: Option<&Device>, plan: &Plan) -> Result<()> {
    let weights = if device.is_some() { plan.graph.weight_bytes() } else { 0 };
    check_limit(options, weights, plan)?;
    let of_host = device.is_none_or(Device::shares_host_memory);
    match available_memory(Path::new("/")).filter(|_| of_host) {
        Some(free) => check_fits(weights, plan, free, &format!("{} MiB are free", mib(free))),
        None => Ok(()),
    }
}

/// Compares a plan with the limit of the options. Errors: `OutOfMemory`.
fn check_limit(options: &LoadOptions, weights: u64, plan: &Plan) -> Result<()> {
    match options.vram_mb {
        Some(limit) => {
            let text = format!("the memory limit is {limit} MiB");
            check_fits(weights, plan, limit.saturating_mul(1 << 20), &text)
        }
        None => Ok(()),
    }
}

/// Compares a plan, of whose weights this number of bytes is on the device, with the `available` bytes, which `text` states.
/// Errors: `OutOfMemory`.
fn check_fits(weights: u64, plan: &Plan, available: u64, text: &str) -> Result<()> {
    let need = weights + plan.graph.buffer_bytes();
    if need <= available {
        return Ok(());
    }
    let remedy = match weights > available {
        true => "the weights alone exceed that, a smaller quantisation would help",
        false => "a shorter context would help",
    };
    bail!(OutOfMemory, "the plan needs {} MiB, {text}; {remedy}", mib(need))
}

fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::model::bind;
    use crate::synthetic::{ExpertShape, Shape, Synthetic, synthetic};

    fn network(experts: Option<ExpertShape>) -> (Model, Synthetic) {
        let shape = Shape {
            hidden: 64,
            heads: 2,
            head_dim: 32,
            width: 128,
            vocab: 128,
            experts,
            delta: None,
            hadamard: None,
            ..Shape::named("qwen3.5-35b-a3b").unwrap().with_layers(3).unwrap()
        };
        let (arch, tensors) = synthetic(&shape, Dtype::Q8Row).unwrap();
        (bind(&arch, &tensors).unwrap(), tensors)
    }

    /// Plans for a device that has `bytes_of_device` bytes and does not report it. Also returns the number of uploads.
    fn on_a_device_with(model: &Model, tensors: &dyn Tensors, bytes_of_device: u64) -> (Result<Fitted>, usize) {
        let mut planner = Planner {
            model,
            tensors,
            options: &LoadOptions::default().speculation(Speculation::Off),
            target: Target::TypicalGpu,
            ctx: 64,
            limit: None,
        };
        let mut uploads = 0;
        let fitted = planner.plan_and_upload(|plan| {
            uploads += 1;
            match bytes(plan) > bytes_of_device {
                true => bail!(OutOfMemory, "the device has no memory left"),
                false => Ok(()),
            }
        });
        (fitted.map(|(fitted, ())| fitted), uploads)
    }

    #[test]
    fn a_device_that_runs_out_of_memory_gets_fewer_experts() {
        let (model, tensors) = network(Some(ExpertShape {
            count: 32,
            top_k: 4,
            width: 96,
            shared: 64,
        }));
        let (whole, tries) = on_a_device_with(&model, &tensors, u64::MAX);
        let whole = whole.unwrap();
        assert_eq!((whole.expert_slots, tries), (None, 1));
        let whole = bytes(&whole.plan);
        let (smallest, _) = on_a_device_with(&model, &tensors, whole / 2);
        assert!(smallest.is_ok_and(|smallest| smallest.expert_slots.is_some()));
        // Bytes of one expert in each of three layers, with scales.
        let slot = 3 * 3 * (64 * 96 + 2 * 96);
        for capacity in [whole - 1, whole * 4 / 5, whole * 3 / 5] {
            let (fitted, tries) = on_a_device_with(&model, &tensors, capacity);
            let fitted = fitted.unwrap();
            let found = bytes(&fitted.plan);
            assert!(
                found <= capacity && found + capacity / 8 + 1 + slot > capacity,
                "{capacity}"
            );
            let slots = fitted.expert_slots.unwrap();
            assert!((4..32).contains(&slots));
            assert!((2..=6).contains(&tries), "{tries} tries for {capacity} of {whole}");
            assert_eq!(fitted.notices, [Notice::ExpertsPaged { slots, experts: 32 }]);
        }
        let (none, _) = on_a_device_with(&model, &tensors, 1000);
        let err = none.err().unwrap();
        assert_eq!(err.kind, Kind::OutOfMemory);
        assert!(err.message.contains("with 4 of 32 experts a layer"), "{}", err.message);
    }

    #[test]
    fn a_network_without_experts_is_tried_once() {
        let (model, tensors) = network(None);
        let (none, tries) = on_a_device_with(&model, &tensors, 1000);
        let err = none.err().unwrap();
        assert_eq!((err.kind, tries), (Kind::OutOfMemory, 1));
        assert_eq!(err.message, "the device has no memory left");
    }
}

//! How many experts of a mixture fit on a device at a time, where not all do.

use crate::container::Tensors;
use crate::error::{Error, Kind, Result};
use crate::model::{FeedForward, Model, Moe};
use crate::program::{self, Measured, Plan, PlanOptions};

/// A plan that is small enough, as far as one can know.
pub(super) struct Fitted {
    pub plan: Plan,
    /// Most experts of a layer that are on the device at a time, and most that a layer has; `None`: all are there.
    pub experts: Option<[usize; 2]>,
    /// Whether there could be a smaller one.
    pub can_page: bool,
}

impl Fitted {
    /// Bytes that it takes on a device.
    pub fn bytes(&self) -> u64 {
        bytes(&self.plan)
    }

    /// What should be said about it.
    pub fn notice(&self) -> Option<String> {
        let [slots, all] = self.experts?;
        Some(format!(
            "{slots} of {all} experts a layer fit on the device at a time; the others are fetched when they are chosen"
        ))
    }
}

fn bytes(plan: &Plan) -> u64 {
    plan.weight_bytes().saturating_add(plan.buffer_bytes())
}

/// The plan with all experts in place, or if `fits` refuses that, where experts can be paged the one with as many as fit.
///
/// Errors: those of planning, and what `fits` says: of the whole plan, and of the smallest; with the smallest `vram_mb`, the
/// limit that `fits` looks at, that would do.
pub(super) fn fitted(
    model: &Model,
    tensors: &dyn Tensors,
    options: &PlanOptions,
    can_page: bool,
    vram_mb: Option<u64>,
    fits: &dyn Fn(&Plan) -> Result<()>,
) -> Result<Fitted> {
    let mixtures = || {
        model.layers.iter().filter_map(|layer| match &layer.ffn {
            FeedForward::Moe(moe) => Some(moe),
            FeedForward::Dense(_) => None,
        })
    };
    let most = |f: fn(&Moe) -> usize| mixtures().map(f).max().unwrap_or(0);
    let (least, all) = (most(|moe| moe.top_k), most(|moe| moe.experts.len()));
    let can_page = can_page && least < all;
    let measured = Measured::default();
    let planned = |slots| -> Result<Plan> {
        let mut options = *options;
        options.experts.slots = slots;
        program::plan_with(model, tensors, &options, &measured)
    };
    let fitting = |slots| -> Result<Plan> {
        let plan = planned(slots)?;
        fits(&plan)?;
        Ok(plan)
    };
    let refused = match fitting(None) {
        Err(err) if err.kind == Kind::OutOfMemory && can_page => err,
        other => {
            return other.map(|plan| Fitted {
                plan,
                experts: None,
                can_page,
            });
        }
    };
    let smallest = |err: Error, help: String| {
        let message = format!(
            "{}; with {least} of {all} experts a layer at a time: {}{help}",
            refused.message, err.message
        );
        Error::new(refused.kind, message)
    };
    let mut best = planned(Some(least)).map_err(|err| smallest(err, String::new()))?;
    if let Err(err) = fits(&best) {
        let mib = bytes(&best).div_ceil(1 << 20);
        let help = match vram_mb {
            Some(limit) if limit < mib => format!("; --vram-mb {mib} is the least that works"),
            _ => String::new(),
        };
        return Err(smallest(err, help));
    }
    // The most slots that fit are found by halving.
    let (mut low, mut high) = (least, all - 1);
    while low < high {
        let middle = (low + high).div_ceil(2);
        match fitting(Some(middle)) {
            Ok(plan) => (low, best) = (middle, plan),
            Err(err) if err.kind == Kind::OutOfMemory => high = middle - 1,
            Err(err) => return Err(err),
        }
    }
    Ok(Fitted {
        plan: best,
        experts: Some([low, all]),
        can_page,
    })
}

/// Realises a plan; where the device has no memory for it and experts can be paged, one that is an eighth smaller, and so on:
/// a device does not say how much it would give. `planned` gets the most bytes that the plan may take, where there is a limit.
///
/// Errors: those of both; what `planned` says of the smallest plan when the device has no memory for that either.
pub(super) fn settled<T>(
    mut planned: impl FnMut(Option<u64>) -> Result<Fitted>,
    mut realise: impl FnMut(&Plan) -> Result<T>,
) -> Result<(Fitted, T)> {
    let mut room = None;
    loop {
        let fitted = planned(room)?;
        match realise(&fitted.plan) {
            Err(err) if err.kind == Kind::OutOfMemory && fitted.can_page => {
                let bytes = fitted.bytes();
                room = Some(bytes - (bytes / 8).max(1).min(bytes));
            }
            other => return other.map(|made| (fitted, made)),
        }
    }
}

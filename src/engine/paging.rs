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
                room = Some(bytes - bytes.div_ceil(8));
            }
            other => return other.map(|made| (fitted, made)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::error::bail;
    use crate::kernel::Kv;
    use crate::model::bind;
    use crate::program::ExpertOptions;
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
            ..Shape::named("qwen3.5-35b-a3b").unwrap().with_layers(3).unwrap()
        };
        let (arch, tensors) = synthetic(&shape, Dtype::Q8Row).unwrap();
        (bind(&arch, &tensors).unwrap(), tensors)
    }

    /// What is placed on a device that has so many bytes and does not say so, and how often that was tried.
    fn on_a_device_with(model: &Model, tensors: &dyn Tensors, bytes_of_device: u64) -> (Result<Fitted>, usize) {
        let options = PlanOptions {
            ctx: 64,
            chunk: 64,
            kv: Kv::F16,
            max_binding: 1 << 30,
            all_logits: false,
            drafts: 0,
            experts: ExpertOptions::default(),
        };
        let planned = |room: Option<u64>| {
            fitted(
                model,
                tensors,
                &options,
                true,
                None,
                &|plan| match room.is_some_and(|room| bytes(plan) > room) {
                    true => bail!(OutOfMemory, "more than {room:?}"),
                    false => Ok(()),
                },
            )
        };
        let mut tries = 0;
        let realise = |plan: &Plan| {
            tries += 1;
            match bytes(plan) > bytes_of_device {
                true => bail!(OutOfMemory, "the device has no memory left"),
                false => Ok(()),
            }
        };
        let settled = settled(planned, realise).map(|(fitted, ())| fitted);
        (settled, tries)
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
        assert_eq!((whole.experts, tries), (None, 1));
        let (smallest, _) = on_a_device_with(&model, &tensors, whole.bytes() / 2);
        assert!(smallest.is_ok_and(|smallest| smallest.experts.is_some()));
        // Of three layers, with scales.
        let slot = 3 * 3 * (64 * 96 + 2 * 96);
        for room in [whole.bytes() - 1, whole.bytes() * 4 / 5, whole.bytes() * 3 / 5] {
            let (fitted, tries) = on_a_device_with(&model, &tensors, room);
            let fitted = fitted.unwrap();
            assert!(
                fitted.bytes() <= room && fitted.bytes() + room / 8 + 1 + slot > room,
                "{room}"
            );
            let [slots, all] = fitted.experts.unwrap();
            assert!((4..32).contains(&slots) && all == 32);
            assert!(
                (2..=6).contains(&tries),
                "{tries} tries for {room} of {}",
                whole.bytes()
            );
            assert!(fitted.notice().unwrap().contains(&format!("{slots} of 32 experts")));
        }
        let (none, _) = on_a_device_with(&model, &tensors, 1000);
        let err = none.err().unwrap();
        assert_eq!(err.kind, Kind::OutOfMemory);
        assert!(err.message.contains("with 4 of 32 experts a layer"), "{}", err.message);
    }

    #[test]
    fn what_has_no_experts_is_tried_once() {
        let (model, tensors) = network(None);
        let (none, tries) = on_a_device_with(&model, &tensors, 1000);
        let err = none.err().unwrap();
        assert_eq!((err.kind, tries), (Kind::OutOfMemory, 1));
        assert_eq!(err.message, "the device has no memory left");
    }
}

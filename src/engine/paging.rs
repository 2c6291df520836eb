//! How many experts of a mixture fit on a device at a time, where not all do.

use crate::container::Tensors;
use crate::error::{Error, Kind, Result};
use crate::model::{FeedForward, Model, Moe};
use crate::program::{self, Plan, PlanOptions};

/// The plan with all experts in place, or if `fits` refuses that, where experts can be paged the one with as many as fit;
/// and what should be said about it.
///
/// Errors: those of planning, and what `fits` says: of the whole plan, and of the smallest.
pub(super) fn fitted(
    model: &Model,
    tensors: &dyn Tensors,
    options: &PlanOptions,
    can_page: bool,
    fits: &dyn Fn(&Plan) -> Result<()>,
) -> Result<(Plan, Option<String>)> {
    let planned = |slots| -> Result<Plan> {
        let mut options = *options;
        options.experts.slots = slots;
        let plan = program::plan(model, tensors, &options)?;
        fits(&plan)?;
        Ok(plan)
    };
    let refused = match planned(None) {
        Err(err) if err.kind == Kind::OutOfMemory && can_page => err,
        other => return other.map(|plan| (plan, None)),
    };
    let mixtures = || {
        model.layers.iter().filter_map(|layer| match &layer.ffn {
            FeedForward::Moe(moe) => Some(moe),
            FeedForward::Dense(_) => None,
        })
    };
    let most = |f: fn(&Moe) -> usize| mixtures().map(f).max().unwrap_or(0);
    let (least, all) = (most(|moe| moe.top_k), most(|moe| moe.experts.len()));
    if least >= all {
        return Err(refused);
    }
    let mut best = match planned(Some(least)) {
        Ok(plan) => plan,
        Err(err) => {
            let message = format!(
                "{}; with {least} of {all} experts a layer at a time: {}",
                refused.message, err.message
            );
            return Err(Error::new(refused.kind, message));
        }
    };
    // The most slots that fit are found by halving.
    let (mut low, mut high) = (least, all - 1);
    while low < high {
        let middle = (low + high).div_ceil(2);
        match planned(Some(middle)) {
            Ok(plan) => (low, best) = (middle, plan),
            Err(err) if err.kind == Kind::OutOfMemory => high = middle - 1,
            Err(err) => return Err(err),
        }
    }
    let notice = format!(
        "{low} of {all} experts a layer fit on the device at a time; the others are fetched when they are chosen"
    );
    Ok((best, Some(notice)))
}

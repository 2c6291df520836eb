//! `parity`: compares a device with the CPU reference. Without a model: every kernel with every weight type. With a model:
//! each step of its programs.

use super::args::LoadArgs;
use super::context::{Context, Result, checked, unless_cancelled, usage};
use super::overlay::{BLEND_HELP, SKILL_HELP};
use cmf_gpu::engine::{check_budget, find_mask, open_device, overlaid, resolve_task};
use cmf_gpu::gpu::Device;
use cmf_gpu::graph::Measured;
use cmf_gpu::lm::{ExpertOptions, LowerOptions, lower};
use cmf_gpu::options::Overlay;
use cmf_gpu::parity::{self, Case, Outcome as Compared, Subject};
use cmf_gpu::source::ModelSource;
use cmf_gpu::{Error, Kind, LoadOptions, Notice, model};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Tokens of a prefill chunk: two chunks and the steps after them exceed the first block of attention.
const CHUNK: u32 = 40;
/// Positions of the context by default.
const DEFAULT_CTX: u32 = 120;

const CTX_HELP: &str = "Length of the context in tokens; 0 = the length the model was trained for [default: 120]";

#[derive(clap::Args)]
#[command(mut_arg("ctx", |arg| arg.help(CTX_HELP)))]
#[command(mut_arg("skill", |arg| arg.help(SKILL_HELP)), mut_arg("blend", |arg| arg.help(BLEND_HELP)))]
pub struct Args {
    #[command(flatten)]
    load: LoadArgs,
    /// Only kernel cases whose name contains TEXT
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let path = args.load.model.optional()?;
    if path.is_some() && args.filter.is_some() {
        return Err(usage("--filter selects kernel cases, and with a MODEL there are none"));
    }
    if let Some(filter) = &args.filter {
        check_filter(filter)?;
    }
    let options = args.load.options().overlay(args.load.overlay.fixed()?);
    if path.is_none() && options.overlay != Overlay::Backbone {
        return Err(usage("a skill needs a MODEL"));
    }
    let source = path.is_some().then(|| args.load.open()).transpose()?;
    let (device, notice) = open_device(&options)?;
    let device = device.ok_or_else(|| {
        let message = "parity compares a device with the CPU reference, and there is no device";
        Error::new(Kind::NoAdapter, message)
    })?;
    context.out.notices(&notice);
    let compared = compare(source.as_ref(), args.filter.as_deref(), &device, &options, context)?;
    context.answer(json(&compared, &device), lines(&compared, &device))?;
    checked(compared.passed == compared.cases)
}

fn compare(
    source: Option<&ModelSource>,
    filter: Option<&str>,
    device: &Arc<Device>,
    options: &LoadOptions,
    context: &Context,
) -> Result<Compared> {
    let cancel = context.interrupt.graceful();
    let out = &context.out;
    let mut bar = out.progress("parity", false);
    let mut progress = |done: usize, total: usize, next: &str| {
        bar.set(done as u64, total as u64);
        out.detail(next);
        unless_cancelled(&cancel)
    };
    let Some(source) = source else {
        return parity::kernels(device, filter, &mut progress);
    };
    let (subject, notice) = subject(source, device, options)?;
    out.notices(&notice);
    parity::programs(device, &subject, &subject, &mut progress)
}

fn json(compared: &Compared, device: &Device) -> Value {
    let worst = compared
        .worst
        .iter()
        .map(|(name, error)| json!({"name": name, "error": error}));
    json!({
        "cases": compared.cases,
        "passed": compared.passed,
        "failed": compared.failed,
        "worst": worst.collect::<Vec<_>>(),
        "device": {"name": device.name, "backend": device.backend, "kind": device.kind.name()},
    })
}

fn lines(compared: &Compared, device: &Device) -> Vec<String> {
    let Compared {
        cases,
        passed,
        failed,
        worst,
    } = compared;
    let worst = worst
        .iter()
        .map(|(name, error)| format!("{name:<40} worst {error:.1e}"));
    let failed = failed
        .iter()
        .map(|failure| format!("FAILED {}: {}", failure.name, failure.what));
    let total = format!("{passed} of {cases} comparisons passed on {}", device.name);
    worst.chain(failed).chain([total]).collect()
}

/// Errors: `Usage` when no kernel case has `filter` in its name, with the kinds of cases.
fn check_filter(filter: &str) -> Result<()> {
    let cases = parity::cases();
    if cases.iter().any(|case| case.name().contains(filter)) {
        return Ok(());
    }
    let kinds: BTreeSet<&str> = cases.iter().map(Case::kind).collect();
    let kinds = Vec::from_iter(kinds).join(", ");
    Err(usage(format!(
        "--filter {filter}: no case has such a name; names begin with {kinds}"
    )))
}

/// The programs of a model under the options' mask.
fn subject(source: &ModelSource, device: &Arc<Device>, options: &LoadOptions) -> Result<(Subject, Option<Notice>)> {
    let tensors = overlaid(source, &options.overlay)?;
    let model = model::bind(&source.arch, &*tensors)?;
    let ctx = options.positions(model.max_positions)?;
    let lower_options = LowerOptions {
        ctx: match options.ctx {
            None => ctx.min(DEFAULT_CTX),
            Some(_) => ctx,
        },
        chunk: CHUNK,
        kv: options.kv,
        max_binding: device.max_binding(),
        all_logits: false,
        // So that a draft head is compared too.
        drafts: 3,
        draft_input: options.draft_input,
        experts: ExpertOptions::default(),
    };
    let plan = lower(&model, &*tensors, &lower_options, &Measured::default())?;
    let (task, notice) = resolve_task(source, &options.overlay, &options.task)?;
    let plan = Arc::new(plan.with_mask(find_mask(&model.masks, &task)?)?);
    check_budget(options, Some(device), &plan)?;
    Ok((Subject { plan, tensors }, notice))
}

//! `parity`: is what the device computes what it should compute? Without a model every kernel with every weight type, with
//! a model each step of its programs.

use super::args::LoadArgs;
use super::model as models;
use super::overlay::{BLEND_HELP, SKILL_HELP};
use super::{Context, Outcome, Result, interrupted, usage};
use cmf_gpu::container::Container;
use cmf_gpu::engine::{check_budget, open_device, overlaid, task_with};
use cmf_gpu::gpu::Device;
use cmf_gpu::options::{LoadOptions, Overlay, TaskChoice};
use cmf_gpu::parity::{self, Case, Subject};
use cmf_gpu::program::{self, ExpertOptions, PlanOptions};
use cmf_gpu::{Error, Kind, model};
use serde_json::{Value, json};
use std::sync::Arc;

/// Columns of a prefill chunk: two of them and the steps after them pass the first block of attention.
const CHUNK: u32 = 40;
/// Positions of the context when nothing is said.
const DEFAULT_CTX: u32 = 120;

/// Flags of `parity`.
#[derive(clap::Args)]
#[command(mut_arg("ctx", |arg| arg.help("Positions of the context; 0 = what the model was trained for [default: 120]")))]
#[command(mut_arg("skill", |arg| arg.help(SKILL_HELP)), mut_arg("blend", |arg| arg.help(BLEND_HELP)))]
pub struct Args {
    #[command(flatten)]
    load: LoadArgs,
    /// Only kernel cases whose name contains this
    #[arg(long, env = "CMF_GPU_FILTER", value_name = "TEXT", hide_env = true)]
    filter: Option<String>,
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let path = args.load.model.optional(context)?;
    if path.is_some() && args.filter.is_some() {
        return Err(usage(
            "--filter chooses among kernel cases, which are run without a MODEL",
        ));
    }
    if let Some(filter) = &args.filter {
        named(filter)?;
    }
    let options = LoadOptions {
        overlay: args.load.overlay.fixed(context)?,
        ..args.load.options()
    };
    if path.is_none() && options.overlay != Overlay::Backbone {
        return Err(usage("skills are a MODEL's, and there is none"));
    }
    let container = path.as_deref().map(models::open).transpose()?;
    container.as_ref().map_or(Ok(()), models::runnable)?;
    let (device, notice) = open_device(&options)?;
    let Some(device) = device else {
        return Err(Error::new(
            Kind::NoAdapter,
            "parity compares a device with the CPU reference, and there is no device",
        ));
    };
    if let Some(notice) = notice {
        context.out.note(format!("note: {notice}"));
    }
    let cancel = context.interrupt.graceful();
    let verbose = context.out.verbose;
    let mut bar = context.out.progress("parity", false);
    let out = &context.out;
    let mut progress = |done: usize, total: usize, next: &str| {
        bar.set(done as u64, total as u64);
        if verbose {
            out.detail(next);
        }
        match cancel.is_cancelled() {
            true => Err(interrupted()),
            false => Ok(()),
        }
    };
    let outcome = match container {
        None => parity::kernels(&device, args.filter.as_deref(), &mut progress)?,
        Some(container) => {
            let (subject, notice) = subject(container, &device, &options)?;
            if let Some(notice) = notice {
                out.note(format!("note: {notice}"));
            }
            parity::programs(&device, &subject, &subject, &mut progress)?
        }
    };
    drop(bar);
    if context.out.json {
        let failed: Vec<Value> = outcome
            .failed
            .iter()
            .map(|failure| json!({"name": failure.name, "what": failure.what}))
            .collect();
        let worst: Vec<Value> = outcome
            .worst
            .iter()
            .map(|(name, error)| json!({"name": name, "error": error}))
            .collect();
        context.out.json(&json!({
            "cases": outcome.cases,
            "passed": outcome.passed,
            "failed": failed,
            "worst": worst,
            "device": {"name": device.name, "backend": device.backend, "kind": device.kind.name()},
        }))?;
    } else {
        for (name, error) in &outcome.worst {
            context.out.line(format!("{name:<40} worst {error:.1e}"))?;
        }
        for failure in &outcome.failed {
            context.out.line(format!("FAILED {}: {}", failure.name, failure.what))?;
        }
        context.out.line(format!(
            "{} of {} comparisons passed on {}",
            outcome.passed, outcome.cases, device.name
        ))?;
    }
    Ok(match outcome.passed == outcome.cases {
        true => Outcome::Done,
        false => Outcome::Failed,
    })
}

/// Errors: `Usage` when no kernel case has `filter` in its name, with names that there are.
fn named(filter: &str) -> Result<()> {
    let cases = parity::cases();
    if cases.iter().any(|case| case.name().contains(filter)) {
        return Ok(());
    }
    let mut kinds: Vec<&str> = cases.iter().map(Case::kind).collect();
    kinds.sort_unstable();
    kinds.dedup();
    Err(usage(format!(
        "--filter {filter}: no case has such a name; they begin with {}",
        kinds.join(", ")
    )))
}

/// What is compared, and what should be said about it.
fn subject(container: Container, device: &Arc<Device>, options: &LoadOptions) -> Result<(Subject, Option<String>)> {
    let container = Arc::new(container);
    let tensors = overlaid(&container, &options.overlay)?;
    let model = model::bind(&container.header().arch, &*tensors)?;
    let options_of_plan = PlanOptions {
        ctx: match options.ctx {
            None => options.positions(model.max_positions)?.min(DEFAULT_CTX),
            Some(_) => options.positions(model.max_positions)?,
        },
        chunk: CHUNK,
        kv: options.kv,
        max_binding: device.max_binding(),
        all_logits: false,
        // Of the draft head too, where there is one.
        drafts: 3,
        experts: ExpertOptions::default(),
    };
    let plan = program::plan(&model, &*tensors, &options_of_plan)?;
    let (task, notice) = task_with(&container, &options.overlay, &options.task)?;
    let mask = match &task {
        TaskChoice::Default => model.masks.default_mask(),
        TaskChoice::Full => None,
        TaskChoice::Named(name) => Some(model.masks.find(name)?),
    };
    let plan = Arc::new(plan.with_mask(mask)?);
    check_budget(options, Some(device), &plan)?;
    Ok((Subject { plan, tensors }, notice))
}

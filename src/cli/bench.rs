//! `bench`: how many tokens a second, for a prompt (`pp`) and for text generation (`tg`).
//!
//! Each row is warmed up once. `pp` times a prompt from an empty cache until the device is done; `tg` times runs of the
//! decode program, the first token's not among them.

mod plan;

use super::args::{self, LoadArgs, device_json, whole};
use super::convert::quant;
use super::model;
use super::overlay::{BLEND_HELP, SKILL_HELP};
use super::run::counters_json;
use super::{Context, Outcome, Result, interrupted, usage};
use cmf_gpu::container::Container;
use cmf_gpu::dtype::Dtype;
use cmf_gpu::engine::{Engine, Placed, Placement, open_device};
use cmf_gpu::gpu::{self, Costs};
use cmf_gpu::options::{LoadOptions, Overlay};
use cmf_gpu::program::{Counters, Which};
use cmf_gpu::sampling::Sampling;
use cmf_gpu::session::{Cancel, Generation, Session};
use cmf_gpu::synthetic::{Shape, synthetic};
use cmf_gpu::{Error, Kind};
use serde_json::{Value, json};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

/// What `--help` says about the context.
const CTX_HELP: &str =
    "Positions of the context; 0 = what the model was trained for [default: as many as -p and -n need]";

/// Flags of `bench`.
#[derive(clap::Args)]
#[command(mut_arg("ctx", |arg| arg.help(CTX_HELP)))]
#[command(mut_arg("skill", |arg| arg.help(SKILL_HELP)), mut_arg("blend", |arg| arg.help(BLEND_HELP)))]
pub struct Args {
    #[command(flatten)]
    load: LoadArgs,
    /// Tokens of the prompt; 0 leaves the row out
    #[arg(
        short = 'p',
        long,
        env = "CMF_GPU_N_PROMPT",
        default_value_t = 512,
        value_parser = whole::<usize>,
        allow_negative_numbers = true,
        hide_env = true
    )]
    n_prompt: usize,
    /// Tokens to generate; 0 leaves the row out
    #[arg(
        short = 'n',
        long,
        env = "CMF_GPU_N_GEN",
        default_value_t = 128,
        value_parser = whole::<usize>,
        allow_negative_numbers = true,
        hide_env = true
    )]
    n_gen: usize,
    /// Random weights of this shape instead of a model: smollm2-135m, llama-8b, qwen3-8b, qwen3-30b-a3b, qwen3.5-27b or
    /// qwen3.5-35b-a3b
    #[arg(long, env = "CMF_GPU_SYNTHETIC", value_name = "SPEC", hide_env = true)]
    synthetic: Option<String>,
    /// Only so many layers of the synthetic model
    #[arg(
        long,
        env = "CMF_GPU_LAYERS",
        value_name = "N",
        value_parser = whole::<usize>,
        allow_negative_numbers = true,
        hide_env = true
    )]
    layers: Option<usize>,
    /// Measures nothing: shows what the model takes on a GPU and what its programs cost, without one
    #[arg(long, env = "CMF_GPU_PLAN", value_parser = clap::builder::FalseyValueParser::new(), hide_env = true)]
    plan: bool,
    /// The type of synthetic matrices
    #[arg(long, env = "CMF_GPU_QUANT", default_value = "q4tp", value_parser = quant, hide_env = true)]
    quant: Dtype,
    /// Also measures what basic operations cost on the device: reading memory, dispatches, empty workgroups
    #[arg(long, env = "CMF_GPU_COSTS", value_parser = clap::builder::FalseyValueParser::new(), hide_env = true)]
    costs: bool,
    /// How often each is measured
    #[arg(
        short,
        long,
        env = "CMF_GPU_REPETITIONS",
        default_value_t = 5,
        value_parser = whole::<usize>,
        allow_negative_numbers = true,
        hide_env = true
    )]
    repetitions: usize,
    /// The form of the table
    #[arg(short, long, env = "CMF_GPU_OUTPUT", value_enum, default_value_t = Form::Md, hide_env = true)]
    output: Form,
}

impl Args {
    /// The shape of the synthetic model, if one is asked for.
    fn shape(&self) -> Result<Option<Shape>> {
        let Some(spec) = &self.synthetic else { return Ok(None) };
        let shape = Shape::named(spec)?;
        match self.layers {
            Some(layers) => shape.with_layers(layers).map(Some),
            None => Ok(Some(shape)),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Form {
    Md,
    Json,
    Csv,
}

struct Row {
    test: String,
    /// Mean and standard deviation.
    tok_s: f64,
    sd: f64,
    /// Bytes of weights that were read, in 10⁹ a second.
    weight_gb_s: f64,
}

pub fn run(args: Args, context: &mut Context) -> Result {
    if args.layers.is_some() && args.synthetic.is_none() {
        return Err(usage("--layers needs --synthetic: a model file has the layers it has"));
    }
    if args.plan {
        return plan::run(&args, context);
    }
    if args.repetitions == 0 || (args.n_prompt == 0 && args.n_gen == 0) {
        return Err(usage(
            "there is nothing to measure: wanted -r and one of -p, -n above 0",
        ));
    }
    let path = match args.synthetic {
        Some(_) if args.load.model.optional(context)?.is_some() => {
            return Err(usage("--synthetic takes the place of MODEL"));
        }
        Some(_) => None,
        None => Some(args.load.model.path(context)?),
    };
    let mut options = args.load.options();
    options.overlay = args.load.overlay.fixed(context)?;
    if path.is_none() && options.overlay != Overlay::Backbone {
        return Err(usage("skills are a MODEL's, and there is none"));
    }
    let wanted = wanted(&args)?;
    options.ctx = options.ctx.or(Some(wanted));
    let container = path.as_deref().map(model::open).transpose()?;
    let trained = container
        .as_ref()
        .and_then(|file| file.header().arch.max_position_embeddings);
    if container.is_some() || options.ctx != Some(0) {
        fits(&args, options.positions(trained)?)?;
    }
    let costs = match args.costs {
        true => device_costs(&options)?,
        false => None,
    };
    let mut subject = Subject::load(container, &args, &options, context).map_err(|err| match err.kind {
        Kind::OutOfMemory if args.load.device.ctx.is_none() => {
            let (p, n) = (args.n_prompt, args.n_gen);
            Error::new(
                err.kind,
                format!("{}; here -p {p} and -n {n} make it {wanted}", err.message),
            )
        }
        _ => err,
    })?;
    fits(&args, subject.placement().ctx)?;
    let placement = subject.placement().clone();
    let session = subject.session();
    let cancel = context.interrupt.cancel();
    let mut rows = Vec::new();
    let mut counters = (0, Counters::default());
    if args.n_prompt > 0 {
        let seconds = measure(args.repetitions, || prefill(session, args.n_prompt, &cancel))?;
        let plan = session.plan();
        let chunks = args.n_prompt.div_ceil(plan.chunk as usize) as u64;
        let bytes = plan.weight_bytes_read(Which::Prefill) * chunks;
        rows.push(row(format!("pp{}", args.n_prompt), args.n_prompt, bytes, &seconds));
    }
    if args.n_gen > 0 {
        let seconds = measure(args.repetitions, || generate(session, args.n_gen, &cancel))?;
        counters = session.decode_cost();
        let bytes = session.plan().weight_bytes_read(Which::Decode) * args.n_gen as u64;
        rows.push(row(format!("tg{}", args.n_gen), args.n_gen, bytes, &seconds));
    }
    let form = if context.out.json { Form::Json } else { args.output };
    match form {
        Form::Json => {
            let rows: Vec<Value> = rows
                .iter()
                .map(|row| json!({"test": row.test, "tok_s": row.tok_s, "sd": row.sd, "weight_gb_s": row.weight_gb_s}))
                .collect();
            context.out.json(&json!({
                "rows": rows,
                "version": env!("CARGO_PKG_VERSION"),
                "host": format!("{} {}", std::env::consts::ARCH, std::env::consts::OS),
                "device": device_json(&placement),
                "kv": args.load.device.kv.name(),
                "repetitions": args.repetitions,
                "costs": costs.map(costs_json),
                "counters": counters_json(&counters.1, counters.0, &session.counters(), &placement),
            }))?;
        }
        Form::Csv => {
            context.out.line("test,tok_s,sd,weight_gb_s")?;
            for row in &rows {
                let Row {
                    test,
                    tok_s,
                    sd,
                    weight_gb_s,
                } = row;
                context
                    .out
                    .line(format!("{test},{tok_s:.3},{sd:.3},{weight_gb_s:.3}"))?;
            }
        }
        Form::Md => {
            context.out.line("| test | tok/s | weights GB/s |")?;
            context.out.line("|---|---:|---:|")?;
            for row in &rows {
                let Row {
                    test,
                    tok_s,
                    sd,
                    weight_gb_s,
                } = row;
                context
                    .out
                    .line(format!("| {test} | {tok_s:.2} ± {sd:.2} | {weight_gb_s:.2} |"))?;
            }
            if let Some(costs) = costs {
                context.out.line(costs_line(&costs))?;
            }
        }
    }
    Ok(Outcome::Done)
}

/// Positions that a context has to have. Errors: `Usage` for more than there can be.
fn wanted(args: &Args) -> Result<u32> {
    // One token before what is generated, and one that is under way at the end.
    let wanted = args.n_prompt.max(args.n_gen.saturating_add(2));
    u32::try_from(wanted).map_err(|_| {
        usage(format!(
            "-p {}, -n {}: {wanted} tokens are too many",
            args.n_prompt, args.n_gen
        ))
    })
}

/// Errors: `Usage` when a context is too short for what is to be measured.
fn fits(args: &Args, ctx: u32) -> Result<()> {
    let needs = [
        ("-p", args.n_prompt, args.n_prompt),
        ("-n", args.n_gen, args.n_gen.saturating_add(1)),
    ];
    match needs.iter().find(|&&(_, _, tokens)| tokens > ctx as usize) {
        Some((flag, count, _)) => Err(usage(format!(
            "{flag} {count} does not fit into a context of {ctx}; give a smaller {flag} or a larger --ctx"
        ))),
        None => Ok(()),
    }
}

/// A model, or random weights.
enum Subject {
    Model(Box<Engine>),
    Synthetic(Box<Placed>),
}

impl Subject {
    fn load(
        container: Option<Container>,
        args: &Args,
        options: &LoadOptions,
        context: &mut Context,
    ) -> Result<Subject> {
        if let Some(container) = container {
            return Ok(Subject::Model(Box::new(args::load(container, options, context)?)));
        }
        let Some(shape) = args.shape()? else {
            return Err(usage("wanted a MODEL or --synthetic"));
        };
        let start = Instant::now();
        let (arch, tensors) = synthetic(&shape, args.quant)?;
        let tensors = Arc::new(tensors);
        let placed = args::with_progress(context, |progress| {
            Placed::open(&arch, tensors.clone(), options, progress)
        })?;
        args::announce(&placed.placement, start.elapsed().as_secs_f64(), &context.out);
        Ok(Subject::Synthetic(Box::new(placed)))
    }

    fn placement(&self) -> &Placement {
        match self {
            Subject::Model(engine) => engine.placement(),
            Subject::Synthetic(placed) => &placed.placement,
        }
    }

    fn session(&mut self) -> &mut Session {
        match self {
            Subject::Model(engine) => engine.session(),
            Subject::Synthetic(placed) => &mut placed.session,
        }
    }
}

/// Costs of the device that will run the model; `None` on the CPU reference.
fn device_costs(options: &LoadOptions) -> Result<Option<Costs>> {
    let (device, _) = open_device(options)?;
    device.map(|device| gpu::costs(&device)).transpose()
}

fn costs_json(costs: Costs) -> Value {
    json!({
        "stream_gb_s": costs.stream_gb_s,
        "stream_bytes": costs.stream_bytes,
        "dispatch_us": costs.dispatch_us,
        "encode_us": costs.encode_us,
        "empty_workgroup_ns": costs.empty_workgroup_ns,
        "round_trip_us": costs.round_trip_us,
    })
}

fn costs_line(costs: &Costs) -> String {
    format!(
        "\nstream {:.1} GB/s, dependent dispatch {:.2} us, encoding one {:.2} us, empty workgroup {:.1} ns, round trip {:.0} us",
        costs.stream_gb_s, costs.dispatch_us, costs.encode_us, costs.empty_workgroup_ns, costs.round_trip_us
    )
}

/// Seconds of each repetition after one that does not count.
fn measure(repetitions: usize, mut once: impl FnMut() -> Result<f64>) -> Result<Vec<f64>> {
    once()?;
    (0..repetitions).map(|_| once()).collect()
}

fn row(test: String, tokens: usize, bytes: u64, seconds: &[f64]) -> Row {
    let rates: Vec<f64> = seconds.iter().map(|seconds| tokens as f64 / seconds).collect();
    let (tok_s, sd) = mean_sd(&rates);
    let each = seconds.iter().sum::<f64>() / seconds.len() as f64;
    Row {
        test,
        tok_s,
        sd,
        weight_gb_s: bytes as f64 / each / 1e9,
    }
}

/// Mean and standard deviation of a sample; 0 for a sample of one.
fn mean_sd(values: &[f64]) -> (f64, f64) {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (mean, (squares / (values.len() - 1).max(1) as f64).sqrt())
}

/// Tokens without a meaning, the same in every run.
fn prompt(vocab: u32, count: usize) -> Vec<u32> {
    (0..count as u64)
        .map(|i| ((i * 2_654_435_761) % u64::from(vocab)) as u32)
        .collect()
}

fn unless_broken(flow: ControlFlow<()>) -> Result<()> {
    match flow {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(interrupted()),
    }
}

fn prefill(session: &mut Session, count: usize, cancel: &Cancel) -> Result<f64> {
    let tokens = prompt(session.plan().vocab, count);
    session.clear();
    let start = Instant::now();
    // Returns when the device is done.
    unless_broken(session.prefill(&tokens, cancel)?.1)?;
    Ok(start.elapsed().as_secs_f64())
}

fn generate(session: &mut Session, count: usize, cancel: &Cancel) -> Result<f64> {
    let tokens = prompt(session.plan().vocab, 1);
    session.clear();
    unless_broken(session.prefill(&tokens, cancel)?.1)?;
    let generation = Generation {
        sampling: Sampling::greedy(),
        stops: Vec::new(),
        max_tokens: count + 1,
    };
    let (mut first, mut tokens) = (None, 0);
    session.generate(&generation, cancel, &mut |_| {
        first.get_or_insert_with(Instant::now);
        tokens += 1;
        ControlFlow::Continue(())
    })?;
    match first {
        Some(first) if tokens == count + 1 => Ok(first.elapsed().as_secs_f64()),
        _ if cancel.is_cancelled() => Err(interrupted()),
        _ => Err(usage(format!(
            "only {tokens} of {} tokens fit; give a larger --ctx",
            count + 1
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_is_that_of_a_sample() {
        assert_eq!(mean_sd(&[4.0]), (4.0, 0.0));
        assert_eq!(mean_sd(&[1.0, 3.0]), (2.0, 2f64.sqrt()));
    }

    #[test]
    fn the_prompt_is_of_the_vocabulary() {
        assert_eq!(prompt(7, 100).len(), 100);
        assert!(prompt(7, 100).iter().all(|&token| token < 7));
    }
}

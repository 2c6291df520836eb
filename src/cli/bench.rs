//! `bench`: speed of prefill and decode. A row's first measurement warms up and is not counted; prefill times end when the
//! device is done, decode times exclude the first token.

mod args;
mod measure;
mod plan;

pub use args::Args;

use super::answer::counters_json;
use super::args::{announce, device_json, load};
use super::context::{Context, Outcome, Result, usage};
use super::output::Output;
use args::{Form, Source};
use cmf_gpu::engine::{DeviceReport, LoadedModel, open_device};
use cmf_gpu::gpu::{self, Costs};
use cmf_gpu::graph::Counters;
use cmf_gpu::lm::run::Session;
use cmf_gpu::synthetic::synthetic;
use cmf_gpu::{Error, Kind, LoadOptions};
use measure::{Row, Test, generation_row, prompt_row};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;

pub fn run(args: Args, context: &mut Context) -> Result {
    if !args.plan && (args.repetitions == 0 || (args.n_prompt == 0 && args.n_gen == 0)) {
        return Err(usage("nothing to measure: expected -r and one of -p, -n above 0"));
    }
    let options = args.options()?;
    let source = args.source()?;
    if args.plan {
        return plan::run(&args, source, options, context);
    }
    if let Some(ctx) = known_ctx(&source, &options)? {
        args.check_fits(ctx)?;
    }
    let costs = if args.costs { device_costs(&options)? } else { None };
    let own_flags = |err| with_own_flags(err, &args);
    let report = match source {
        Source::Model(source) => {
            let mut engine = load(*source, &options, context).map_err(own_flags)?;
            let device = engine.device_report().clone();
            measure(&args, device, engine.session(), costs, context)?
        }
        Source::Synthetic(shape) => {
            let start = Instant::now();
            let (arch, tensors) = synthetic(&shape, args.quant(&shape))?;
            let tensors = Arc::new(tensors);
            let loaded = context.cancellable("loading", |progress| {
                LoadedModel::open(&arch, tensors, &options, progress)
            });
            let mut loaded = loaded.map_err(own_flags)?;
            announce(&loaded.report, start.elapsed().as_secs_f64(), &context.out);
            measure(&args, loaded.report, &mut loaded.session, costs, context)?
        }
    };
    let form = if context.out.json { Form::Json } else { args.output };
    report.print(form, &args, &mut context.out)?;
    Ok(Outcome::Done)
}

/// Names the flags that determine the context, where `--ctx` does not.
fn with_own_flags(err: Error, args: &Args) -> Error {
    if err.kind != Kind::OutOfMemory || args.load.device.ctx.is_some() {
        return err;
    }
    let (p, n, d) = (args.n_prompt, args.n_gen, args.n_depth);
    let text = format!("{}; -p {p}, -n {n} and -d {d} set the context", err.message);
    Error::new(err.kind, text)
}

/// Positions of the context, if known before loading.
fn known_ctx(source: &Source, options: &LoadOptions) -> Result<Option<u32>> {
    let trained = match source {
        Source::Model(source) => source.arch.max_position_embeddings,
        Source::Synthetic(_) if options.ctx == Some(0) => return Ok(None),
        Source::Synthetic(_) => None,
    };
    options.positions(trained).map(Some)
}

/// Costs of the device that will run the model; `None` on the CPU reference.
fn device_costs(options: &LoadOptions) -> Result<Option<Costs>> {
    let (device, _) = open_device(options)?;
    device.map(|device| gpu::costs(&device)).transpose()
}

/// The results.
struct Report {
    rows: Vec<Row>,
    device: DeviceReport,
    costs: Option<Costs>,
    /// Decode runs of the last measurement, and their cost.
    decode: (u64, Counters),
    totals: Counters,
}

fn measure(
    args: &Args,
    device: DeviceReport,
    session: &mut Session,
    costs: Option<Costs>,
    context: &Context,
) -> Result<Report> {
    args.check_fits(device.ctx)?;
    let cancel = context.interrupt.cancel();
    let mut rows = Vec::new();
    let mut decode = (0, Counters::default());
    let test = |tokens| Test {
        depth: args.n_depth,
        tokens,
        repetitions: args.repetitions,
    };
    if args.n_prompt > 0 {
        rows.push(prompt_row(session, test(args.n_prompt), &cancel)?);
    }
    if args.n_gen > 0 {
        let (row, cost) = generation_row(session, test(args.n_gen), &cancel)?;
        rows.push(row);
        decode = cost;
    }
    let totals = session.counters();
    Ok(Report {
        rows,
        device,
        costs,
        decode,
        totals,
    })
}

impl Report {
    fn print(&self, form: Form, args: &Args, out: &mut Output) -> Result<()> {
        match form {
            Form::Json => return out.json(&self.json(args)),
            Form::Csv => out.line("test,tok_s,sd,weight_gb_s")?,
            Form::Md => out.line("| test | tok/s | weights GB/s |\n|---|---:|---:|")?,
        }
        for row in &self.rows {
            let (test, tok_s, sd, rate) = (&row.test, row.tok_s, row.sd, row.weight_gb_s);
            out.line(match form {
                Form::Md => format!("| {test} | {tok_s:.2} ± {sd:.2} | {rate:.2} |"),
                _ => format!("{test},{tok_s:.3},{sd:.3},{rate:.3}"),
            })?;
        }
        match &self.costs {
            Some(costs) if form == Form::Md => out.line(costs_line(costs)),
            _ => Ok(()),
        }
    }

    fn json(&self, args: &Args) -> Value {
        let (runs, decode) = &self.decode;
        json!({
            "rows": self.rows,
            "version": env!("CARGO_PKG_VERSION"),
            "host": format!("{} {}", std::env::consts::ARCH, std::env::consts::OS),
            "device": device_json(&self.device),
            "kv": args.load.device.kv.name(),
            "repetitions": args.repetitions,
            "costs": self.costs,
            "counters": counters_json(decode, *runs, &self.totals, &self.device),
        })
    }
}

fn costs_line(costs: &Costs) -> String {
    format!(
        "\nstream {:.1} GB/s, dependent dispatch {:.2} us, encoding one {:.2} us, empty workgroup {:.1} ns, round trip {:.0} us",
        costs.stream_gb_s, costs.dispatch_us, costs.encode_us, costs.empty_workgroup_ns, costs.round_trip_us
    )
}

//! `bench --plan`: what a model takes on a GPU, and what its programs cost, told without one.

use super::super::output::size;
use super::super::run::peak_bytes;
use super::{Args, Context, Form, Outcome, Result, model, usage};
use cmf_gpu::container::{Arch, Tensors};
use cmf_gpu::engine::{Planned, overlaid, planned, task_with};
use cmf_gpu::options::{LoadOptions, Overlay};
use cmf_gpu::program::Cost;
use cmf_gpu::synthetic::synthetic;
use serde_json::{Value, json};
use std::sync::Arc;

pub(super) fn run(args: &Args, context: &mut Context) -> Result {
    let mut options = args.load.options();
    options.overlay = args.load.overlay.fixed(context)?;
    options.ctx = options.ctx.or(Some(super::wanted(args)?));
    let told = |arch: &Arch, tensors: &dyn Tensors, options: &LoadOptions| -> Result<Told> {
        let Planned {
            model,
            plan,
            task,
            notice,
        } = planned(arch, tensors, options)?;
        Ok(Told {
            task,
            name: arch.arch_name.clone(),
            layers: model.layers.len(),
            parameters: model.parameters(tensors),
            ctx: plan.ctx,
            chunk: plan.chunk,
            cost: plan.cost(),
            notice,
        })
    };
    let told = match args.shape()? {
        Some(_) if args.load.model.optional(context)?.is_some() => {
            return Err(usage("--synthetic takes the place of MODEL"));
        }
        Some(_) if options.overlay != Overlay::Backbone => {
            return Err(usage("skills are a MODEL's, and there is none"));
        }
        Some(shape) => {
            let (arch, tensors) = synthetic(&shape, args.quant)?;
            told(&arch, &tensors, &options)?
        }
        None => {
            let container = Arc::new(model::open(&args.load.model.path(context)?)?);
            model::runnable(&container)?;
            let tensors = overlaid(&container, &options.overlay)?;
            let (task, notice) = task_with(&container, &options.overlay, &options.task)?;
            if let Some(notice) = notice {
                context.out.note(format!("note: {notice}"));
            }
            options.task = task;
            told(&container.header().arch, &*tensors, &options)?
        }
    };
    if let Some(notice) = &told.notice {
        context.out.note(format!("note: {notice}"));
    }
    if let Some(task) = &told.task {
        context.out.note(format!("task {task}"));
    }
    let form = if context.out.json { Form::Json } else { args.output };
    match form {
        Form::Json => context.out.json(&told.json(args.load.device.kv.name()))?,
        Form::Csv => {
            context.out.line("program,dispatches,barriers,weight_bytes")?;
            for row in told.rows() {
                context.out.line(row.join(","))?;
            }
        }
        Form::Md => {
            context.out.line(told.summary())?;
            context
                .out
                .line("\n| program | dispatches | barriers | weight bytes |")?;
            context.out.line("|---|---:|---:|---:|")?;
            for row in told.rows() {
                context.out.line(format!("| {} |", row.join(" | ")))?;
            }
        }
    }
    Ok(Outcome::Done)
}

/// What is shown.
struct Told {
    name: String,
    task: Option<String>,
    layers: usize,
    parameters: u64,
    ctx: u32,
    chunk: u32,
    cost: Cost,
    notice: Option<String>,
}

impl Told {
    fn summary(&self) -> String {
        let cost = &self.cost;
        format!(
            "{}: {} layers, {:.2} · 10⁹ weights in {}\ncontext {}: {} of keys and values, {} of recurrent states, {} of \
             other buffers",
            self.name,
            self.layers,
            self.parameters as f64 / 1e9,
            size(cost.weight_bytes),
            self.ctx,
            size(cost.kv_bytes),
            size(cost.state_bytes),
            size(cost.other_bytes),
        )
    }

    fn rows(&self) -> impl Iterator<Item = [String; 4]> {
        self.cost.programs.iter().map(|program| {
            [
                program.which.name().to_string(),
                program.dispatches.to_string(),
                program.barriers.to_string(),
                program.weight_bytes.to_string(),
            ]
        })
    }

    fn json(&self, kv: &str) -> Value {
        let programs = self.cost.programs.iter().map(|program| {
            json!({
                "program": program.which.name(),
                "dispatches": program.dispatches,
                "barriers": program.barriers,
                "weight_bytes": program.weight_bytes,
            })
        });
        json!({
            "name": self.name,
            "task": self.task,
            "layers": self.layers,
            "parameters": self.parameters,
            "ctx": self.ctx,
            "chunk": self.chunk,
            "kv": kv,
            "weight_bytes": self.cost.weight_bytes,
            "kv_bytes": self.cost.kv_bytes,
            "state_bytes": self.cost.state_bytes,
            "other_bytes": self.cost.other_bytes,
            "programs": programs.collect::<Vec<_>>(),
            "peak_host_bytes": peak_bytes(),
        })
    }
}

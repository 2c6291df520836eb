//! `bench --plan`: the memory that a model needs on a GPU and the cost of its programs, computed without a GPU.

use super::args::{Args, Form, Source};
use crate::cli::answer::peak_bytes;
use crate::cli::context::{Context, Outcome, Result};
use crate::cli::output::{Output, size};
use cmf_gpu::LoadOptions;
use cmf_gpu::engine::{Planned, overlaid, planned, resolve_task};
use cmf_gpu::graph::Cost;
use cmf_gpu::synthetic::synthetic;
use serde_json::{Value, json};

pub fn run(args: &Args, source: Source, options: LoadOptions, context: &mut Context) -> Result {
    let report = match source {
        Source::Synthetic(shape) => {
            let (arch, tensors) = synthetic(&shape, args.quant(&shape))?;
            let planned = planned(&arch, &tensors, &options)?;
            Report::new("synthetic", arch.arch_name, planned.model.parameters(&tensors), planned)
        }
        Source::Model(source) => {
            context.out.notices(&source.notes);
            let tensors = overlaid(&source, &options.overlay)?;
            let (task, notice) = resolve_task(&source, &options.overlay, &options.task)?;
            context.out.notices(&notice);
            let planned = planned(&source.arch, &*tensors, &options.task(task))?;
            Report::new(
                source.format,
                source.arch.arch_name.clone(),
                planned.model.parameters(&*tensors),
                planned,
            )
        }
    };
    context.out.notices(&report.planned.notices);
    if let Some(task) = &report.planned.task {
        context.out.note(format!("task {task}"));
    }
    let form = if context.out.json { Form::Json } else { args.output };
    report.print(form, args.load.device.kv.name(), &mut context.out)?;
    Ok(Outcome::Done)
}

struct Report {
    format: &'static str,
    name: String,
    parameters: u64,
    planned: Planned,
    cost: Cost,
}

impl Report {
    fn new(format: &'static str, name: String, parameters: u64, planned: Planned) -> Report {
        let cost = planned.plan.cost();
        Report {
            format,
            name,
            parameters,
            planned,
            cost,
        }
    }

    fn print(&self, form: Form, kv: &str, out: &mut Output) -> Result<()> {
        match form {
            Form::Json => return out.json(&self.json(kv)),
            Form::Csv => out.line("program,dispatches,barriers,weight_bytes")?,
            Form::Md => {
                out.line(self.summary())?;
                out.line("\n| program | dispatches | barriers | weight bytes |\n|---|---:|---:|---:|")?;
            }
        }
        for program in &self.cost.programs {
            let (name, dispatches) = (program.name, program.dispatches);
            let (barriers, bytes) = (program.barriers, program.weight_bytes);
            out.line(match form {
                Form::Md => format!("| {name} | {dispatches} | {barriers} | {bytes} |"),
                _ => format!("{name},{dispatches},{barriers},{bytes}"),
            })?;
        }
        Ok(())
    }

    fn summary(&self) -> String {
        let Planned { model, plan, .. } = &self.planned;
        let cost = &self.cost;
        format!(
            "{}{}: {} layers, {:.2} · 10⁹ weights in {}\ncontext {}: {} of keys and values, {} of recurrent states, {} of \
             other buffers",
            self.name,
            match self.format {
                "synthetic" => String::new(),
                format => format!(" ({format})"),
            },
            model.layers.len(),
            self.parameters as f64 / 1e9,
            size(cost.weight_bytes),
            plan.ctx,
            size(cost.kv_bytes),
            size(cost.state_bytes),
            size(cost.other_bytes),
        )
    }

    fn json(&self, kv: &str) -> Value {
        let Planned { model, plan, task, .. } = &self.planned;
        let cost = &self.cost;
        json!({
            "format": self.format,
            "name": self.name,
            "task": task,
            "layers": model.layers.len(),
            "parameters": self.parameters,
            "ctx": plan.ctx,
            "chunk": plan.chunk,
            "kv": kv,
            "weight_bytes": cost.weight_bytes,
            "kv_bytes": cost.kv_bytes,
            "state_bytes": cost.state_bytes,
            "other_bytes": cost.other_bytes,
            "programs": cost.programs,
            "peak_host_bytes": peak_bytes(),
        })
    }
}

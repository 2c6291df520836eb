//! `bench --plan`: the memory that a model needs on a GPU and the cost of its programs, computed without a GPU.

use super::args::{Args, Form, Source};
use crate::cli::context::{Context, Outcome, Result};
use crate::cli::output::{Output, size};
use crate::cli::report::peak_bytes;
use cmf_gpu::engine::{Planned, overlaid, planned, resolve_task};
use cmf_gpu::source::{Arch, Tensors};
use cmf_gpu::synthetic::synthetic;
use cmf_gpu::{LoadOptions, Notice};
use serde_json::{Value, json};

pub fn run(args: &Args, source: Source, context: &mut Context) -> Result {
    let options = args.options(&source)?;
    let (report, notices) = match source {
        Source::Synthetic(shape) => {
            let (arch, tensors) = synthetic(&shape, args.quant())?;
            Report::new("synthetic", &arch, &tensors, &options)?
        }
        Source::Model => {
            let source = args.load.open()?;
            context.out.notices(&source.notes);
            let tensors = overlaid(&source, &options.overlay)?;
            let (task, notice) = resolve_task(&source, &options.overlay, &options.task)?;
            context.out.notices(&notice);
            Report::new(source.format, &source.arch, &*tensors, &options.task(task))?
        }
    };
    context.out.notices(&notices);
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
}

impl Report {
    fn new(
        format: &'static str,
        arch: &Arch,
        tensors: &dyn Tensors,
        options: &LoadOptions,
    ) -> Result<(Report, Vec<Notice>)> {
        let mut planned = planned(arch, tensors, options)?;
        let notices = std::mem::take(&mut planned.notices);
        let report = Report {
            format,
            name: arch.arch_name.clone(),
            parameters: planned.model.parameters(tensors),
            planned,
        };
        Ok((report, notices))
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
        for program in &self.planned.plan.cost().programs {
            let row = [
                program.name.to_string(),
                program.dispatches.to_string(),
                program.barriers.to_string(),
                program.weight_bytes.to_string(),
            ];
            out.line(match form {
                Form::Md => format!("| {} |", row.join(" | ")),
                _ => row.join(","),
            })?;
        }
        Ok(())
    }

    fn summary(&self) -> String {
        let Planned { model, plan, .. } = &self.planned;
        let cost = plan.cost();
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
        let cost = plan.cost();
        let programs = cost.programs.iter().map(|program| {
            json!({
                "program": program.name,
                "dispatches": program.dispatches,
                "barriers": program.barriers,
                "weight_bytes": program.weight_bytes,
            })
        });
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
            "programs": programs.collect::<Vec<_>>(),
            "peak_host_bytes": peak_bytes(),
        })
    }
}

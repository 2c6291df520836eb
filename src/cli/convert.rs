//! `convert`: other people's files to CMF.

use super::output::size;
use super::{Context, Outcome, Result};
use cmf_gpu::convert::{Event, Options, convert};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::error::escape;
use serde_json::json;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

/// Flags of `convert`.
#[derive(clap::Args)]
pub struct Args {
    /// A Hugging Face directory, a .safetensors, .gguf or .cmf file
    src: PathBuf,
    /// The CMF file to write
    #[arg(short, long, env = "CMF_GPU_OUT", hide_env = true)]
    out: PathBuf,
    /// Type of matrices: f32 f16 bf16 q8 q8_2f q4 q4t q4tp vbit q1 q1s q1t
    #[arg(long, env = "CMF_GPU_QUANT", default_value = "q4tp", value_parser = quant, hide_env = true)]
    quant: Dtype,
}

fn quant(name: &str) -> std::result::Result<Dtype, String> {
    Dtype::from_quant_name(name).ok_or_else(|| {
        let names: Vec<_> = Dtype::all()
            .map(Dtype::quant_name)
            .filter(|name| !name.is_empty())
            .collect();
        format!("wanted one of {}", names.join(" "))
    })
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let cancel = context.interrupt.graceful();
    let start = Instant::now();
    let mut bar = context.out.progress("converting", false);
    let report = convert(&args.src, &args.out, &Options { quant: args.quant }, &mut |event| {
        let Event::Tensor { done, total, .. } = event;
        bar.set(done as u64, total as u64);
        match cancel.is_cancelled() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    })?;
    drop(bar);
    for note in &report.notes {
        context.out.note(format!("note: {note}"));
    }
    for dropped in &report.dropped {
        context.out.note(format!("dropped: {dropped}"));
    }
    if context.out.json {
        context.out.json(&json!({
            "tensors": report.tensors,
            "bytes": report.bytes,
            "dropped": report.dropped,
            "notes": report.notes,
        }))?;
    } else {
        context.out.line(format!(
            "{}: {} tensors, {}, in {:.1} s",
            escape(args.out.display().to_string()),
            report.tensors,
            size(report.bytes),
            start.elapsed().as_secs_f64()
        ))?;
    }
    Ok(Outcome::Done)
}

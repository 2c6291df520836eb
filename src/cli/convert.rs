//! `convert`: other people's files to CMF.

use super::output::size;
use super::{Context, Outcome, Result};
use cmf_gpu::convert::{Event, Options, Report, RouterStats, convert};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::error::{Error, escape};
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
    /// The type of the tensors whose names match, such as '*.mlp.down_proj.weight=q8'; * is anything, ? one character, the
    /// last that matches counts; may be given more than once
    #[arg(long, value_name = "GLOB=Q", value_parser = tensor_quant)]
    tensor_quant: Vec<(String, Dtype)>,
    /// Mean bits of a vbit weight, 3 to 8 [default: 4.25]
    #[arg(long, value_name = "B")]
    mean_bits: Option<f64>,
    /// How often routers choose experts, {"layers": {"3": [f0, f1, ...]}}: vbit gives often used experts more bits
    #[arg(long, value_name = "F.json")]
    router_stats: Option<PathBuf>,
}

fn tensor_quant(text: &str) -> std::result::Result<(String, Dtype), String> {
    let (glob, name) = text.rsplit_once('=').ok_or("wanted GLOB=Q")?;
    Ok((glob.to_owned(), quant(name)?))
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
    let stats = args.router_stats.as_deref().map(|path| {
        let json = std::fs::read(path).map_err(|err| Error::io(path, &err))?;
        RouterStats::from_json(&json).map_err(|err| err.context(path.display()))
    });
    let options = Options {
        quant: args.quant,
        overrides: args.tensor_quant,
        mean_bits: args.mean_bits,
        router_stats: stats.transpose()?,
    };
    let report = convert(&args.src, &args.out, &options, &mut |event| {
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
    groups(&report, context);
    if context.out.json {
        context.out.json(&json!({
            "tensors": report.tensors,
            "bytes": report.bytes,
            "dropped": report.dropped,
            "notes": report.notes,
            "groups": report.groups.iter().map(|group| json!({
                "name": group.name,
                "dtype": group.dtype.name(),
                "tensors": group.tensors,
                "bytes": group.bytes,
                "bits_per_weight": group.bits_per_weight(),
                "relative_error": group.relative_error(),
            })).collect::<Vec<_>>(),
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

/// Says on stderr what the matrices became.
fn groups(report: &Report, context: &Context) {
    for group in report.groups.iter().filter(|group| group.matrices) {
        context.out.note(format!(
            "{:8} {:6.3} bits  error {:8.6}  {} × {}",
            group.dtype.name(),
            group.bits_per_weight(),
            group.relative_error(),
            group.tensors,
            group.name
        ));
    }
}

//! `convert`: other people's files to CMF.

use super::output::size;
use super::shard::gigabytes;
use super::{Context, Outcome, Result};
use cmf_gpu::container::not_the_output;
use cmf_gpu::convert::{Event, Options, Report, RouterStats, convert};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::error::{Error, escape};
use cmf_gpu::tools::shard::convert_to_shards;
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
    /// Writes several files of at most so many gigabytes (10^9); OUT is a directory or what their names begin with
    #[arg(long, env = "CMF_GPU_SHARD_MAX_GB", value_name = "GB", value_parser = gigabytes, hide_env = true)]
    shard_max_gb: Option<u64>,
    /// The type of the tensors whose names match, such as '*.mlp.down_proj.weight=q8'; * is anything, ? one character, the
    /// last that matches counts; may be given more than once
    #[arg(long, env = "CMF_GPU_TENSOR_QUANT", value_name = "GLOB=Q", value_parser = tensor_quant, hide_env = true)]
    tensor_quant: Vec<(String, Dtype)>,
    /// Mean bits of a vbit weight, 3 to 8 [default: 4.25]
    #[arg(
        long,
        env = "CMF_GPU_MEAN_BITS",
        value_name = "B",
        allow_negative_numbers = true,
        hide_env = true
    )]
    mean_bits: Option<f64>,
    /// How often routers choose experts, {"layers": {"3": [f0, f1, ...]}}: vbit gives often used experts more bits
    #[arg(long, env = "CMF_GPU_ROUTER_STATS", value_name = "F.json", hide_env = true)]
    router_stats: Option<PathBuf>,
    /// Fail when tensors of the source would be left out, instead of naming them
    #[arg(long, env = "CMF_GPU_STRICT", hide_env = true)]
    strict: bool,
}

fn tensor_quant(text: &str) -> std::result::Result<(String, Dtype), String> {
    let (glob, name) = text.rsplit_once('=').ok_or("wanted GLOB=Q")?;
    Ok((glob.to_owned(), quant(name)?))
}

/// A type by the name it is asked for.
pub fn quant(name: &str) -> std::result::Result<Dtype, String> {
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
    let going_on = || match cancel.is_cancelled() {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    };
    let stats = args.router_stats.as_deref().map(|path| {
        not_the_output(path, &args.out)?;
        let json = std::fs::read(path).map_err(|err| Error::io(path, &err))?;
        RouterStats::from_json(&json).map_err(|err| err.context(path.display()))
    });
    let options = Options {
        quant: args.quant,
        overrides: args.tensor_quant,
        mean_bits: args.mean_bits,
        router_stats: stats.transpose()?,
        strict: args.strict,
    };
    let mut progress = |event: Event| {
        let Event::Tensor { done, total, .. } = event;
        bar.set(done as u64, total as u64);
        going_on()
    };
    let report = match args.shard_max_gb {
        None => convert(&args.src, &args.out, &options, &mut progress)?,
        Some(most) => convert_to_shards(&args.src, &args.out, most, &options, &mut progress)?.0,
    };
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

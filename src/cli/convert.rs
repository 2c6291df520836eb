//! `convert`: other model formats to CMF, and ternary models from GGUF to `.ninfer` and back.

use super::context::{Context, Result, usage};
use super::model;
use super::output::{shown, size};
use super::tools::gigabytes;
use cmf_gpu::convert::{Event, Exchange, Options, Report, RouterStats, Share, convert, exchange};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::error::Error;
use cmf_gpu::format::not_the_output;
use cmf_gpu::image;
use cmf_gpu::tools::shard::convert_to_shards;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Instant;

#[derive(clap::Args)]
pub struct Args {
    /// A Hugging Face or diffusers directory, a .safetensors, .gguf, .ninfer or .cmf file
    src: PathBuf,
    /// The CMF file to write; for a ternary .gguf or .ninfer file also a file called *.ninfer or *.gguf, with the same codes and
    /// values
    #[arg(short, long)]
    out: PathBuf,
    /// Type of matrices: f32 f16 bf16 q8 q8_2f q4 q4t q4tp vbit q1 q1s q1t [default: quantised matrices keep their values if
    /// a type of CMF holds them exactly, the others are q4tp]
    #[arg(long, value_parser = quant)]
    quant: Option<Dtype>,
    /// Writes several files of at most GB gigabytes (10^9 bytes); OUT is a directory or the start of their names
    #[arg(long, value_name = "GB", value_parser = gigabytes)]
    shard_max_gb: Option<u64>,
    /// The type of the tensors whose names match, such as '*.mlp.down_proj.weight=q8'; * matches any text, ? one character;
    /// the last match decides; may be repeated
    #[arg(long, value_name = "GLOB=Q", value_parser = tensor_quant)]
    tensor_quant: Vec<(String, Dtype)>,
    /// Mean bits of a vbit weight, 3 to 8 [default: 4.25]
    #[arg(long, value_name = "B", allow_negative_numbers = true)]
    mean_bits: Option<f64>,
    /// How often each expert was chosen, {"layers": {"3": [f0, f1, ...]}}: vbit gives frequent experts more bits
    #[arg(long, value_name = "F.json")]
    router_stats: Option<PathBuf>,
    /// Fails if a tensor of the source is not used, instead of listing it
    #[arg(long)]
    strict: bool,
}

fn tensor_quant(text: &str) -> Result<(String, Dtype), String> {
    let (glob, name) = text.rsplit_once('=').ok_or("expected GLOB=Q")?;
    Ok((glob.to_owned(), quant(name)?))
}

/// A type by its quantisation name.
pub fn quant(name: &str) -> Result<Dtype, String> {
    Dtype::from_quant_name(name).ok_or_else(|| {
        let names = Dtype::all().map(Dtype::quant_name).filter(|name| !name.is_empty());
        format!("expected one of {}", names.collect::<Vec<_>>().join(" "))
    })
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let start = Instant::now();
    let exchanged = exchanged(&args)?;
    let options = options(&args)?;
    if args.src.is_dir() {
        bindable(&args.src)?;
    }
    let report = context.with_bar("converting", false, |progress| {
        let mut progress = |Event::Tensor { done, total, .. }: Event| progress(done as u64, total as u64);
        if let Some(to) = exchanged {
            return exchange(&args.src, &args.out, to, args.strict, &mut progress);
        }
        match args.shard_max_gb {
            None => convert(&args.src, &args.out, &options, &mut progress),
            Some(most) => Ok(convert_to_shards(&args.src, &args.out, most, &options, &mut progress)?.0),
        }
    })?;
    print_notes(&report, context);
    print_shares(&report, context);
    let (out, tensors, bytes) = (shown(&args.out), report.tensors, size(report.bytes));
    let line = format!(
        "{out}: {tensors} tensors, {bytes}, in {:.1} s",
        start.elapsed().as_secs_f64()
    );
    context.answer(json(&report), [line])
}

/// The format that the name of the output asks for, if it is not CMF. Errors: `Usage` for flags about types and shards.
fn exchanged(args: &Args) -> Result<Option<Exchange>, Error> {
    let Some(to) = Exchange::of(&args.out) else {
        return Ok(None);
    };
    let flags = [
        ("--quant", args.quant.is_some()),
        ("--tensor-quant", !args.tensor_quant.is_empty()),
        ("--mean-bits", args.mean_bits.is_some()),
        ("--router-stats", args.router_stats.is_some()),
        ("--shard-max-gb", args.shard_max_gb.is_some()),
    ];
    match flags.iter().find(|(_, given)| *given) {
        None => Ok(Some(to)),
        Some((flag, _)) => Err(usage(format!(
            "{}: {flag} is for CMF files; a file of this name holds the weights of the source as they are",
            shown(&args.out)
        ))),
    }
}

/// Checks the networks of a pipeline, whose tensors are copied under their own names; those of a language model are checked
/// when they are renamed. Errors: as [`image::bind`].
fn bindable(directory: &Path) -> Result<()> {
    let source = model::open(directory)?;
    if source.pipeline().is_some() {
        let config = image::Config::of(&*source.tensors)?;
        image::bind(&config, &*source.tensors)?;
    }
    Ok(())
}

fn options(args: &Args) -> Result<Options> {
    let stats = args.router_stats.as_deref().map(|path| {
        not_the_output(path, &args.out)?;
        let json = std::fs::read(path).map_err(|err| Error::io(path, &err))?;
        RouterStats::from_json(&json).map_err(|err| err.context(path.display()))
    });
    Ok(Options {
        quant: args.quant,
        overrides: args.tensor_quant.clone(),
        mean_bits: args.mean_bits,
        router_stats: stats.transpose()?,
        strict: args.strict,
    })
}

fn json(report: &Report) -> Value {
    let groups = report.groups.iter().map(|group| {
        json!({
            "name": group.name,
            "dtype": group.dtype.name(),
            "tensors": group.tensors,
            "bytes": group.bytes,
            "bits_per_weight": group.bits_per_weight(),
            "relative_error": group.relative_error(),
        })
    });
    json!({
        "tensors": report.tensors,
        "bytes": report.bytes,
        "dropped": report.dropped,
        "notes": report.notes,
        "groups": groups.collect::<Vec<_>>(),
        "kept": share(&report.kept),
        "quantised_again": share(&report.again),
        "unrotated": share(&report.unrotated),
    })
}

fn share(share: &Share) -> Value {
    json!({
        "tensors": share.tensors,
        "source_bytes": share.source_bytes,
        "bytes": share.bytes,
        "relative_error": share.relative_error(),
    })
}

/// Prints what became of matrices that were quantised in the source.
fn print_shares(report: &Report, context: &Context) {
    let sizes = |share: &Share| format!("{}, in the source {}", size(share.bytes), size(share.source_bytes));
    let (kept, again, unrotated) = (&report.kept, &report.again, &report.unrotated);
    if kept.tensors > 0 {
        let line = format!("kept exactly: {} quantised matrices ({})", kept.tensors, sizes(kept));
        context.out.note(line);
    }
    if again.tensors > 0 {
        context.out.note(format!(
            "WARNING: quantised again: {} matrices that are quantised in the source ({}), with a relative error of {:.4} \
             against its values",
            again.tensors,
            sizes(again),
            again.relative_error()
        ));
    }
    if unrotated.tensors > 0 {
        context.out.note(format!(
            "WARNING: un-rotated: lossy: {} matrices ({}), with a relative error of {:.4} against the values without rotation",
            unrotated.tensors,
            sizes(unrotated),
            unrotated.relative_error()
        ));
    }
}

/// Prints notes, unused tensors, and the types and errors of the matrices on stderr.
fn print_notes(report: &Report, context: &Context) {
    context.out.notices(&report.notes);
    for dropped in &report.dropped {
        context.out.note(format!("dropped: {dropped}"));
    }
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

//! Tools for model files: `compact`, `defrag`, `moe-mask`, `moe-defrag`, `shard`, `sign` and `diff`.

use super::context::{Context, Result, checked};
use super::model::{ModelArgs, open_cmf, require_file};
use super::output::{shown, size};
use cmf_gpu::error::escape;
use cmf_gpu::format::{hex, not_the_output};
use cmf_gpu::tools::diff::{self, Difference};
use cmf_gpu::tools::moe::{self, Narrowing, RoutingStats};
use cmf_gpu::tools::{self, Written};
use serde_json::{Value, json};
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct CompactArgs {
    /// A .cmf file; any one of the files if the model has several
    model: PathBuf,
    /// The CMF file to write
    #[arg(short, long)]
    out: PathBuf,
}

/// Writes a model as one file without unused bytes.
pub fn compact(args: CompactArgs, context: &mut Context) -> Result {
    require_file(&args.model)?;
    context.writing("compacting", &args.out, |progress| {
        tools::shard::compact(&args.model, &args.out, progress)
    })
}

#[derive(clap::Args)]
pub struct DefragArgs {
    /// A .cmf file with task masks
    model: PathBuf,
    /// The task whose neurons are kept
    #[arg(long, value_name = "NAME")]
    task: String,
    /// Keeps heads, layers and experts that the mask switches off
    #[arg(long)]
    ffn_only: bool,
    /// The CMF file to write
    #[arg(short, long)]
    out: PathBuf,
}

/// Removes the neurons that a task's mask switches off.
pub fn defrag(args: DefragArgs, context: &mut Context) -> Result {
    require_file(&args.model)?;
    context.writing("defragmenting", &args.out, |progress| {
        tools::defrag::defrag(&args.model, &args.task, args.ffn_only, &args.out, progress)
    })
}

#[derive(clap::Args)]
pub struct MoeDefragArgs {
    /// A .cmf file of a network with experts
    model: PathBuf,
    /// How often each expert was chosen: {"layers": {"3": [f0, f1, ...]}}
    #[arg(long, value_name = "FILE")]
    stats: PathBuf,
    /// The share of recorded choices that the kept experts of each layer cover, above 0 up to 1
    #[arg(long, value_name = "SHARE", value_parser = share, allow_negative_numbers = true)]
    cover: f64,
    /// The CMF file to write
    #[arg(short, long)]
    out: PathBuf,
}

#[derive(clap::Args)]
pub struct MoeMaskArgs {
    #[command(flatten)]
    kept: MoeDefragArgs,
    /// The name of the new mask
    #[arg(long, value_name = "NAME")]
    task: String,
}

/// A share, checked before any file is opened.
fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| *share > 0.0 && *share <= 1.0);
    share.ok_or_else(|| "expected a number above 0 and at most 1, such as 0.95".into())
}

impl MoeDefragArgs {
    fn narrowing(&self) -> Result<Narrowing> {
        require_file(&self.model)?;
        not_the_output(&self.stats, &self.out)?;
        Ok(Narrowing {
            stats: RoutingStats::open(&self.stats)?,
            cover: self.cover,
        })
    }
}

/// Adds a mask that keeps the experts a task uses.
pub fn moe_mask(args: MoeMaskArgs, context: &mut Context) -> Result {
    let MoeMaskArgs { kept, task } = args;
    let narrowing = kept.narrowing()?;
    context.writing("masking", &kept.out, |progress| {
        moe::mask(&kept.model, &narrowing, &task, &kept.out, progress)
    })
}

/// Removes the experts that a task does not use.
pub fn moe_defrag(args: MoeDefragArgs, context: &mut Context) -> Result {
    let narrowing = args.narrowing()?;
    context.writing("defragmenting", &args.out, |progress| {
        moe::defrag(&args.model, &narrowing, &args.out, progress)
    })
}

#[derive(clap::Args)]
pub struct ShardArgs {
    /// A .cmf file; any one of the files if the model has several
    model: PathBuf,
    /// The most bytes of a file, in gigabytes (10^9); a larger tensor gets a file of its own
    #[arg(long, value_name = "GB", value_parser = gigabytes)]
    shard_max_gb: u64,
    /// An existing directory, or the start of the names of the files
    #[arg(short, long, value_name = "DIR-OR-BASE")]
    out: PathBuf,
}

/// Bytes of a decimal number of gigabytes.
pub fn gigabytes(text: &str) -> Result<u64, String> {
    // "nan" parses as a number.
    let number = text.parse::<f64>().ok().filter(|number| !number.is_nan());
    let number = number.ok_or("expected a number of gigabytes, such as 4 or 0.5")?;
    match number * 1e9 {
        bytes if bytes < 1.0 => Err("expected more than 0 gigabytes, at least a byte".into()),
        bytes if bytes > 1e18 => Err("expected at most 1e9 gigabytes".into()),
        bytes => Ok(bytes as u64),
    }
}

/// Splits a model into several files.
pub fn shard(args: ShardArgs, context: &mut Context) -> Result {
    require_file(&args.model)?;
    let (paths, written) = context.cancellable("splitting", |progress| {
        tools::shard::shard(&args.model, args.shard_max_gb, &args.out, progress)
    })?;
    let Written { tensors, bytes, notes } = written;
    context.out.notices(&notes);
    let files: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    let total = format!("{tensors} tensors, {}", size(bytes));
    let lines: Vec<String> = files.iter().cloned().map(escape).chain([total]).collect();
    context.answer(
        json!({"files": files, "tensors": tensors, "bytes": bytes, "notes": notes}),
        lines,
    )
}

#[derive(clap::Args)]
pub struct SignArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The secret key: a file with a 32-byte seed in hex
    #[arg(long, value_name = "FILE")]
    key: PathBuf,
}

/// Signs the files of a model.
pub fn sign(args: SignArgs, context: &mut Context) -> Result {
    let model = args.model.path()?;
    require_file(&model)?;
    let signed = context.cancellable("signing", |progress| tools::sign::sign(&model, &args.key, progress))?;
    let files = signed.iter().map(|signed| {
        json!({
            "file": signed.file.display().to_string(),
            "signature": signed.signature.display().to_string(),
            "pubkey": signed.key.to_hex(),
            "sha256": hex(&signed.sha256),
        })
    });
    let lines = signed
        .iter()
        .map(|signed| format!("{}: signed by {}", shown(&signed.signature), signed.key.to_hex()));
    context.answer(json!({"files": files.collect::<Vec<_>>()}), lines)
}

#[derive(clap::Args)]
pub struct DiffArgs {
    /// A .cmf file; any one of the files if the model has several
    a: PathBuf,
    /// The model to compare with
    b: PathBuf,
}

/// Lists the differences between two models. Exit code 1 if there are any.
pub fn diff(args: DiffArgs, context: &mut Context) -> Result {
    let found = diff::diff(&open_cmf(&args.a)?, &open_cmf(&args.b)?)?;
    let mut object = json!({"equal": found.is_empty()});
    let mut lines = Vec::new();
    for (part, differences) in found.lists() {
        object[part] = json!(differences);
        lines.extend(differences.iter().map(|difference| line(part, difference)));
    }
    if found.is_empty() {
        lines.push("equal".into());
    }
    context.answer(object, lines)?;
    checked(found.is_empty())
}

fn line(part: &str, Difference { name, a, b }: &Difference) -> String {
    let text = |value: &Option<Value>| value.as_ref().map(Value::to_string).unwrap_or_default();
    escape(match (a, b) {
        (Some(a), None) => format!("- {part} {name}: {a}"),
        (None, Some(b)) => format!("+ {part} {name}: {b}"),
        (a, b) => format!("~ {part} {name}: {} -> {}", text(a), text(b)),
    })
}

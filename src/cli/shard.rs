//! `shard`: splits a model into several files.

use super::context::{Context, Outcome, Result};
use super::model::require_file;
use super::output::size;
use super::work::cancellable;
use cmf_gpu::error::escape;
use cmf_gpu::tools::shard::shard;
use serde_json::json;
use std::path::PathBuf;

/// Flags of `shard`.
#[derive(clap::Args)]
pub struct Args {
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

pub fn run(args: Args, context: &mut Context) -> Result {
    require_file(&args.model)?;
    let (paths, written) = cancellable("splitting", context, &mut |progress| {
        shard(&args.model, args.shard_max_gb, &args.out, progress)
    })?;
    context.out.notices(&written.notes);
    let paths: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    if context.out.json {
        context.out.json(&json!({
            "files": paths,
            "tensors": written.tensors,
            "bytes": written.bytes,
            "notes": written.notes,
        }))?;
    } else {
        for path in paths {
            context.out.line(escape(path))?;
        }
        context
            .out
            .line(format!("{} tensors, {}", written.tensors, size(written.bytes)))?;
    }
    Ok(Outcome::Done)
}

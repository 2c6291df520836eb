//! `shard`: a model in several files.

use super::model::there;
use super::output::size;
use super::work::cancellable;
use super::{Context, Outcome, Result};
use cmf_gpu::error::escape;
use cmf_gpu::tools::shard::shard;
use serde_json::json;
use std::path::PathBuf;

/// Flags of `shard`.
#[derive(clap::Args)]
pub struct Args {
    /// A .cmf file; of a model in several files, any of them
    model: PathBuf,
    /// The most bytes of a file, in gigabytes (10^9); a larger tensor gets a file of its own
    #[arg(long, env = "CMF_GPU_SHARD_MAX_GB", value_name = "GB", value_parser = gigabytes, hide_env = true)]
    shard_max_gb: u64,
    /// A directory that is there, or what the names of the files begin with
    #[arg(short, long, env = "CMF_GPU_OUT", value_name = "DIR-OR-BASE", hide_env = true)]
    out: PathBuf,
}

/// Bytes of a decimal number of gigabytes.
pub fn gigabytes(text: &str) -> std::result::Result<u64, String> {
    // Not a number: also what is written as "nan".
    let number = text.parse::<f64>().ok().filter(|number| !number.is_nan());
    let number = number.ok_or("wanted a number of gigabytes, such as 4 or 0.5")?;
    match number * 1e9 {
        bytes if bytes < 1.0 => Err("wanted more than 0 gigabytes, at least a byte".into()),
        bytes if bytes > 1e18 => Err("wanted at most 1e9 gigabytes".into()),
        bytes => Ok(bytes as u64),
    }
}

pub fn run(args: Args, context: &mut Context) -> Result {
    there(&args.model)?;
    let (paths, written) = cancellable("splitting", context, &mut |progress| {
        shard(&args.model, args.shard_max_gb, &args.out, progress)
    })?;
    for note in &written.notes {
        context.out.note(format!("note: {note}"));
    }
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

//! `defrag`: removes the neurons that a task's mask switches off.

use super::context::{Context, Result};
use super::model::require_file;
use super::work::writing;
use cmf_gpu::tools::defrag::defrag;
use std::path::PathBuf;

/// Flags of `defrag`.
#[derive(clap::Args)]
pub struct Args {
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

pub fn run(args: Args, context: &mut Context) -> Result {
    require_file(&args.model)?;
    writing("defragmenting", &args.out, context, &mut |progress| {
        defrag(&args.model, &args.task, args.ffn_only, &args.out, progress)
    })
}

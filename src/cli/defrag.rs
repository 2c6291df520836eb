//! `defrag`: drops the neurons that a task's mask switches off.

use super::model::there;
use super::work::writing;
use super::{Context, Result};
use clap::builder::FalseyValueParser;
use cmf_gpu::tools::defrag::defrag;
use std::path::PathBuf;

/// Flags of `defrag`.
#[derive(clap::Args)]
pub struct Args {
    /// A .cmf file with task masks
    model: PathBuf,
    /// The task whose neurons stay
    #[arg(long, env = "CMF_GPU_TASK", value_name = "NAME", hide_env = true)]
    task: String,
    /// Leaves heads, layers and experts on that the mask switches off
    #[arg(long, env = "CMF_GPU_FFN_ONLY", value_parser = FalseyValueParser::new(), hide_env = true)]
    ffn_only: bool,
    /// The CMF file to write
    #[arg(short, long, env = "CMF_GPU_OUT", hide_env = true)]
    out: PathBuf,
}

pub fn run(args: Args, context: &mut Context) -> Result {
    there(&args.model)?;
    writing("defragmenting", &args.out, context, &mut |progress| {
        defrag(&args.model, &args.task, args.ffn_only, &args.out, progress)
    })
}

//! `compact`: a model as one file without dead bytes.

use super::model::there;
use super::work::writing;
use super::{Context, Result};
use cmf_gpu::tools::compact::compact;
use std::path::PathBuf;

/// Flags of `compact`.
#[derive(clap::Args)]
pub struct Args {
    /// A .cmf file; of a model in several files, any of them
    model: PathBuf,
    /// The CMF file to write
    #[arg(short, long, env = "CMF_GPU_OUT", hide_env = true)]
    out: PathBuf,
}

pub fn run(args: Args, context: &mut Context) -> Result {
    there(&args.model)?;
    writing("compacting", &args.out, context, &mut |progress| {
        compact(&args.model, &args.out, progress)
    })
}

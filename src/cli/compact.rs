//! `compact`: writes a model as one file without unused bytes.

use super::context::{Context, Result};
use super::model::require_file;
use super::work::writing;
use cmf_gpu::tools::compact::compact;
use std::path::PathBuf;

/// Flags of `compact`.
#[derive(clap::Args)]
pub struct Args {
    /// A .cmf file; any one of the files if the model has several
    model: PathBuf,
    /// The CMF file to write
    #[arg(short, long)]
    out: PathBuf,
}

pub fn run(args: Args, context: &mut Context) -> Result {
    require_file(&args.model)?;
    writing("compacting", &args.out, context, &mut |progress| {
        compact(&args.model, &args.out, progress)
    })
}

//! `moe-mask` and `moe-defrag`: restrict a mixture of experts to the experts that a task uses.

use super::context::{Context, Result};
use super::model::require_file;
use super::work::writing;
use cmf_gpu::format::not_the_output;
use cmf_gpu::tools::moe::{self, Narrowing, RoutingStats};
use std::path::PathBuf;

/// Flags of both commands.
#[derive(clap::Args)]
struct Common {
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

/// A share, checked before any file is opened.
fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| *share > 0.0 && *share <= 1.0);
    share.ok_or_else(|| "expected a number above 0 and at most 1, such as 0.95".into())
}

impl Common {
    fn narrowing(&self) -> Result<Narrowing> {
        require_file(&self.model)?;
        not_the_output(&self.stats, &self.out)?;
        Ok(Narrowing {
            stats: RoutingStats::open(&self.stats)?,
            cover: self.cover,
        })
    }
}

/// Flags of `moe-mask`.
#[derive(clap::Args)]
pub struct MaskArgs {
    #[command(flatten)]
    common: Common,
    /// The name of the new mask
    #[arg(long, value_name = "NAME")]
    task: String,
}

/// Flags of `moe-defrag`.
#[derive(clap::Args)]
pub struct DefragArgs {
    #[command(flatten)]
    common: Common,
}

pub fn mask(args: MaskArgs, context: &mut Context) -> Result {
    let MaskArgs { common, task } = args;
    let narrowing = common.narrowing()?;
    writing("masking", &common.out, context, &mut |progress| {
        moe::mask(&common.model, &narrowing, &task, &common.out, progress)
    })
}

pub fn defrag(args: DefragArgs, context: &mut Context) -> Result {
    let DefragArgs { common } = args;
    let narrowing = common.narrowing()?;
    writing("defragmenting", &common.out, context, &mut |progress| {
        moe::defrag(&common.model, &narrowing, &common.out, progress)
    })
}

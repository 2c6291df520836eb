//! `moe-mask` and `moe-defrag`: a mixture of experts narrowed to what a task uses.

use super::model::there;
use super::work::writing;
use super::{Context, Result};
use cmf_gpu::container::not_the_output;
use cmf_gpu::tools::moe::{self, Narrowing, RoutingStats};
use std::path::PathBuf;

/// What both commands need.
#[derive(clap::Args)]
struct Common {
    /// A .cmf file of a network with experts
    model: PathBuf,
    /// How often each expert was chosen: {"layers": {"3": [f0, f1, ...]}}
    #[arg(long, env = "CMF_GPU_STATS", value_name = "FILE", hide_env = true)]
    stats: PathBuf,
    /// The share of recorded choices that the kept experts of each layer take, above 0 up to 1
    #[arg(
        long,
        env = "CMF_GPU_COVER",
        value_name = "SHARE",
        value_parser = share,
        allow_negative_numbers = true,
        hide_env = true
    )]
    cover: f64,
    /// The CMF file to write
    #[arg(short, long, env = "CMF_GPU_OUT", hide_env = true)]
    out: PathBuf,
}

/// A share that there is, before any file is looked at.
fn share(text: &str) -> std::result::Result<f64, String> {
    let share = text.parse().ok().filter(|share| *share > 0.0 && *share <= 1.0);
    share.ok_or_else(|| "wanted a number above 0 and at most 1, such as 0.95".into())
}

impl Common {
    fn narrowing(&self) -> Result<Narrowing> {
        there(&self.model)?;
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
    #[arg(long, env = "CMF_GPU_TASK", value_name = "NAME", hide_env = true)]
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

//! `shaders`: the WGSL of every kernel variant.

use super::context::{Context, Result};
use super::output::shown;
use cmf_gpu::Error;
use cmf_gpu::shader::{Variant, compose};
use serde_json::json;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// Writes each variant to a file in this directory
    #[arg(long, value_name = "DIR")]
    dump: Option<PathBuf>,
}

pub fn run(args: Args, context: &mut Context) -> Result {
    if let Some(dir) = &args.dump {
        std::fs::create_dir_all(dir).map_err(|err| Error::io(dir, &err))?;
    }
    let (mut listed, mut lines) = (Vec::new(), Vec::new());
    for variant in Variant::all() {
        let (name, wgsl) = (variant.name(), compose(&variant));
        let (kernel, threads) = (variant.kernel.spec().name, variant.threads());
        listed.push(json!({"name": name, "kernel": kernel, "threads": threads, "wgsl": wgsl}));
        match &args.dump {
            None => lines.push(wgsl),
            Some(dir) => {
                let path = dir.join(format!("{name}.wgsl"));
                std::fs::write(&path, &wgsl).map_err(|err| Error::io(&path, &err))?;
            }
        }
    }
    lines.extend(
        args.dump
            .iter()
            .map(|dir| format!("{}: {} variants", shown(dir), listed.len())),
    );
    context.answer(json!({"variants": listed}), lines)
}

//! `shaders`: the WGSL of every kernel variant.

use super::context::{Context, Outcome, Result};
use super::output::shown;
use cmf_gpu::Error;
use cmf_gpu::shader::{Variant, compose};
use serde_json::{Value, json};
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
    let variants = Variant::all();
    let mut listed: Vec<Value> = Vec::new();
    for variant in &variants {
        let (name, wgsl) = (variant.name(), compose(variant));
        if let Some(dir) = &args.dump {
            let path = dir.join(format!("{name}.wgsl"));
            std::fs::write(&path, &wgsl).map_err(|err| Error::io(&path, &err))?;
        }
        if context.out.json {
            listed.push(json!({
                "name": name,
                "kernel": variant.kernel.spec().name,
                "threads": variant.threads(),
                "wgsl": wgsl,
            }));
        } else if args.dump.is_none() {
            context.out.line(wgsl)?;
        }
    }
    match (&args.dump, context.out.json) {
        (_, true) => context.out.json(&json!({"variants": listed}))?,
        (Some(dir), false) => context
            .out
            .line(format!("{}: {} variants", shown(dir), variants.len()))?,
        (None, false) => {}
    }
    Ok(Outcome::Done)
}

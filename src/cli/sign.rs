//! `sign`: vouches for the files of a model.

use super::model::{ModelArgs, there};
use super::work::cancellable;
use super::{Context, Outcome, Result};
use cmf_gpu::error::escape;
use cmf_gpu::tools::sign::sign;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Flags of `sign`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The key: a file with a 32-byte seed in hex, to be kept secret
    #[arg(long, env = "CMF_GPU_KEY", value_name = "FILE", hide_env = true)]
    key: PathBuf,
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let model = args.model.path(context)?;
    there(&model)?;
    let signed = cancellable("signing", context, &mut |progress| sign(&model, &args.key, progress))?;
    if context.out.json {
        let files: Vec<Value> = signed
            .iter()
            .map(|signed| {
                let sha256: String = signed.sha256.iter().map(|byte| format!("{byte:02x}")).collect();
                json!({
                    "file": signed.file.display().to_string(),
                    "signature": signed.signature.display().to_string(),
                    "pubkey": signed.key.to_hex(),
                    "sha256": sha256,
                })
            })
            .collect();
        context.out.json(&json!({"files": files}))?;
    } else {
        for signed in &signed {
            let path = escape(signed.signature.display().to_string());
            context.out.line(format!("{path}: signed by {}", signed.key.to_hex()))?;
        }
    }
    Ok(Outcome::Done)
}

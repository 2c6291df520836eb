//! `sign`: signs the files of a model.

use super::context::{Context, Outcome, Result};
use super::model::{ModelArgs, require_file};
use super::work::cancellable;
use cmf_gpu::error::escape;
use cmf_gpu::tools::sign::sign;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Flags of `sign`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The secret key: a file with a 32-byte seed in hex
    #[arg(long, value_name = "FILE")]
    key: PathBuf,
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let model = args.model.path()?;
    require_file(&model)?;
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

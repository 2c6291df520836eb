//! `verify`: every hash of a file, every weight a finite number, and the signature if there is one.

use super::model::{ModelArgs, open};
use super::output::{Output, size};
use super::work::cancellable;
use super::{Context, Outcome, Result};
use cmf_gpu::container::{Container, Failure};
use cmf_gpu::tools::sign::{self, PublicKey, Verdict};
use cmf_gpu::{Error, Kind};
use serde_json::{Value, json};
use std::ops::ControlFlow;

/// Flags of `verify`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The public key of the one who must have signed the file, 64 hex digits
    #[arg(long, env = "CMF_GPU_PUBKEY", value_name = "HEX", value_parser = pubkey, hide_env = true)]
    pubkey: Option<PublicKey>,
}

fn pubkey(text: &str) -> std::result::Result<PublicKey, String> {
    PublicKey::from_hex(text).map_err(|err| err.message)
}

/// Checks a model before something else is done with it. Errors: the first thing that is wrong.
pub fn sound(container: &Container, out: &Output) -> Result<()> {
    let mut bar = out.progress("verifying", true);
    let report = container.verify(&mut |done, total| bar.set(done, total));
    drop(bar);
    match report.failures.as_slice() {
        [] => sign::check(container.shard_paths(), None, &mut |_, _| ControlFlow::Continue(())).map(drop),
        [only] => Err(only.error.clone()),
        [first, rest @ ..] => Err(Error::new(
            first.error.kind,
            format!("{}; and {} more", first.error.message, rest.len()),
        )),
    }
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let container = open(&args.model.path(context)?)?;
    let mut bar = context.out.progress("verifying", true);
    let mut report = container.verify(&mut |done, total| bar.set(done, total));
    drop(bar);
    let checked = cancellable("signature", context, &mut |progress| {
        sign::check(container.shard_paths(), args.pubkey, progress)
    });
    let signature = match &checked {
        Ok(Verdict::Unsigned) => Value::Null,
        Ok(Verdict::Valid { key, pinned }) => json!({"valid": true, "pubkey": key.to_hex(), "pinned": pinned}),
        Err(err) if err.kind == Kind::SignatureInvalid => json!({"valid": false, "error": err.message}),
        Err(_) => Value::Null,
    };
    match checked {
        Ok(Verdict::Valid { key, pinned: false }) => report.notes.push(format!(
            "signed by {}, a key that is not pinned: --pubkey says whom to trust",
            key.to_hex()
        )),
        Ok(_) => {}
        Err(error) if error.kind == Kind::SignatureInvalid => report.failures.push(Failure {
            subject: "signature".into(),
            error,
        }),
        Err(error) => return Err(error),
    }
    for note in &report.notes {
        context.out.note(format!("note: {note}"));
    }
    if context.out.json {
        let failures: Vec<Value> = report
            .failures
            .iter()
            .map(|failure| {
                json!({
                    "subject": failure.subject,
                    "kind": failure.error.kind.name(),
                    "message": failure.error.message,
                })
            })
            .collect();
        context.out.json(&json!({
            "ok": report.ok(),
            "tensors": report.tensors,
            "bytes": report.bytes,
            "failures": failures,
            "signature": signature,
            "notes": report.notes,
        }))?;
    } else {
        let verdict = match report.failures.len() {
            0 => "ok".to_string(),
            1 => "1 failure".to_string(),
            many => format!("{many} failures"),
        };
        let signed = match signature["pubkey"].as_str() {
            Some(key) => format!(", signed by {key}"),
            None => String::new(),
        };
        let (tensors, bytes) = (report.tensors, size(report.bytes));
        context
            .out
            .line(format!("{verdict}: {tensors} tensors, {bytes}{signed}"))?;
    }
    for failure in &report.failures {
        super::output::error_line(&failure.error.to_string());
    }
    Ok(match report.ok() {
        true => Outcome::Done,
        false => Outcome::Failed,
    })
}

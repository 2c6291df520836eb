//! `verify`: checks every hash of a model, that every weight is a finite number, and the signature if there is one.

use super::context::{Context, Outcome, Result};
use super::model::{ModelArgs, open_file};
use super::output::{Output, error_line, size};
use super::work::cancellable;
use cmf_gpu::format::cmf::{CmfContainer, Failure, VerifyReport};
use cmf_gpu::source::ModelSource;
use cmf_gpu::tools::sign::{self, PublicKey, Verdict};
use cmf_gpu::{Error, Kind};
use serde_json::{Value, json};
use std::ops::ControlFlow;

/// Flags of `verify`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The public key that must have signed the file, 64 hex digits
    #[arg(long, value_name = "HEX", value_parser = pubkey)]
    pubkey: Option<PublicKey>,
}

fn pubkey(text: &str) -> Result<PublicKey, String> {
    PublicKey::from_hex(text).map_err(|err| err.message)
}

/// Checks hashes, weights and signature. Errors: the first failure, with the number of others.
pub fn sound(source: &ModelSource, out: &Output) -> Result<()> {
    let mut bar = out.progress("verifying", true);
    let report = source.verify(&mut |done, total| bar.set(done, total))?;
    drop(bar);
    match report.failures.as_slice() {
        [] => match &source.cmf {
            Some(container) => {
                sign::check(container.shard_paths(), None, &mut |_, _| ControlFlow::Continue(())).map(drop)
            }
            None => Ok(()),
        },
        [only] => Err(only.error.clone()),
        [first, rest @ ..] => Err(Error::new(
            first.error.kind,
            format!("{}; and {} more", first.error.message, rest.len()),
        )),
    }
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let source = open_file(&args.model.path()?)?;
    if args.pubkey.is_some() && source.cmf.is_none() {
        return Err(Error::new(
            Kind::UnsupportedFeature,
            format!("{} files have no signatures, only CMF files do", source.format),
        ));
    }
    let mut bar = context.out.progress("verifying", true);
    let mut report = source.verify(&mut |done, total| bar.set(done, total))?;
    drop(bar);
    let signature = match &source.cmf {
        Some(container) => signature(container, &args, &mut report, context)?,
        None => Value::Null,
    };
    context.out.notices(&report.notes);
    match context.out.json {
        true => context.out.json(&json(source.format, &report, &signature))?,
        false => context.out.line(summary(&report, &signature))?,
    }
    for failure in &report.failures {
        error_line(failure.error.kind, &failure.error.message);
    }
    Ok(match report.ok() {
        true => Outcome::Done,
        false => Outcome::Failed,
    })
}

/// Checks the signature and adds the result to the report. Returns its JSON form, null without a signature.
fn signature(container: &CmfContainer, args: &Args, report: &mut VerifyReport, context: &mut Context) -> Result<Value> {
    let checked = cancellable("signature", context, &mut |progress| {
        sign::check(container.shard_paths(), args.pubkey, progress)
    });
    match checked {
        Ok(Verdict::Unsigned) => Ok(Value::Null),
        Ok(Verdict::Valid { key, pinned }) => {
            let key = key.to_hex();
            if !pinned {
                report.notes.push(format!(
                    "signed by {key}, a key that was not checked: --pubkey names the key to trust"
                ));
            }
            Ok(json!({"valid": true, "pubkey": key, "pinned": pinned}))
        }
        Err(error) if error.kind == Kind::SignatureInvalid => {
            let signature = json!({"valid": false, "error": error.message});
            report.failures.push(Failure {
                subject: "signature".into(),
                error,
            });
            Ok(signature)
        }
        Err(error) => Err(error),
    }
}

fn json(format: &str, report: &VerifyReport, signature: &Value) -> Value {
    let failures = report.failures.iter().map(
        |Failure { subject, error }| json!({"subject": subject, "kind": error.kind.name(), "message": error.message}),
    );
    json!({
        "ok": report.ok(),
        "format": format,
        "tensors": report.tensors,
        "bytes": report.bytes,
        "failures": failures.collect::<Vec<_>>(),
        "signature": signature,
        "notes": report.notes,
    })
}

fn summary(report: &VerifyReport, signature: &Value) -> String {
    let verdict = match report.failures.len() {
        0 => "ok".to_string(),
        1 => "1 failure".to_string(),
        many => format!("{many} failures"),
    };
    let signed = match signature["pubkey"].as_str() {
        Some(key) => format!(", signed by {key}"),
        None => String::new(),
    };
    format!("{verdict}: {} tensors, {}{signed}", report.tensors, size(report.bytes))
}

//! `verify`: checks every hash of a model, that every weight is a finite number, and the signature if there is one.

use super::context::{Context, Result, checked};
use super::model::{ModelArgs, open_file};
use super::output::{Output, error_line, size};
use cmf_gpu::format::cmf::{CmfContainer, Failure, VerifyReport};
use cmf_gpu::source::ModelSource;
use cmf_gpu::tools::sign::{self, PublicKey, Verdict};
use cmf_gpu::{Error, Kind};
use serde_json::{Value, json};
use std::ops::ControlFlow;

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

/// Checks hashes and weights with a progress bar. Errors: as [`ModelSource::verify`].
fn verified(source: &ModelSource, out: &Output) -> Result<VerifyReport> {
    let mut bar = out.progress("verifying", true);
    source.verify(&mut |done, total| bar.set(done, total))
}

/// Checks hashes, weights and signature. Errors: the first failure, with the number of others.
pub fn sound(source: &ModelSource, out: &Output) -> Result<()> {
    let report = verified(source, out)?;
    match report.failures.as_slice() {
        [] => match &source.cmf {
            Some(container) => {
                sign::check(container.shard_paths(), None, &mut |_, _| ControlFlow::Continue(())).map(drop)
            }
            None => Ok(()),
        },
        [only] => Err(only.error.clone()),
        [Failure { error, .. }, rest @ ..] => {
            let message = format!("{}; and {} more", error.message, rest.len());
            Err(Error::new(error.kind, message))
        }
    }
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let source = open_file(&args.model.path()?)?;
    if args.pubkey.is_some() && source.cmf.is_none() {
        let message = format!("{} files have no signatures, only CMF files do", source.format);
        return Err(Error::new(Kind::UnsupportedFeature, message));
    }
    let mut report = verified(&source, &context.out)?;
    let signature = match &source.cmf {
        Some(container) => signature(container, &args, &mut report, context)?,
        None => Value::Null,
    };
    context.out.notices(&report.notes);
    let object = json(source.format, &report, &signature);
    context.answer(object, [summary(&report, &signature)])?;
    for failure in &report.failures {
        error_line(failure.error.kind, &failure.error.message);
    }
    checked(report.ok())
}

/// Checks the signature and adds the result to the report. Returns its JSON form, null without a signature.
fn signature(container: &CmfContainer, args: &Args, report: &mut VerifyReport, context: &mut Context) -> Result<Value> {
    let paths = container.shard_paths();
    match context.cancellable("signature", |progress| sign::check(paths, args.pubkey, progress)) {
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
    let signed = signature["pubkey"].as_str().map(|key| format!(", signed by {key}"));
    let signed = signed.unwrap_or_default();
    format!("{verdict}: {} tensors, {}{signed}", report.tensors, size(report.bytes))
}

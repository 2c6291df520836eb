//! `verify`: every hash of a file, and every weight a finite number.

use super::model::{ModelArgs, open};
use super::output::{Output, size};
use super::{Context, Outcome, Result};
use cmf_gpu::Error;
use cmf_gpu::container::Container;
use serde_json::{Value, json};

/// Flags of `verify`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
}

/// Checks a model before something else is done with it. Errors: the first thing that is wrong.
pub fn sound(container: &Container, out: &Output) -> Result<()> {
    let mut bar = out.progress("verifying", true);
    let report = container.verify(&mut |done, total| bar.set(done, total));
    match report.failures.as_slice() {
        [] => Ok(()),
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
    let report = container.verify(&mut |done, total| bar.set(done, total));
    drop(bar);
    let mut notes = report.notes.clone();
    for path in container.shard_paths() {
        let mut signature = path.clone().into_os_string();
        signature.push(".sig");
        if std::path::Path::new(&signature).exists() {
            notes.push(format!("{}: the signature is not checked", signature.display()));
        }
    }
    for note in &notes {
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
            "signature": null,
            "notes": notes,
        }))?;
    } else {
        let verdict = match report.failures.len() {
            0 => "ok".to_string(),
            1 => "1 failure".to_string(),
            many => format!("{many} failures"),
        };
        context
            .out
            .line(format!("{verdict}: {} tensors, {}", report.tensors, size(report.bytes)))?;
    }
    for failure in &report.failures {
        super::output::error_line(&failure.error.to_string());
    }
    Ok(match report.ok() {
        true => Outcome::Done,
        false => Outcome::Failed,
    })
}

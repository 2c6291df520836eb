//! `diff`: the differences between two models. Exit code 1 if there are any.

use super::context::{Context, Outcome, Result};
use super::model::open_cmf;
use cmf_gpu::error::escape;
use cmf_gpu::tools::diff::{Difference, diff};
use serde_json::{Map, Value, json};
use std::path::PathBuf;

/// Flags of `diff`.
#[derive(clap::Args)]
pub struct Args {
    /// A .cmf file; any one of the files if the model has several
    a: PathBuf,
    /// The model to compare with
    b: PathBuf,
}

pub fn run(args: Args, context: &mut Context) -> Result {
    let found = diff(&open_cmf(&args.a)?, &open_cmf(&args.b)?)?;
    if context.out.json {
        let mut object = Map::from_iter([("equal".to_owned(), Value::from(found.is_empty()))]);
        for (part, differences) in found.lists() {
            let list: Vec<Value> = differences
                .iter()
                .map(|Difference { name, a, b }| json!({"name": name, "a": a, "b": b}))
                .collect();
            object.insert(part.into(), list.into());
        }
        context.out.json(&Value::Object(object))?;
    } else {
        for (part, differences) in found.lists() {
            for Difference { name, a, b } in differences {
                let line = match (a, b) {
                    (Some(a), None) => format!("- {part} {name}: {a}"),
                    (None, Some(b)) => format!("+ {part} {name}: {b}"),
                    (a, b) => format!("~ {part} {name}: {} -> {}", shown(a), shown(b)),
                };
                context.out.line(escape(line))?;
            }
        }
        if found.is_empty() {
            context.out.line("equal")?;
        }
    }
    Ok(match found.is_empty() {
        true => Outcome::Done,
        false => Outcome::Failed,
    })
}

fn shown(value: &Option<Value>) -> String {
    value.as_ref().map(Value::to_string).unwrap_or_default()
}

//! `skill`: the skills of a model, and skills as files of their own. What runs the model is in files of its own.

mod fit;
mod measure;
mod route;

use super::convert::quant;
use super::model::{open, there, there_at_all};
use super::work::{cancellable, tell, writing};
use super::{Context, Outcome, Result};
use clap::builder::FalseyValueParser;
use cmf_gpu::container::{Container, Skill, Tensors};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::error::escape;
use cmf_gpu::tools::skill::{self, New};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Subcommands of `skill`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// Lists the skills of a model, or of a skill file
    List {
        /// A .cmf file; of a model in several files, any of them
        model: PathBuf,
    },
    /// Adds to a model, in place, the tensors in which another model differs from it
    Add {
        /// The .cmf file that grows
        model: PathBuf,
        /// A .cmf, .gguf or .safetensors file or a Hugging Face directory of the same network
        src: PathBuf,
        /// What the skill is asked for by
        #[arg(long, env = "CMF_GPU_ID", allow_hyphen_values = true, hide_env = true)]
        id: String,
        /// Its name, for people
        #[arg(long, env = "CMF_GPU_NAME", hide_env = true)]
        name: Option<String>,
        /// Type of its matrices [default: that of SRC, or of what they replace where SRC is no .cmf]
        #[arg(long, env = "CMF_GPU_QUANT", value_parser = quant, hide_env = true)]
        quant: Option<Dtype>,
        /// The task whose mask is active with the skill, none = the full model [default: the skill leaves it open]
        #[arg(long, env = "CMF_GPU_MASK_TASK", value_name = "NAME", hide_env = true)]
        mask_task: Option<String>,
    },
    /// Takes a skill out of a model, in place; its bytes stay until the file is compacted
    Remove {
        /// The .cmf file
        model: PathBuf,
        /// The skill
        id: String,
    },
    /// Writes what a model's skill, or the model itself, changes in a base as a file of its own
    Export {
        /// The model with the skill, or the specialist
        model: PathBuf,
        /// The skill
        id: String,
        /// The .cmf file that the skill will be applied to
        #[arg(long, env = "CMF_GPU_BASE", value_name = "BASE", hide_env = true)]
        base: PathBuf,
        /// The skill file to write
        #[arg(short, long, env = "CMF_GPU_OUT", hide_env = true)]
        out: PathBuf,
    },
    /// Writes the model that a skill file makes of its base
    Apply {
        /// The model
        base: PathBuf,
        /// The skill file
        skill: PathBuf,
        /// The CMF file to write
        #[arg(short, long, env = "CMF_GPU_OUT", hide_env = true)]
        out: PathBuf,
        /// Accepts another base than the one the skill was cut against
        #[arg(long, env = "CMF_GPU_FORCE", value_parser = FalseyValueParser::new(), hide_env = true)]
        force: bool,
    },
    /// Shows how well each skill fits a prompt, the best first
    Route(route::Args),
    /// Finds out from example prompts which prompts a skill is for, and writes it to the model, in place
    Fit(fit::Args),
    /// Measures the perplexity of a text without a skill and with it, and writes it to the model, in place
    Measure(measure::Args),
}

impl Args {
    /// Whether a model is run.
    #[cfg(target_os = "linux")]
    pub fn needs_device(&self) -> bool {
        matches!(self.what, What::Route(_) | What::Fit(_) | What::Measure(_))
    }
}

pub fn run(args: Args, context: &mut Context) -> Result {
    match args.what {
        What::List { model } => list(&open(&model)?, context),
        What::Add {
            model,
            src,
            id,
            name,
            quant,
            mask_task,
        } => {
            there_at_all(&src)?;
            let new = New {
                id,
                name,
                quant,
                input_mask_task: mask_task,
            };
            let changed = changed(&model)?;
            let written = cancellable("adding", context, &mut |progress| {
                skill::add(&model, &src, &new, progress)
            })?;
            tell("added to", &written, &changed, context)
        }
        What::Remove { model, id } => {
            let changed = changed(&model)?;
            let written = skill::remove(&model, &id)?;
            tell("removed from", &written, &changed, context)
        }
        What::Export { model, id, base, out } => {
            there(&model)?;
            there(&base)?;
            writing("exporting", &out, context, &mut |progress| {
                skill::export(&model, &id, &base, &out, progress)
            })
        }
        What::Apply {
            base,
            skill,
            out,
            force,
        } => {
            there(&base)?;
            there(&skill)?;
            writing("applying", &out, context, &mut |progress| {
                skill::apply(&base, &skill, &out, force, progress)
            })
        }
        What::Route(args) => route::run(args, context),
        What::Fit(args) => fit::run(args, context),
        What::Measure(args) => measure::run(args, context),
    }
}

/// The file of a model that changes in place.
fn changed(model: &Path) -> Result<PathBuf> {
    Ok(open(model)?.shard_paths()[0].clone())
}

/// The skills of a model, described.
pub fn describe(container: &Container) -> Vec<Value> {
    let mut sizes: HashMap<Option<&str>, (u64, u64)> = HashMap::new();
    for info in container.infos() {
        // In a file of its own a skill's tensors have the names of those they replace.
        let own = Skill::of_tensor(&info.name);
        for key in [None, own].into_iter().take(1 + usize::from(own.is_some())) {
            let (tensors, bytes) = sizes.entry(key).or_default();
            (*tensors, *bytes) = (*tensors + 1, *bytes + info.nbytes);
        }
    }
    let described = container.skills().iter().map(|skill| {
        let key = Some(skill.id.as_str()).filter(|_| skill.base_dir_hash.is_none());
        let (tensors, bytes) = sizes.get(&key).copied().unwrap_or_default();
        let selection = skill.selection.as_ref();
        json!({
            "id": skill.id,
            "name": skill.name,
            "layers": skill.layers,
            "tensors": tensors,
            "bytes": bytes,
            "selection": selection.map(|s| json!({"metric": s.metric, "phi_layer": s.phi_layer, "rank": s.rank})),
            "input_mask_task": skill.input_mask_task,
            "quality": skill.quality,
            "base_dir_hash": skill.base_dir_hash.map(|hash| format!("{hash:016x}")),
            "base_arch": skill.base_arch,
            "task": skill.task,
            "provenance": skill.provenance,
        })
    });
    described.collect()
}

/// What was measured with a skill, for people.
fn quality(record: &Value) -> String {
    let number = |member: &str| record[member].as_f64();
    match (record["metric"].as_str(), number("backbone"), number("overlaid")) {
        _ if record.is_null() => "not measured".into(),
        (Some(metric), Some(backbone), Some(overlaid)) => {
            let task = record["task"].as_str().map(|task| format!(" (task {task})"));
            let task = task.unwrap_or_default();
            format!("{metric} {backbone:.4} without, {overlaid:.4} with it{task}")
        }
        _ => format!("quality {record}"),
    }
}

fn list(container: &Container, context: &mut Context) -> Result {
    let skills = describe(container);
    if context.out.json {
        context
            .out
            .json(&json!({"skills": skills, "skill_file": container.is_skill_file()}))?;
        return Ok(Outcome::Done);
    }
    for skill in skills {
        let said = |member: &str, before: &str| match &skill[member] {
            Value::String(text) => format!("{before}{text}"),
            _ => String::new(),
        };
        let (task, base) = (said("input_mask_task", "  task "), said("base_dir_hash", "  for base "));
        let fitted = match &skill["selection"] {
            Value::Null => "not fitted".to_owned(),
            some => format!("fitted behind layer {}", some["phi_layer"]),
        };
        let line = format!(
            "{}  {} tensors, {}  layers {}{task}  {fitted}  {}  {}{base}",
            skill["id"].as_str().unwrap_or_default(),
            skill["tensors"],
            super::output::size(skill["bytes"].as_u64().unwrap_or(0)),
            skill["layers"],
            quality(&skill["quality"]),
            skill["name"].as_str().unwrap_or_default(),
        );
        context.out.line(escape(line.trim_end().to_owned()))?;
    }
    Ok(Outcome::Done)
}

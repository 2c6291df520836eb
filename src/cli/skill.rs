//! `skill`: the skills of a model, and skills as files of their own. What runs the model is in files of its own.

mod fit;
mod measure;
mod route;

use super::convert::quant;
use super::model::open;
use super::work::{cancellable, tell, writing};
use super::{Context, Outcome, Result};
use clap::builder::FalseyValueParser;
use cmf_gpu::container::{Container, Tensors};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::error::escape;
use cmf_gpu::tools::skill::{self, New};
use serde_json::{Value, json};
use std::path::PathBuf;

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
        /// A .cmf file or a Hugging Face directory of the same network
        src: PathBuf,
        /// What the skill is asked for by
        #[arg(long, env = "CMF_GPU_ID", hide_env = true)]
        id: String,
        /// Its name, for people
        #[arg(long, env = "CMF_GPU_NAME", hide_env = true)]
        name: Option<String>,
        /// Type of its matrices [default: that of SRC, or of what they replace where SRC is no .cmf]
        #[arg(long, env = "CMF_GPU_QUANT", value_parser = quant, hide_env = true)]
        quant: Option<Dtype>,
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
        } => {
            let new = New { id, name, quant };
            let written = cancellable("adding", context, &mut |progress| {
                skill::add(&model, &src, &new, progress)
            })?;
            tell("added to", &written, &model, context)
        }
        What::Remove { model, id } => {
            let written = skill::remove(&model, &id)?;
            tell("removed from", &written, &model, context)
        }
        What::Export { model, id, base, out } => writing("exporting", &out, context, &mut |progress| {
            skill::export(&model, &id, &base, &out, progress)
        }),
        What::Apply {
            base,
            skill,
            out,
            force,
        } => writing("applying", &out, context, &mut |progress| {
            skill::apply(&base, &skill, &out, force, progress)
        }),
        What::Route(args) => route::run(args, context),
        What::Fit(args) => fit::run(args, context),
        What::Measure(args) => measure::run(args, context),
    }
}

/// The skills of a model, described.
pub fn describe(container: &Container) -> Vec<Value> {
    let described = container.skills().iter().map(|skill| {
        // In a file of its own a skill's tensors have the names of those they replace.
        let prefix = match skill.base_dir_hash {
            None => skill.tensor_name(""),
            Some(_) => String::new(),
        };
        let own = container.infos().iter().filter(|info| info.name.starts_with(&prefix));
        let (tensors, bytes) = own.fold((0, 0), |(n, bytes), info| (n + 1, bytes + info.nbytes));
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

fn list(container: &Container, context: &mut Context) -> Result {
    let skills = describe(container);
    if context.out.json {
        context
            .out
            .json(&json!({"skills": skills, "skill_file": container.is_skill_file()}))?;
        return Ok(Outcome::Done);
    }
    for skill in skills {
        let base = match &skill["base_dir_hash"] {
            Value::String(hash) => format!("  for base {hash}"),
            _ => String::new(),
        };
        let line = format!(
            "{}  {} tensors, {}  layers {}  {}{base}",
            skill["id"].as_str().unwrap_or_default(),
            skill["tensors"],
            super::output::size(skill["bytes"].as_u64().unwrap_or(0)),
            skill["layers"],
            skill["name"].as_str().unwrap_or_default(),
        );
        context.out.line(escape(line.trim_end().to_owned()))?;
    }
    Ok(Outcome::Done)
}

//! `skill`: lists and edits the skills of a model, and skill files. The subcommands that run the model are in `run`.

mod run;

use super::context::{Context, Result};
use super::convert::quant;
use super::model::{open_cmf, require_file, require_path};
use super::output::size;
use cmf_gpu::dtype::Dtype;
use cmf_gpu::error::escape;
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::source::Skill;
use cmf_gpu::tools::skill::{self, New};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Subcommands of `skill`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

/// Flags of `skill add`.
#[derive(clap::Args)]
struct AddArgs {
    /// The .cmf file that the skill is added to
    model: PathBuf,
    /// A .cmf, .gguf or .safetensors file or a Hugging Face directory of the same network
    src: PathBuf,
    /// The id of the new skill
    #[arg(long, allow_hyphen_values = true)]
    id: String,
    /// A descriptive name
    #[arg(long)]
    name: Option<String>,
    /// Type of its matrices [default: the type in SRC if that is a .cmf file, else the type of the replaced matrix]
    #[arg(long, value_parser = quant)]
    quant: Option<Dtype>,
    /// The task whose mask is active with the skill, none = the full model [default: no task]
    #[arg(long, value_name = "NAME")]
    mask_task: Option<String>,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Lists the skills of a model, or of a skill file
    List {
        /// A .cmf file; any one of the files if the model has several
        model: PathBuf,
    },
    /// Adds a skill to a model, in place: the tensors in which another model differs from it
    Add(AddArgs),
    /// Removes a skill from a model, in place; `compact` frees its bytes
    Remove {
        /// The .cmf file
        model: PathBuf,
        /// The skill
        id: String,
    },
    /// Writes a skill file: the difference between a base model and a model's skill, or the model itself
    Export {
        /// The model with the skill, or a fine-tuned model
        model: PathBuf,
        /// The skill
        id: String,
        /// The base model, to which the skill will be applied
        #[arg(long, value_name = "BASE")]
        base: PathBuf,
        /// The skill file to write
        #[arg(short, long)]
        out: PathBuf,
    },
    /// Writes the base model with a skill applied
    Apply {
        /// The base model
        base: PathBuf,
        /// The skill file
        skill: PathBuf,
        /// The CMF file to write
        #[arg(short, long)]
        out: PathBuf,
        /// Accepts another base model than that of the export
        #[arg(long)]
        force: bool,
    },
    /// Shows how well each skill fits a prompt, the best first
    Route(run::RouteArgs),
    /// Learns from example prompts which prompts fit a skill, and writes that to the model, in place
    Fit(run::FitArgs),
    /// Measures the perplexity of a text without and with a skill, and writes it to the model, in place
    Measure(run::MeasureArgs),
}

impl Args {
    /// Whether the subcommand runs a model.
    #[cfg(target_os = "linux")]
    pub fn needs_device(&self) -> bool {
        matches!(self.command, Command::Route(_) | Command::Fit(_) | Command::Measure(_))
    }
}

pub fn run(args: Args, context: &mut Context) -> Result {
    match args.command {
        Command::List { model } => list(&open_cmf(&model)?, context),
        Command::Add(args) => add(args, context),
        Command::Remove { model, id } => {
            let changed = changed_file(&model)?;
            let written = skill::remove(&model, &id)?;
            context.report("removed from", &written, &changed)
        }
        Command::Export { model, id, base, out } => {
            require_file(&model)?;
            require_file(&base)?;
            context.writing("exporting", &out, |progress| {
                skill::export(&model, &id, &base, &out, progress)
            })
        }
        Command::Apply {
            base,
            skill,
            out,
            force,
        } => {
            require_file(&base)?;
            require_file(&skill)?;
            context.writing("applying", &out, |progress| {
                skill::apply(&base, &skill, &out, force, progress)
            })
        }
        Command::Route(args) => run::route(args, context),
        Command::Fit(args) => run::fit(args, context),
        Command::Measure(args) => run::measure(args, context),
    }
}

fn add(args: AddArgs, context: &mut Context) -> Result {
    require_path(&args.src)?;
    let new = New {
        id: args.id,
        name: args.name,
        quant: args.quant,
        input_mask_task: args.mask_task,
    };
    let changed = changed_file(&args.model)?;
    let written = context.cancellable("adding", |progress| skill::add(&args.model, &args.src, &new, progress))?;
    context.report("added to", &written, &changed)
}

/// The file that changes when a model is edited in place: its first.
fn changed_file(model: &Path) -> Result<PathBuf> {
    Ok(open_cmf(model)?.shard_paths()[0].clone())
}

/// The skills of a model as JSON.
pub fn describe(container: &CmfContainer) -> Vec<Value> {
    let mut sizes: HashMap<Option<&str>, (u64, u64)> = HashMap::new();
    for info in container.infos() {
        // A skill file has no prefix in its tensor names.
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

/// The measured quality of a skill in words.
fn quality(record: &Value) -> String {
    let number = |member: &str| record[member].as_f64();
    match (record["metric"].as_str(), number("backbone"), number("overlaid")) {
        _ if record.is_null() => "not measured".into(),
        (Some(metric), Some(backbone), Some(overlaid)) => {
            let task = prefixed(" (task ", &record["task"], ")");
            format!("{metric} {backbone:.4} without, {overlaid:.4} with it{task}")
        }
        _ => format!("quality {record}"),
    }
}

/// A text between two others; empty if the value is no text.
fn prefixed(before: &str, value: &Value, after: &str) -> String {
    value
        .as_str()
        .map(|text| format!("{before}{text}{after}"))
        .unwrap_or_default()
}

fn list(container: &CmfContainer, context: &mut Context) -> Result {
    let skills = describe(container);
    let line = |skill: &Value| {
        let fitted = match &skill["selection"] {
            Value::Null => "not fitted".to_owned(),
            selection => format!("fitted after layer {}", selection["phi_layer"]),
        };
        let line = format!(
            "{}  {} tensors, {}  layers {}{}  {fitted}  {}  {}{}",
            skill["id"].as_str().unwrap_or_default(),
            skill["tensors"],
            size(skill["bytes"].as_u64().unwrap_or(0)),
            skill["layers"],
            prefixed("  task ", &skill["input_mask_task"], ""),
            quality(&skill["quality"]),
            skill["name"].as_str().unwrap_or_default(),
            prefixed("  for base ", &skill["base_dir_hash"], ""),
        );
        escape(line.trim_end().to_owned())
    };
    let object = json!({"skills": skills, "skill_file": container.is_skill_file()});
    context.answer(object, skills.iter().map(line))
}

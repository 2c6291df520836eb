//! `mask`: lists the task masks of a model, or describes one of them layer by layer.

use super::context::{Context, Result};
use super::model::open_cmf;
use cmf_gpu::error::escape;
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::source::{Mask, MaskAxis, Masks};
use serde_json::{Value, json};
use std::path::PathBuf;

/// Subcommands of `mask`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Lists the masks of a model
    List {
        /// A .cmf file; any one of the files if the model has several
        model: PathBuf,
    },
    /// Shows how much of each layer a mask keeps
    Show {
        /// A .cmf file; any one of the files if the model has several
        model: PathBuf,
        /// The mask's name
        task: String,
    },
}

pub fn run(args: Args, context: &mut Context) -> Result {
    match args.command {
        Command::List { model } => list(&open_cmf(&model)?, context),
        Command::Show { model, task } => show(&open_cmf(&model)?, &task, context),
    }
}

/// The masks of a model as JSON.
pub fn describe(container: &CmfContainer) -> Vec<Value> {
    let Some(masks) = container.masks() else {
        return Vec::new();
    };
    let default = masks.default_mask().map(|mask| mask.name.as_str());
    let described = masks.masks.iter().map(|mask| {
        json!({
            "task_id": mask.task_id,
            "name": mask.name,
            "description": mask.description,
            "sparsity": mask.sparsity,
            "quality": mask.quality,
            "parent": mask.other.get("parent"),
            "priority": mask.other.get("priority"),
            "default": Some(mask.name.as_str()) == default,
            "open": mask.is_open(),
            "experts": mask.has_experts(),
        })
    });
    described.collect()
}

fn list(container: &CmfContainer, context: &mut Context) -> Result {
    let masks = describe(container);
    let line = |mask: &Value| {
        let text = |name: &str| mask[name].as_str().unwrap_or_default().to_owned();
        let marks = ["default", "open", "experts"]
            .into_iter()
            .filter(|mark| mask[mark] == true);
        let marks = marks.collect::<Vec<_>>().join(",");
        let (name, description) = (text("name"), text("description"));
        let (sparsity, quality) = (&mask["sparsity"], &mask["quality"]);
        let line = format!("{name}  sparsity {sparsity}  quality {quality}  {marks}  {description}");
        escape(line.trim_end().to_owned())
    };
    let default = container.masks().and_then(|masks| masks.default_task.clone());
    let object = json!({"masks": masks, "default_task": default, "by_loop": container.has_loop_masks()});
    context.answer(object, masks.iter().map(line))
}

fn show(container: &CmfContainer, task: &str, context: &mut Context) -> Result {
    let none = Masks::default();
    let mask = container.masks().unwrap_or(&none).find(task)?;
    let shape = mask.shape();
    let rows: Vec<Value> = (0..shape.rows).map(|index| row(mask, index)).collect();
    let neurons = off(mask, shape.ffn, |row| mask.count(MaskAxis::Neurons, row));
    let heads = off(mask, shape.heads, |row| mask.count(MaskAxis::Heads, row));
    let layers = (0..shape.layers).filter(|&layer| !mask.layer(layer)).count();
    let experts = off(mask, shape.experts, |row| mask.count(MaskAxis::Experts, row));
    let experts = mask.has_experts().then_some(experts);
    let object = json!({
        "name": mask.name,
        "task_id": mask.task_id,
        "description": mask.description,
        "sparsity": mask.sparsity,
        "quality": mask.quality,
        "open": mask.is_open(),
        "shape": {
            "layers": shape.layers, "rows": shape.rows, "ffn": shape.ffn, "heads": shape.heads, "experts": shape.experts
        },
        "ffn_off": neurons,
        "heads_off": heads,
        "layers_off": layers,
        "experts_off": experts,
        "layers": rows,
    });
    let line = |row: &Value| {
        let when = |shown: bool, text: String| if shown { text } else { String::new() };
        format!(
            "layer {}{}  {}  neurons {}/{}  heads {}/{}{}",
            row["layer"],
            when(shape.rows > shape.layers, format!(" loop {}", row["loop"])),
            if row["active"] == true { "on" } else { "off" },
            row["ffn"],
            shape.ffn,
            row["heads"],
            shape.heads,
            when(
                mask.has_experts(),
                format!("  experts {}/{}", row["experts"], shape.experts)
            ),
        )
    };
    let share = |off: f64, of: &str| format!("{:.1} % of the {of}", 100.0 * off);
    let (neurons, heads) = (share(neurons, "neurons"), share(heads, "heads"));
    let experts = experts
        .map(|off| format!(", {}", share(off, "experts")))
        .unwrap_or_default();
    let total = format!("off: {neurons}, {heads}, {layers} of {} layers{experts}", shape.layers);
    context.answer(object, rows.iter().map(line).chain([total]))
}

/// The share of a mask's bits that are off: over all rows of `width`, whether their layer is active or not.
fn off(mask: &Mask, width: usize, on: impl Fn(usize) -> usize) -> f64 {
    let rows = mask.shape().rows;
    match rows * width {
        0 => 0.0,
        all => 1.0 - (0..rows).map(on).sum::<usize>() as f64 / all as f64,
    }
}

/// A row of the mask: a layer in one iteration of the loop over the layers.
fn row(mask: &Mask, index: usize) -> Value {
    let layers = mask.shape().layers;
    let (layer, iteration) = (index % layers, index / layers);
    json!({
        "layer": layer,
        "loop": iteration,
        "active": mask.layer(layer),
        "ffn": mask.count(MaskAxis::Neurons, index),
        "heads": mask.count(MaskAxis::Heads, index),
        "experts": mask.has_experts().then(|| mask.count(MaskAxis::Experts, index)),
    })
}

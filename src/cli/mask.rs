//! `mask`: lists the task masks of a model, or describes one of them layer by layer.

use super::context::{Context, Outcome, Result};
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
    if context.out.json {
        let default = container.masks().and_then(|masks| masks.default_task.clone());
        context
            .out
            .json(&json!({"masks": masks, "default_task": default, "by_loop": container.has_loop_masks()}))?;
        return Ok(Outcome::Done);
    }
    for mask in masks {
        let text = |name: &str| mask[name].as_str().unwrap_or_default().to_owned();
        let marks = [("default", "default"), ("open", "open"), ("experts", "experts")];
        let marks: Vec<&str> = marks
            .into_iter()
            .filter(|(name, _)| mask[*name] == true)
            .map(|(_, mark)| mark)
            .collect();
        let line = format!(
            "{}  sparsity {}  quality {}  {}  {}",
            text("name"),
            mask["sparsity"],
            mask["quality"],
            marks.join(","),
            text("description")
        );
        context.out.line(escape(line.trim_end().to_owned()))?;
    }
    Ok(Outcome::Done)
}

fn show(container: &CmfContainer, task: &str, context: &mut Context) -> Result {
    let none = Masks::default();
    let mask = container.masks().unwrap_or(&none).find(task)?;
    let shape = mask.shape();
    let rows: Vec<Value> = (0..shape.rows).map(|index| row(mask, index)).collect();
    let totals = Totals::of(mask);
    if context.out.json {
        context.out.json(&json!({
            "name": mask.name,
            "task_id": mask.task_id,
            "description": mask.description,
            "sparsity": mask.sparsity,
            "quality": mask.quality,
            "open": mask.is_open(),
            "shape": {
                "layers": shape.layers, "rows": shape.rows, "ffn": shape.ffn, "heads": shape.heads, "experts": shape.experts
            },
            "ffn_off": totals.neurons,
            "heads_off": totals.heads,
            "layers_off": totals.layers,
            "experts_off": totals.experts,
            "layers": rows,
        }))?;
        return Ok(Outcome::Done);
    }
    for row in &rows {
        let experts = match mask.has_experts() {
            true => format!("  experts {}/{}", row["experts"], shape.experts),
            false => String::new(),
        };
        context.out.line(format!(
            "layer {}{}  {}  neurons {}/{}  heads {}/{}{experts}",
            row["layer"],
            if shape.rows > shape.layers {
                format!(" loop {}", row["loop"])
            } else {
                String::new()
            },
            if row["active"] == true { "on" } else { "off" },
            row["ffn"],
            shape.ffn,
            row["heads"],
            shape.heads,
        ))?;
    }
    context.out.line(totals.describe(shape.layers))?;
    Ok(Outcome::Done)
}

/// How much a mask switches off: shares over all rows of the mask, whether their layer is active or not.
struct Totals {
    neurons: f64,
    heads: f64,
    /// A number of layers.
    layers: usize,
    /// `None` if the mask does not restrict experts.
    experts: Option<f64>,
}

impl Totals {
    fn of(mask: &Mask) -> Totals {
        let shape = mask.shape();
        let off = |width: usize, count: &dyn Fn(usize) -> usize| {
            let on: usize = (0..shape.rows).map(count).sum();
            match shape.rows * width {
                0 => 0.0,
                all => 1.0 - on as f64 / all as f64,
            }
        };
        Totals {
            neurons: off(shape.ffn, &|row| mask.count(MaskAxis::Neurons, row)),
            heads: off(shape.heads, &|row| mask.count(MaskAxis::Heads, row)),
            layers: (0..shape.layers).filter(|&layer| !mask.layer(layer)).count(),
            experts: mask
                .has_experts()
                .then(|| off(shape.experts, &|row| mask.count(MaskAxis::Experts, row))),
        }
    }

    fn describe(&self, layers: usize) -> String {
        let share = |off: f64, of: &str| format!("{:.1} % of the {of}", 100.0 * off);
        let mut parts = vec![
            share(self.neurons, "neurons"),
            share(self.heads, "heads"),
            format!("{} of {layers} layers", self.layers),
        ];
        parts.extend(self.experts.map(|off| share(off, "experts")));
        format!("off: {}", parts.join(", "))
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

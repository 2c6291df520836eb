//! `mask`: shows task masks, all of them or one layer by layer.

use super::model::open;
use super::{Context, Outcome, Result};
use cmf_gpu::container::{Container, Mask, Masks};
use cmf_gpu::error::escape;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Subcommands of `mask`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// Lists the masks of a model
    List {
        /// A .cmf file; of a model in several files, any of them
        model: PathBuf,
    },
    /// Shows what a mask leaves of each layer
    Show {
        /// A .cmf file; of a model in several files, any of them
        model: PathBuf,
        /// The mask's name
        task: String,
    },
}

pub fn run(args: Args, context: &mut Context) -> Result {
    match args.what {
        What::List { model } => list(&open(&model)?, context),
        What::Show { model, task } => show(&open(&model)?, &task, context),
    }
}

/// The masks of a model, described.
pub fn describe(container: &Container) -> Vec<Value> {
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

fn list(container: &Container, context: &mut Context) -> Result {
    let masks = describe(container);
    if context.out.json {
        let default = container.masks().and_then(|masks| masks.default_task.clone());
        context
            .out
            .json(&json!({"masks": masks, "default_task": default, "by_pass": container.has_loop_masks()}))?;
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

fn show(container: &Container, task: &str, context: &mut Context) -> Result {
    let none = Masks::default();
    let mask = container.masks().unwrap_or(&none).find(task)?;
    let shape = mask.shape();
    let rows: Vec<Value> = (0..shape.rows).map(|visit| row(mask, visit)).collect();
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
                format!(" pass {}", row["pass"])
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
    context.out.line(totals.told(shape.layers))?;
    Ok(Outcome::Done)
}

/// What a mask switches off in all: shares of the units of all rows, whether their layer is on or not.
struct Totals {
    neurons: f64,
    heads: f64,
    /// Layers.
    layers: usize,
    /// `None` where the mask says nothing about experts.
    experts: Option<f64>,
}

impl Totals {
    fn of(mask: &Mask) -> Totals {
        let shape = mask.shape();
        let off = |width: usize, count: &dyn Fn(usize) -> usize| {
            let on: usize = (0..shape.rows).map(count).sum();
            // Nothing of nothing is off.
            match shape.rows * width {
                0 => 0.0,
                all => 1.0 - on as f64 / all as f64,
            }
        };
        Totals {
            neurons: off(shape.ffn, &|visit| mask.ffn_count(visit)),
            heads: off(shape.heads, &|visit| mask.head_count(visit)),
            layers: (0..shape.layers).filter(|&layer| !mask.layer(layer)).count(),
            experts: mask
                .has_experts()
                .then(|| off(shape.experts, &|visit| mask.expert_count(visit))),
        }
    }

    fn told(&self, layers: usize) -> String {
        let share = |off: f64, what: &str| format!("{:.1} % of the {what}", 100.0 * off);
        let mut told = vec![
            share(self.neurons, "neurons"),
            share(self.heads, "heads"),
            format!("{} of {layers} layers", self.layers),
        ];
        told.extend(self.experts.map(|off| share(off, "experts")));
        format!("off: {}", told.join(", "))
    }
}

fn row(mask: &Mask, visit: usize) -> Value {
    let layers = mask.shape().layers;
    let (layer, pass) = (visit % layers, visit / layers);
    json!({
        "layer": layer,
        "pass": pass,
        "active": mask.layer(layer),
        "ffn": mask.ffn_count(visit),
        "heads": mask.head_count(visit),
        "experts": mask.has_experts().then(|| mask.expert_count(visit)),
    })
}

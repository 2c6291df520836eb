//! `defrag`: a model without the neurons that a task's mask switches off (section 11 of the format).

use super::cut;
use super::gather;
use super::rewrite::{Part, Plan, header_of, object, spec};
use super::{Progress, Written};
use crate::container::{Container, Mask, Sections, TensorInfo, Tensors};
use crate::dtype::encode::storage_dtype;
use crate::error::{Result, bail};
use serde_json::json;
use std::path::Path;

/// Writes the model at `model` with the FFN neurons that the mask `task` leaves, each layer as wide as it needs.
///
/// Rows of gate and up projections are copied; down projections are decoded and encoded anew, as q8_2f where a width is no
/// multiple of 32 and their type needs that. What skills replace is cut like what it replaces. The blocks of a draft head
/// are not masked and stay as they are. A mask that also switches off heads, layers or experts cannot be expressed in this
/// way: it is refused unless `ffn_only` leaves them on.
///
/// Errors: `Usage` for a task that is not there, a layer without neurons left, or a mask as above; `UnsupportedModel` for a
/// model whose neurons are those of experts; `SkillFile` for a file that is no model; `MissingTensor` and `Parse` for a skill
/// that does not fit the model; `UnsupportedTensorType` for values that a type cannot hold; `HashMismatch` for damage; `Io`.
pub fn defrag(model: &Path, task: &str, ffn_only: bool, out: &Path, progress: Progress) -> Result<Written> {
    let model = Container::open(model)?;
    cut::check(&model)?;
    let Some(masks) = model.masks() else {
        bail!(Usage, "the model has no masks");
    };
    let mask = masks.find(task)?;
    if !ffn_only && restricts_more(mask) {
        bail!(
            Usage,
            "mask '{task}' also switches off heads, layers or experts, which stay; --ffn-only drops the neurons alone"
        );
    }
    let kept = (0..mask.shape().layers)
        .map(|layer| alive(&model, mask, layer))
        .collect::<Result<Vec<_>>>()?;
    let widths: Vec<usize> = kept.iter().flatten().map(|kept| kept.neurons.len()).collect();
    let Some(&widest) = widths.iter().max() else {
        bail!(UnsupportedModel, "no layer has an FFN of its own");
    };
    let mut parts = Vec::with_capacity(model.infos().len());
    for (id, info) in model.infos().iter().enumerate() {
        let (_, name) = cut::split(&model, &info.name);
        let place = place(name).and_then(|(layer, axis)| Some((kept.get(layer)?.as_ref()?, axis)));
        parts.push(match place {
            None => Part::copy(&model, id, info),
            Some((kept, axis)) => narrowed(&model, id, info, &kept.neurons, axis),
        });
    }
    let before = model.header().arch.intermediate_size;
    let mut header = header_of(&model);
    // The blocks of a draft head keep their width, and a reader may make room for the largest of all.
    let drafts = model.infos().iter().filter(|info| is_draft_gate(&info.name));
    let nominal = drafts.map(|info| info.rows_cols().0).fold(widest, usize::max);
    object(&mut header, "arch")?.insert("intermediate_size".into(), nominal.into());
    let layer = kept.iter().position(|kept| kept.as_ref().is_some_and(Kept::is_cut));
    let mut notes = cut::skills(&model, &mut header, &parts, layer)?;
    let names = masks.masks.iter().map(|mask| mask.name.as_str());
    let others: Vec<&str> = names.filter(|&name| name != task).collect();
    if !others.is_empty() {
        notes.push(format!(
            "masks are left out, they speak of neurons that are gone: {}",
            others.join(", ")
        ));
    }
    let all: usize = kept.iter().flatten().map(|kept| kept.before).sum();
    let left: usize = widths.iter().sum();
    object(&mut header, "provenance")?.insert(
        "defrag".into(),
        json!({
            "tool": concat!("cmf-gpu ", env!("CARGO_PKG_VERSION"), " defrag"),
            "source_skill": task,
            "pre_intermediate": before,
            "post_intermediate_max": widest,
            "kept_per_layer": widths,
            "pruned_ratio": 1.0 - left as f64 / all.max(1) as f64,
        }),
    );
    let plan = Plan {
        header,
        parts,
        sections: Sections {
            vocab: model.sections()?.vocab,
            ..Sections::default()
        },
        by_pass: false,
    };
    let bytes = plan.write_one(&[&model], out, progress)?;
    Ok(Written {
        tensors: plan.parts.len(),
        bytes,
        notes,
    })
}

fn restricts_more(mask: &Mask) -> bool {
    let shape = mask.shape();
    let rows = 0..shape.rows;
    (0..shape.layers).any(|layer| !mask.layer(layer))
        || rows
            .clone()
            .any(|row| mask.head_count(row) < shape.heads || mask.expert_count(row) < shape.experts)
}

/// What stays of a layer's FFN.
struct Kept {
    /// The neurons that any pass uses.
    neurons: Vec<usize>,
    /// How many there were.
    before: usize,
}

impl Kept {
    fn is_cut(&self) -> bool {
        self.neurons.len() < self.before
    }
}

/// `None` for a layer without an FFN of its own. Errors: `Usage` when nothing would be left of it; `UnsupportedModel` when it
/// has none and is masked all the same.
fn alive(model: &Container, mask: &Mask, layer: usize) -> Result<Option<Kept>> {
    let shape = mask.shape();
    let Some(gate) = model.find(&format!("model.layers.{layer}.mlp.gate_proj.weight")) else {
        // Whoever masked them meant something that would be lost without a word.
        if (layer..shape.rows)
            .step_by(shape.layers)
            .any(|visit| mask.ffn_count(visit) < shape.ffn)
        {
            bail!(
                UnsupportedModel,
                "mask '{}' switches off neurons of layer {layer}, which is a mixture of experts: they cannot be dropped",
                mask.name
            );
        }
        return Ok(None);
    };
    let before = model.infos()[gate].rows_cols().0;
    let used = |&neuron: &usize| {
        (layer..shape.rows)
            .step_by(shape.layers)
            .any(|visit| mask.ffn(visit, neuron))
    };
    let neurons: Vec<usize> = (0..before).filter(used).collect();
    if neurons.is_empty() {
        bail!(Usage, "the mask leaves layer {layer} no neuron");
    }
    Ok(Some(Kept { neurons, before }))
}

/// Whether the tensor has a row for each neuron of a draft head's block.
fn is_draft_gate(name: &str) -> bool {
    name.starts_with("model.mtp.layers.") && name.ends_with(".mlp.gate_proj.weight")
}

/// Where the neurons of a tensor are.
#[derive(Clone, Copy)]
enum Axis {
    Rows,
    Cols,
}

fn place(name: &str) -> Option<(usize, Axis)> {
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let axis = match rest.strip_prefix("mlp.")? {
        "gate_proj.weight" | "up_proj.weight" | "gate_proj.bias" | "up_proj.bias" => Axis::Rows,
        "down_proj.weight" => Axis::Cols,
        _ => return None,
    };
    Some((layer.parse().ok()?, axis))
}

fn narrowed<'a>(model: &'a Container, id: usize, info: &'a TensorInfo, keep: &'a [usize], axis: Axis) -> Part<'a> {
    // A vector has one value for each neuron.
    let (rows, cols) = match info.shape.as_slice() {
        [neurons] => (*neurons as usize, 1),
        _ => info.rows_cols(),
    };
    let neurons = match axis {
        Axis::Rows => rows,
        Axis::Cols => cols,
    };
    if keep.len() == neurons {
        return Part::copy(model, id, info);
    }
    let mut spec = spec(info);
    let dim = match axis {
        Axis::Rows => spec.shape.first_mut(),
        Axis::Cols => spec.shape.last_mut(),
    };
    if let Some(dim) = dim {
        *dim = keep.len() as u64;
    }
    if let Axis::Cols = axis {
        spec.dtype = storage_dtype(info.dtype, &spec.shape);
    }
    let to = spec.dtype;
    Part {
        spec,
        from: model,
        id,
        change: Some(Box::new(move |bytes| match axis {
            Axis::Rows if gather::rows_share_groups(info.dtype, cols) => {
                gather::rows_again((info.dtype, bytes), (rows, cols), keep)
            }
            Axis::Rows => gather::rows(info.dtype, bytes, rows, cols, keep),
            Axis::Cols => gather::cols((info.dtype, bytes), (rows, cols), keep, to),
        })),
    }
}

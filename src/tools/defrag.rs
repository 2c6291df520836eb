//! `defrag`: drops the neurons that a task's mask switches off (section 11 of the format).

use super::cut;
use super::gather;
use super::rewrite::{NewFile, NewTensor, header_of, object};
use super::{Progress, TOOL, Written};
use crate::dtype::encode::storage_dtype;
use crate::error::{Result, bail};
use crate::format::cmf::{CmfContainer, Mask, MaskAxis};
use crate::format::{TensorInfo, TensorSpec};
use serde_json::json;
use std::path::Path;

/// Writes the model at `model` with only the FFN neurons that the mask of `task` leaves active. Layers may differ in width.
///
/// Rows of gate and up projections are copied. Down projections are decoded and encoded again, as q8_2f if their type needs
/// a multiple of 32 columns and the new width is not one. Skill tensors are cut like the tensors that they replace. Draft heads
/// are not masked and stay unchanged. A mask that also switches off heads, layers or experts is refused, unless `ffn_only`
/// is set, which keeps them all active.
///
/// Errors: `Usage` for an unknown task, a layer without active neurons, or a mask as above; `UnsupportedModel` if neurons of
/// experts are masked or no layer has a dense FFN; `SkillFile` for a skill file; `MissingTensor` and `Parse` for a skill that
/// does not match the model; `UnsupportedFeature` for rotated matrices; `UnsupportedTensorType` for values that a type cannot
/// hold; `HashMismatch` for damage; `Io`.
pub fn defrag(model: &Path, task: &str, ffn_only: bool, out: &Path, progress: Progress) -> Result<Written> {
    let model = CmfContainer::open(model)?;
    cut::check(&model)?;
    if model.header().arch.prism_hadamard.is_some() {
        bail!(
            UnsupportedFeature,
            "the matrices are rotated, which mixes neurons; convert the model with a type for all matrices first"
        );
    }
    let Some(masks) = model.masks() else {
        bail!(Usage, "the model has no masks");
    };
    let mask = masks.find(task)?;
    if !ffn_only && restricts_more(mask) {
        bail!(
            Usage,
            "mask '{task}' also switches off heads, layers or experts, which cannot be dropped; dropping only neurons must be \
             requested explicitly"
        );
    }
    let kept = (0..mask.shape().layers)
        .map(|layer| alive(&model, mask, layer))
        .collect::<Result<Vec<_>>>()?;
    let widths: Vec<usize> = kept.iter().flatten().map(|kept| kept.neurons.len()).collect();
    let Some(&widest) = widths.iter().max() else {
        bail!(UnsupportedModel, "no layer has a dense FFN");
    };
    let mut tensors = Vec::with_capacity(model.infos().len());
    for (id, info) in model.infos().iter().enumerate() {
        let (_, name) = cut::split(&model, &info.name);
        let place = place(name).and_then(|(layer, axis)| Some((kept.get(layer)?.as_ref()?, axis)));
        tensors.push(match place {
            None => NewTensor::copy(&model, id),
            Some((kept, axis)) => narrowed(&model, id, info, &kept.neurons, axis),
        });
    }
    let before = model.header().arch.intermediate_size;
    let mut header = header_of(&model);
    // Draft heads keep their width, and readers may allocate for the largest FFN of all.
    let drafts = model.infos().iter().filter(|info| is_draft_gate(&info.name));
    let nominal = drafts.map(|info| info.rows_cols().0).fold(widest, usize::max);
    object(&mut header, "arch")?.insert("intermediate_size".into(), nominal.into());
    let layer = kept.iter().position(|kept| kept.as_ref().is_some_and(Kept::is_cut));
    let mut notes = cut::skills(&model, &mut header, &tensors, layer)?;
    let names = masks.masks.iter().map(|mask| mask.name.as_str());
    let others: Vec<&str> = names.filter(|&name| name != task).collect();
    if !others.is_empty() {
        notes.push(format!(
            "masks that refer to dropped neurons are removed: {}",
            others.join(", ")
        ));
    }
    let all: usize = kept.iter().flatten().map(|kept| kept.before).sum();
    let left: usize = widths.iter().sum();
    let record = json!({
        "tool": format!("{TOOL} defrag"),
        "source_skill": task,
        "pre_intermediate": before,
        "post_intermediate_max": widest,
        "kept_per_layer": widths,
        "pruned_ratio": 1.0 - left as f64 / all.max(1) as f64,
    });
    object(&mut header, "provenance")?.insert("defrag".into(), record);
    NewFile::unmasked(&model, header, tensors)?.write(&[&model], out, notes, progress)
}

fn restricts_more(mask: &Mask) -> bool {
    let shape = mask.shape();
    let count = |axis, row| mask.count(axis, row);
    let restricted = |row| count(MaskAxis::Heads, row) < shape.heads || count(MaskAxis::Experts, row) < shape.experts;
    (0..shape.layers).any(|layer| !mask.layer(layer)) || (0..shape.rows).any(restricted)
}

/// The remaining part of a layer's FFN.
struct Kept {
    /// The neurons that are active in any loop.
    neurons: Vec<usize>,
    /// The number of neurons before.
    before: usize,
}

impl Kept {
    fn is_cut(&self) -> bool {
        self.neurons.len() < self.before
    }
}

/// The active neurons of a layer; `None` without a dense FFN. Errors: `Usage` if none is active; `UnsupportedModel` if the
/// mask switches off neurons of a layer without a dense FFN.
fn alive(model: &CmfContainer, mask: &Mask, layer: usize) -> Result<Option<Kept>> {
    let shape = mask.shape();
    let rows = (layer..shape.rows).step_by(shape.layers);
    let Some(gate) = model.find(&format!("model.layers.{layer}.mlp.gate_proj.weight")) else {
        if rows.clone().any(|row| mask.count(MaskAxis::Neurons, row) < shape.ffn) {
            bail!(
                UnsupportedModel,
                "mask '{}' switches off neurons of layer {layer}, a mixture of experts, which cannot be dropped",
                mask.name
            );
        }
        return Ok(None);
    };
    let before = model.infos()[gate].rows_cols().0;
    let used = |&neuron: &usize| rows.clone().any(|row| mask.unit(MaskAxis::Neurons, row, neuron));
    let neurons: Vec<usize> = (0..before).filter(used).collect();
    if neurons.is_empty() {
        bail!(Usage, "the mask leaves no active neuron in layer {layer}");
    }
    Ok(Some(Kept { neurons, before }))
}

/// Whether the tensor is the gate projection of a draft head, with a row per neuron.
fn is_draft_gate(name: &str) -> bool {
    name.starts_with("model.mtp.layers.") && name.ends_with(".mlp.gate_proj.weight")
}

/// The axis of a tensor that its neurons are on.
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

fn narrowed<'a>(
    model: &'a CmfContainer,
    id: usize,
    info: &'a TensorInfo,
    keep: &'a [usize],
    axis: Axis,
) -> NewTensor<'a> {
    let (rows, cols) = cut::rows_cols(info);
    let mut spec = TensorSpec::from(info);
    let (neurons, dim) = match axis {
        Axis::Rows => (rows, spec.shape.first_mut()),
        Axis::Cols => (cols, spec.shape.last_mut()),
    };
    if keep.len() == neurons {
        return NewTensor::copy(model, id);
    }
    if let Some(dim) = dim {
        *dim = keep.len() as u64;
    }
    if let Axis::Cols = axis {
        spec.dtype = storage_dtype(info.dtype, &spec.shape);
    }
    let to = spec.dtype;
    NewTensor {
        spec,
        from: model,
        id,
        change: Some(Box::new(move |bytes| match axis {
            Axis::Rows if info.dtype.rows_share_groups(cols) => {
                gather::rows_again((info.dtype, bytes), (rows, cols), keep)
            }
            Axis::Rows => info.dtype.select_rows(bytes, rows, cols, keep),
            Axis::Cols => gather::cols((info.dtype, bytes), (rows, cols), keep, to),
        })),
    }
}

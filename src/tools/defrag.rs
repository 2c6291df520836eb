//! `defrag`: a model without the neurons that a task's mask switches off (section 11 of the format).

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
/// multiple of 32 and their type needs that. A mask that also switches off heads, layers or experts cannot be expressed in
/// this way: it is refused unless `ffn_only` leaves them on.
///
/// Errors: `Usage` for a task that is not there, a layer without neurons left, or a mask as above; `UnsupportedModel` for a
/// model with skills, and for one whose neurons are those of experts; `UnsupportedTensorType` for types that cannot be
/// picked from or written; `HashMismatch` for damage; `Io`.
pub fn defrag(model: &Path, task: &str, ffn_only: bool, out: &Path, progress: Progress) -> Result<Written> {
    let model = Container::open(model)?;
    if !model.skills().is_empty() {
        bail!(
            UnsupportedModel,
            "the model has skills, which would not fit any more; remove them first"
        );
    }
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
    let widths: Vec<usize> = kept.iter().flatten().map(Vec::len).collect();
    let Some(&widest) = widths.iter().max() else {
        bail!(UnsupportedModel, "no layer has an FFN of its own");
    };
    let mut parts = Vec::with_capacity(model.infos().len());
    for (id, info) in model.infos().iter().enumerate() {
        let place = place(&info.name).and_then(|(layer, role)| Some((kept.get(layer)?.as_ref()?, role)));
        parts.push(match place {
            None => Part::copy(&model, id, info),
            Some((keep, role)) => narrowed(&model, id, info, keep, role),
        });
    }
    let before = model.header().arch.intermediate_size;
    let mut header = header_of(&model);
    object(&mut header, "arch")?.insert("intermediate_size".into(), widest.into());
    let (all, left) = (before * widths.len(), widths.iter().sum::<usize>());
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
        notes: Vec::new(),
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

/// The neurons of a layer that any pass uses; `None` for a layer without an FFN of its own.
fn alive(model: &Container, mask: &Mask, layer: usize) -> Result<Option<Vec<usize>>> {
    let shape = mask.shape();
    let Some(gate) = model.find(&format!("model.layers.{layer}.mlp.gate_proj.weight")) else {
        return Ok(None);
    };
    let width = model.infos()[gate].rows_cols().0;
    let used = |&neuron: &usize| {
        (layer..shape.rows)
            .step_by(shape.layers)
            .any(|visit| mask.ffn(visit, neuron))
    };
    let alive: Vec<usize> = (0..width).filter(used).collect();
    if alive.is_empty() {
        bail!(Usage, "the mask leaves layer {layer} no neuron");
    }
    Ok(Some(alive))
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
            Axis::Rows => gather::rows(info.dtype, bytes, rows, cols, keep),
            Axis::Cols => gather::cols((info.dtype, bytes), (rows, cols), keep, to),
        })),
    }
}

//! Narrowing a mixture of experts to what a task uses (section 11.1 of the format): as a mask, or for good.

use super::cut;
use super::gather;
use super::rewrite::{Part, Plan, header_of, object, spec};
use super::{Progress, Written};
use crate::container::{Container, Mask, MaskShape, Sections, TensorInfo, Tensors, json};
use crate::error::{Error, Result, bail};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

/// How often each expert of a layer was chosen, by layer.
#[derive(Clone, Debug, PartialEq)]
pub struct RoutingStats(BTreeMap<usize, Vec<f64>>);

impl RoutingStats {
    /// Reads `{"layers": {"3": [f0, f1, …]}}`.
    ///
    /// Errors: `Parse` for anything else, for counts below 0 and for counts whose sum is beyond all numbers; `Io`.
    pub fn open(path: &Path) -> Result<RoutingStats> {
        let io = |err: std::io::Error| Error::io(path, &err);
        if !std::fs::metadata(path).map_err(io)?.is_file() {
            bail!(Io, "{}: wanted a regular file", path.display());
        }
        let mut text = Vec::new();
        let file = std::fs::File::open(path).map_err(io)?;
        file.take(json::MAX_BYTES as u64 + 1)
            .read_to_end(&mut text)
            .map_err(io)?;
        RoutingStats::parse(&text).map_err(|err| err.context(path.display()))
    }

    /// The same from text.
    pub fn parse(text: &[u8]) -> Result<RoutingStats> {
        let whole = json::parse_object(text, "statistics")?;
        let Some(Value::Object(layers)) = whole.get("layers") else {
            bail!(Parse, "statistics: wanted an object 'layers'");
        };
        let mut stats = BTreeMap::new();
        for (layer, counts) in layers {
            let numbers = counts
                .as_array()
                .map(|counts| counts.iter().map(Value::as_f64).collect::<Option<Vec<f64>>>());
            let (Ok(layer), Some(Some(counts))) = (layer.parse(), numbers) else {
                bail!(
                    Parse,
                    "statistics: layer '{layer}' wanted as a number with an array of numbers"
                );
            };
            if counts.iter().any(|&count| !(count >= 0.0 && count.is_finite())) {
                bail!(Parse, "statistics: layer {layer} has a count below 0");
            }
            // Shares of an endless sum would be none.
            if !counts.iter().sum::<f64>().is_finite() {
                bail!(
                    Parse,
                    "statistics: the counts of layer {layer} add up to more than numbers can be"
                );
            }
            if stats.insert(layer, counts).is_some() {
                bail!(Parse, "statistics: layer {layer} is there twice");
            }
        }
        Ok(RoutingStats(stats))
    }
}

/// The experts that a task keeps in each layer that has a router, ascending.
struct Kept {
    layers: BTreeMap<usize, Vec<usize>>,
    notes: Vec<String>,
}

impl Kept {
    /// Per layer the smallest set of experts that takes at least the share `cover` of what was recorded; of two with equal
    /// counts the lower one.
    ///
    /// Errors: `Usage` for a share outside of 0 to 1, statistics of other layers or other numbers of experts;
    /// `UnsupportedModel` for a network without experts.
    fn new(model: &Container, stats: &RoutingStats, cover: f64) -> Result<Kept> {
        if !(cover > 0.0 && cover <= 1.0) {
            bail!(Usage, "a share of {cover}, wanted more than 0 and at most 1");
        }
        let experts = experts(model);
        if experts.is_empty() {
            bail!(UnsupportedModel, "the network has no experts");
        }
        if let Some(layer) = stats.0.keys().find(|layer| !experts.contains_key(layer)) {
            bail!(Usage, "the statistics have layer {layer}, which has no experts");
        }
        let mut kept = Kept {
            layers: BTreeMap::new(),
            notes: Vec::new(),
        };
        for (layer, count) in experts {
            let counts = stats.0.get(&layer).map(Vec::as_slice).unwrap_or_default();
            if !counts.is_empty() && counts.len() != count {
                bail!(
                    Usage,
                    "the statistics of layer {layer} have {} experts, the layer {count}",
                    counts.len()
                );
            }
            let total: f64 = counts.iter().sum();
            let mut keep: Vec<usize> = (0..count).collect();
            if total > 0.0 {
                keep.sort_by(|&a, &b| counts[b].total_cmp(&counts[a]).then(a.cmp(&b)));
                let mut covered = 0.0;
                let needed = keep.iter().take_while(|&&expert| {
                    let wanted = covered < cover * total;
                    covered += counts[expert];
                    wanted
                });
                let needed = needed.count();
                keep.truncate(needed.max(1));
                keep.sort_unstable();
            } else {
                kept.notes
                    .push(format!("layer {layer}: nothing was recorded, it keeps every expert"));
            }
            kept.layers.insert(layer, keep);
        }
        Ok(kept)
    }
}

/// Experts of each layer that has a router.
fn experts(model: &Container) -> BTreeMap<usize, usize> {
    let mut layers: BTreeMap<usize, usize> = BTreeMap::new();
    for info in model.infos() {
        if let Some((layer, Role::Router)) = role(&info.name) {
            layers.insert(layer, info.rows_cols().0);
        }
    }
    layers
}

/// What a tensor is in a layer's mixture of experts.
enum Role<'a> {
    Router,
    Bias,
    Expert(usize, &'a str),
}

fn role(name: &str) -> Option<(usize, Role<'_>)> {
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let layer = layer.parse().ok()?;
    let role = match rest {
        "mlp.gate.weight" => Role::Router,
        "mlp.expert_bias" => Role::Bias,
        _ => {
            let (expert, part) = rest.strip_prefix("mlp.experts.")?.split_once('.')?;
            Role::Expert(expert.parse().ok()?, part)
        }
    };
    Some((layer, role))
}

/// What a task uses, and what the result of it is called.
#[derive(Clone, Debug)]
pub struct Narrowing {
    /// How often experts were chosen.
    pub stats: RoutingStats,
    /// The share of recorded choices that the kept experts of each layer take, above 0 up to 1.
    pub cover: f64,
}

/// Writes the model with one more mask, `task`, that lets only the kept experts be chosen.
///
/// Errors: `Usage` for a name that is taken or no name, and as `Kept` says; `HashMismatch` for damage; `Io`.
pub fn mask(model: &Path, narrowing: &Narrowing, task: &str, out: &Path, progress: Progress) -> Result<Written> {
    let model = Container::open(model)?;
    let kept = Kept::new(&model, &narrowing.stats, narrowing.cover)?;
    let mut masks = model.masks().cloned().unwrap_or_default();
    if masks.masks.iter().any(|mask| mask.name == task) {
        bail!(
            Usage,
            "there is a mask '{task}' already; the new one needs another name"
        );
    }
    let arch = &model.header().arch;
    let by_pass = model.has_loop_masks();
    let task_id = masks.masks.iter().map(|mask| mask.task_id).max();
    let Some(task_id) = task_id.map_or(Some(0), |id| id.checked_add(1)) else {
        bail!(Usage, "no number is left for another mask");
    };
    let mut mask = Mask::open(task_id, task, MaskShape::of(arch, by_pass));
    let experts = experts(&model);
    let (mut off, mut all) = (0, 0);
    for (&layer, keep) in &kept.layers {
        let count = experts.get(&layer).copied().unwrap_or(0);
        for visit in (layer..mask.shape().rows).step_by(mask.shape().layers) {
            for expert in (0..count).filter(|expert| keep.binary_search(expert).is_err()) {
                mask.set_expert(visit, expert, false)?;
            }
        }
        off += count - keep.len();
        all += count;
    }
    mask.sparsity = Some(off as f64 / all.max(1) as f64);
    mask.description = Some(format!(
        "experts that take {} of the recorded choices in each of {} layers",
        narrowing.cover,
        kept.layers.len()
    ));
    masks.masks.push(mask);
    let section = masks.to_bytes()?;
    let mut plan = super::compact::plan(&model)?;
    plan.sections.masks = Some(&section);
    let bytes = plan.write_one(&[&model], out, progress)?;
    Ok(Written {
        tensors: plan.parts.len(),
        bytes,
        notes: kept.notes,
    })
}

/// Writes the model without the experts that a task does not use: the others are counted anew from 0 in their order, the
/// router's rows go with them, and every payload that stays is copied. What skills replace is treated like what it replaces.
/// Experts of a draft head stay: nothing was recorded of them.
///
/// Errors: as [`mask`]; `SkillFile` for a file that is no model; `MissingTensor` and `Parse` for a skill that does not fit the
/// model; `UnsupportedTensorType` for a router whose rows cannot be picked.
pub fn defrag(model: &Path, narrowing: &Narrowing, out: &Path, progress: Progress) -> Result<Written> {
    let model = Container::open(model)?;
    cut::check(&model)?;
    let Kept { layers, mut notes } = Kept::new(&model, &narrowing.stats, narrowing.cover)?;
    let mut parts: Vec<Part> = Vec::with_capacity(model.infos().len());
    for (id, info) in model.infos().iter().enumerate() {
        let (skill, name) = cut::split(&model, &info.name);
        let Some((layer, role)) = role(name) else {
            parts.push(Part::copy(&model, id, info));
            continue;
        };
        let Some(keep) = layers.get(&layer) else {
            bail!(
                UnsupportedModel,
                "'{}': layer {layer} has experts and no router",
                info.name
            );
        };
        match role {
            // Experts come in the order of their roles, all where the first of them is.
            Role::Expert(expert, part) => {
                let Some(at) = keep.iter().position(|&kept| kept == expert) else {
                    continue;
                };
                let mut copy = Part::copy(&model, id, info);
                copy.spec.name = format!("{skill}model.layers.{layer}.mlp.experts.{at}.{part}");
                parts.push(copy);
            }
            Role::Router | Role::Bias => parts.push(picked(&model, id, info, keep)),
        }
    }
    by_role(&mut parts);
    let mut header = header_of(&model);
    let pre = model.header().arch.moe.as_ref().map(|moe| moe.num_experts);
    let counts: Map<String, Value> = layers
        .iter()
        .map(|(layer, keep)| {
            let counts = narrowing.stats.0.get(layer).map(Vec::as_slice).unwrap_or_default();
            let kept: Vec<Value> = keep
                .iter()
                .filter_map(|&expert| counts.get(expert).map(|&count| whole(count)))
                .collect();
            (layer.to_string(), kept.into())
        })
        .collect();
    let kept_per_layer: Vec<usize> = layers.values().map(Vec::len).collect();
    object(&mut header, "provenance")?.insert(
        "moe_defrag".into(),
        json!({
            "tool": concat!("cmf-gpu ", env!("CARGO_PKG_VERSION"), " moe-defrag"),
            "cover": narrowing.cover,
            "num_experts_pre": pre,
            "kept_per_layer": kept_per_layer,
            "routing_counts": counts,
        }),
    );
    let before = experts(&model);
    let mut kept = layers.iter().map(|(&layer, keep)| (layer, keep.len()));
    let layer = kept.find(|(layer, kept)| before.get(layer).is_some_and(|before| kept < before));
    let layer = layer.map(|(layer, _)| layer);
    notes.extend(cut::skills(&model, &mut header, &parts, layer)?);
    let sections = model.sections()?;
    if sections.masks.is_some() {
        notes.push("the masks are left out: they speak of experts that are gone".to_owned());
    }
    let plan = Plan {
        header,
        parts,
        sections: Sections {
            vocab: sections.vocab,
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

/// A count as it is usually written: without a point when it is whole.
fn whole(count: f64) -> Value {
    match count.fract() == 0.0 && count < (1u64 << 53) as f64 {
        true => (count as u64).into(),
        false => count.into(),
    }
}

/// A router or a vector of biases with an entry for each kept expert.
fn picked<'a>(model: &'a Container, id: usize, info: &'a TensorInfo, keep: &[usize]) -> Part<'a> {
    let mut spec = spec(info);
    if let Some(experts) = spec.shape.first_mut() {
        *experts = keep.len() as u64;
    }
    // A vector has one value for each expert.
    let (rows, cols) = match info.shape.as_slice() {
        [experts] => (*experts as usize, 1),
        _ => info.rows_cols(),
    };
    let keep = keep.to_vec();
    Part {
        spec,
        from: model,
        id,
        change: Some(Box::new(move |bytes| {
            gather::rows(info.dtype, bytes, rows, cols, &keep)
        })),
    }
}

/// Puts the experts of each layer where the first of them is: every gate, then every up, then every down projection.
fn by_role(parts: &mut Vec<Part>) {
    let rank = |part: &str| match part {
        "gate_proj.weight" => 0,
        "up_proj.weight" => 1,
        "down_proj.weight" => 2,
        _ => 3,
    };
    let mut first: BTreeMap<usize, usize> = BTreeMap::new();
    let mut keyed: Vec<((usize, usize, usize), Part)> = Vec::with_capacity(parts.len());
    for (at, part) in parts.drain(..).enumerate() {
        let key = match role(&part.spec.name) {
            Some((layer, Role::Expert(expert, name))) => (*first.entry(layer).or_insert(at), rank(name), expert),
            _ => (at, 0, 0),
        };
        keyed.push((key, part));
    }
    keyed.sort_by_key(|(key, _)| *key);
    parts.extend(keyed.into_iter().map(|(_, part)| part));
}

//! Restricting a mixture of experts to those that a task uses (section 11.1 of the format): by a mask, or by dropping the
//! others.

use super::cut;
use super::rewrite::{NewFile, NewTensor, header_of, object};
use super::{Progress, TOOL, Written};
use crate::error::{Result, bail};
use crate::format::cmf::{CmfContainer, Mask, MaskAxis, MaskShape};
use crate::format::{TensorInfo, json, read_start};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// How often each expert was chosen, by layer.
#[derive(Clone, Debug, PartialEq)]
pub struct RoutingStats(BTreeMap<usize, Vec<f64>>);

impl RoutingStats {
    /// Reads `{"layers": {"3": [f0, f1, …]}}`.
    ///
    /// Errors: `Parse` for anything else, for negative counts and for counts whose sum is not finite; `Io`.
    pub fn open(path: &Path) -> Result<RoutingStats> {
        let text = read_start(path, json::MAX_BYTES as u64 + 1)?;
        RoutingStats::parse(&text).map_err(|err| err.context(path.display()))
    }

    /// Parses the text of such a file. Errors: as [`RoutingStats::open`].
    pub fn parse(text: &[u8]) -> Result<RoutingStats> {
        let whole = json::parse_object(text, "statistics")?;
        let Some(Value::Object(layers)) = whole.get("layers") else {
            bail!(Parse, "statistics: expected a member 'layers' that is an object");
        };
        let mut stats = BTreeMap::new();
        for (layer, counts) in layers {
            let counts = counts.as_array().map(|counts| counts.iter().map(Value::as_f64));
            let counts: Option<Vec<f64>> = counts.and_then(Iterator::collect);
            let (Ok(layer), Some(counts)) = (layer.parse(), counts) else {
                bail!(
                    Parse,
                    "statistics: layer '{layer}': expected a layer number with an array of counts"
                );
            };
            if counts.iter().any(|&count| !(count >= 0.0 && count.is_finite())) {
                bail!(Parse, "statistics: layer {layer} has a negative count");
            }
            if !counts.iter().sum::<f64>().is_finite() {
                bail!(
                    Parse,
                    "statistics: the sum of the counts of layer {layer} is not finite"
                );
            }
            if stats.insert(layer, counts).is_some() {
                bail!(Parse, "statistics: layer {layer} occurs twice");
            }
        }
        Ok(RoutingStats(stats))
    }

    /// The counts of a layer; empty if there are none.
    fn of(&self, layer: usize) -> &[f64] {
        self.0.get(&layer).map(Vec::as_slice).unwrap_or_default()
    }
}

/// The experts to keep in each layer that has a router, ascending.
#[derive(Default)]
struct Kept {
    layers: BTreeMap<usize, Vec<usize>>,
    notes: Vec<String>,
}

impl Kept {
    /// For each layer the smallest set of experts that has at least the fraction `cover` of the recorded choices. Of experts
    /// with equal counts the lower number is kept.
    ///
    /// Errors: `Usage` for a fraction outside 0 to 1, statistics of other layers or other numbers of experts;
    /// `UnsupportedModel` for a network without experts.
    fn new(model: &CmfContainer, stats: &RoutingStats, cover: f64) -> Result<Kept> {
        if !(cover > 0.0 && cover <= 1.0) {
            bail!(Usage, "cover is {cover}, expected more than 0 and at most 1");
        }
        let experts = experts(model);
        if experts.is_empty() {
            bail!(UnsupportedModel, "the network has no experts");
        }
        if let Some(layer) = stats.0.keys().find(|layer| !experts.contains_key(layer)) {
            bail!(Usage, "the statistics contain layer {layer}, which has no experts");
        }
        let mut kept = Kept::default();
        for (layer, count) in experts {
            let counts = stats.of(layer);
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
                let (mut covered, mut needed) = (0.0, 0);
                while needed < count && covered < cover * total {
                    covered += counts[keep[needed]];
                    needed += 1;
                }
                keep.truncate(needed.max(1));
                keep.sort_unstable();
            } else {
                kept.notes.push(format!(
                    "layer {layer}: keeps every expert, because no choices were recorded"
                ));
            }
            kept.layers.insert(layer, keep);
        }
        Ok(kept)
    }
}

/// The number of experts of each layer that has a router.
fn experts(model: &CmfContainer) -> BTreeMap<usize, usize> {
    let routers = model.infos().iter().filter_map(|info| match role(&info.name) {
        Some((layer, Role::Router)) => Some((layer, info.rows_cols().0)),
        _ => None,
    });
    routers.collect()
}

/// The role of a tensor in a layer's mixture of experts.
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
            let (expert, projection) = rest.strip_prefix("mlp.experts.")?.split_once('.')?;
            Role::Expert(expert.parse().ok()?, projection)
        }
    };
    Some((layer, role))
}

/// Which experts to keep.
#[derive(Clone, Debug)]
pub struct Narrowing {
    /// How often experts were chosen.
    pub stats: RoutingStats,
    /// The fraction of recorded choices that the kept experts of each layer must have, above 0 and at most 1.
    pub cover: f64,
}

/// Writes the model with an additional mask, `task`, that allows only the kept experts.
///
/// Errors: `Usage` for an invalid or existing task name, for a `cover` outside 0 to 1, and for statistics that do not match
/// the model; `UnsupportedModel` for a network without experts; `HashMismatch` for damage; `Io`.
pub fn mask(model: &Path, narrowing: &Narrowing, task: &str, out: &Path, progress: Progress) -> Result<Written> {
    let model = CmfContainer::open(model)?;
    let kept = Kept::new(&model, &narrowing.stats, narrowing.cover)?;
    let mut masks = model.masks().cloned().unwrap_or_default();
    if masks.masks.iter().any(|mask| mask.name == task) {
        bail!(Usage, "mask '{task}' exists already; choose another name");
    }
    let task_id = masks.masks.iter().map(|mask| mask.task_id).max();
    let Some(task_id) = task_id.map_or(Some(0), |id| id.checked_add(1)) else {
        bail!(Usage, "no task_id is left for another mask");
    };
    let shape = MaskShape::of(&model.header().arch, model.has_loop_masks());
    let mut mask = Mask::open(task_id, task, shape);
    let experts = experts(&model);
    let (mut off, mut all) = (0, 0);
    for (&layer, keep) in &kept.layers {
        let count = experts.get(&layer).copied().unwrap_or(0);
        for invocation in (layer..mask.shape().rows).step_by(mask.shape().layers) {
            for expert in (0..count).filter(|expert| keep.binary_search(expert).is_err()) {
                mask.set_unit(MaskAxis::Experts, invocation, expert, false)?;
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
    let mut file = super::shard::whole(&model)?;
    file.sections.masks = Some(&section);
    file.write(&[&model], out, kept.notes, progress)
}

/// Writes the model with only the kept experts. They are numbered from 0 in their old order, with the matching rows of the
/// router; their payloads are copied. Skill tensors are treated like the tensors that they replace. Experts of a draft head
/// stay, because statistics do not cover them.
///
/// Errors: as [`mask`]; `SkillFile` for a skill file; `MissingTensor` and `Parse` for a skill that does not match the model;
/// `UnsupportedTensorType` for a router whose rows cannot be picked.
pub fn defrag(model: &Path, narrowing: &Narrowing, out: &Path, progress: Progress) -> Result<Written> {
    let model = CmfContainer::open(model)?;
    cut::check(&model)?;
    let Kept { layers, mut notes } = Kept::new(&model, &narrowing.stats, narrowing.cover)?;
    let mut tensors: Vec<NewTensor> = Vec::with_capacity(model.infos().len());
    for (id, info) in model.infos().iter().enumerate() {
        let (skill, name) = cut::split(&model, &info.name);
        let Some((layer, role)) = role(name) else {
            tensors.push(NewTensor::copy(&model, id));
            continue;
        };
        let Some(keep) = layers.get(&layer) else {
            bail!(
                UnsupportedModel,
                "'{}': layer {layer} has experts but no router",
                info.name
            );
        };
        match role {
            Role::Expert(expert, projection) => {
                let Some(at) = keep.iter().position(|&kept| kept == expert) else {
                    continue;
                };
                let mut copy = NewTensor::copy(&model, id);
                copy.spec.name = format!("{skill}model.layers.{layer}.mlp.experts.{at}.{projection}");
                tensors.push(copy);
            }
            Role::Router | Role::Bias => tensors.push(picked(&model, id, info, keep)),
        }
    }
    by_role(&mut tensors);
    let mut header = header_of(&model);
    let counts = layers.iter().map(|(layer, keep)| {
        let counts = narrowing.stats.of(*layer);
        let kept = keep.iter().filter_map(|&expert| counts.get(expert).copied().map(whole));
        (layer.to_string(), kept.collect())
    });
    let counts: Map<String, Value> = counts.collect();
    let kept_per_layer: Vec<usize> = layers.values().map(Vec::len).collect();
    let record = json!({
        "tool": format!("{TOOL} moe-defrag"),
        "cover": narrowing.cover,
        "num_experts_pre": model.header().arch.moe.as_ref().map(|moe| moe.num_experts),
        "kept_per_layer": kept_per_layer,
        "routing_counts": counts,
    });
    object(&mut header, "provenance")?.insert("moe_defrag".into(), record);
    let before = experts(&model);
    let cut = |layer: &usize| before.get(layer).is_some_and(|&before| layers[layer].len() < before);
    let layer = layers.keys().copied().find(cut);
    notes.extend(cut::skills(&model, &mut header, &tensors, layer)?);
    if model.sections()?.masks.is_some() {
        notes.push("the masks are removed, because they refer to dropped experts".to_owned());
    }
    NewFile::unmasked(&model, header, tensors)?.write(&[&model], out, notes, progress)
}

/// A count as JSON, without a decimal point if it is an integer.
fn whole(count: f64) -> Value {
    match count.fract() == 0.0 && count < (1u64 << 53) as f64 {
        true => (count as u64).into(),
        false => count.into(),
    }
}

/// The entries of the kept experts of a router or bias vector.
fn picked<'a>(model: &'a CmfContainer, id: usize, info: &'a TensorInfo, keep: &'a [usize]) -> NewTensor<'a> {
    let mut copy = NewTensor::copy(model, id);
    if let Some(experts) = copy.spec.shape.first_mut() {
        *experts = keep.len() as u64;
    }
    let (rows, cols) = cut::rows_cols(info);
    copy.change = Some(Box::new(move |bytes| info.dtype.select_rows(bytes, rows, cols, keep)));
    copy
}

/// Moves the experts of each layer to the position of the first one: all gate, then all up, then all down projections.
fn by_role(tensors: &mut Vec<NewTensor>) {
    let rank = |projection: &str| match projection {
        "gate_proj.weight" => 0,
        "up_proj.weight" => 1,
        "down_proj.weight" => 2,
        _ => 3,
    };
    let mut first: BTreeMap<usize, usize> = BTreeMap::new();
    let mut keyed: Vec<((usize, usize, usize), NewTensor)> = Vec::with_capacity(tensors.len());
    for (at, tensor) in tensors.drain(..).enumerate() {
        let key = match role(&tensor.spec.name) {
            Some((layer, Role::Expert(expert, name))) => (*first.entry(layer).or_insert(at), rank(name), expert),
            _ => (at, 0, 0),
        };
        keyed.push((key, tensor));
    }
    keyed.sort_by_key(|(key, _)| *key);
    tensors.extend(keyed.into_iter().map(|(_, tensor)| tensor));
}

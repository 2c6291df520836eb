//! From a source's tensors, under the container's names, to the list that is written.
//!
//! Every tensor the network needs is found and has the shape the configuration says; every other one is carried, named as
//! dropped, or refused. Knows no file format.

use super::family::{
    DENSE_PREFIX, EMBED, Family, HEAD, LAYER_PREFIX, LM_HEAD, MTP, MTP_PREFIX, MTP_TAIL, ROUTER, Role, TAIL,
    layer_roles,
};
use super::{Matrix, Tensor};
use super::{arch, experts};
use crate::container::{Arch, LayerType, Mtp};
use crate::error::{Error, Kind, Result, bail};
use std::collections::{HashMap, HashSet};

/// How many names a message lists.
const LISTED: usize = 5;

/// Source tensors by the container's name.
pub(super) type Found<'a> = HashMap<String, Matrix<'a>>;

/// What is written, and what is not.
pub(super) struct Bound<'a> {
    pub tensors: Vec<Tensor<'a>>,
    pub dropped: Vec<String>,
    pub notes: Vec<String>,
}

/// Picks the tensors of `family` with the dimensions of `arch` out of `found`, in the order embedding, layers, final norm,
/// output projection. Decides whether the embedding is tied: `arch` says so afterwards.
///
/// Errors: `Parse` for an impossible network or a wrong shape, `MissingTensor`, `UnsupportedModel` for a tensor that no
/// part of the network uses.
pub(super) fn bind<'a>(family: &Family, arch: &mut Arch, mut found: Found<'a>) -> Result<Bound<'a>> {
    if arch.mtp.is_none() {
        arch.mtp = unannounced_head(&found);
    }
    arch.validate()?;
    let mut notes = Vec::new();
    let drafts = found.keys().any(|name| name.starts_with(MTP_PREFIX));
    if !drafts && arch.mtp.take().is_some() {
        notes.push("the configuration announces a multi-token head, and the source has no tensors of one".to_owned());
    }
    let mut tensors = Vec::new();
    let mut missing = Vec::new();
    // Layers that are mixtures, by prefix.
    let mixtures = found
        .keys()
        .filter_map(|name| name.strip_suffix(ROUTER).map(str::to_owned));
    let mixtures: HashSet<String> = mixtures.filter(|_| arch.moe.is_some()).collect();
    let mut take = |prefix: &str, role: &Role, tensors: &mut Vec<Tensor<'a>>| {
        let name = format!("{prefix}{}", role.name);
        let Some(wanted) = role.need.of(family) else {
            return Ok(());
        };
        match found.remove(&name) {
            Some(data) => {
                let shape: Vec<u64> = role.shape.iter().map(|&dim| arch::length(arch, dim)).collect();
                data.readable()?;
                if data.shape != shape {
                    bail!(
                        Parse,
                        "tensor '{name}' has shape {:?}, the configuration says {shape:?}",
                        data.shape
                    );
                }
                tensors.push(Tensor { name, data });
            }
            None if wanted => missing.push(name),
            None => {}
        }
        Ok(())
    };
    for role in HEAD {
        take("", role, &mut tensors)?;
    }
    let layer_roles = |prefix: &str, kind: LayerType| -> Vec<(String, &'static Role)> {
        let mixture = mixtures.contains(prefix);
        let plain = layer_roles(kind).filter(|role| !(mixture && role.name.starts_with(DENSE_PREFIX)));
        let mut roles: Vec<_> = plain.map(|role| (prefix.to_owned(), role)).collect();
        if mixture {
            roles.extend(experts::roles(prefix, arch));
        }
        roles
    };
    for (layer, &kind) in arch.layer_types.iter().enumerate() {
        for (prefix, role) in layer_roles(&format!("{LAYER_PREFIX}{layer}."), kind) {
            take(&prefix, role, &mut tensors)?;
        }
    }
    for role in TAIL {
        take("", role, &mut tensors)?;
    }
    let has_head = tensors.last().is_some_and(|tensor| tensor.name == LM_HEAD);
    let mut mtp = Vec::new();
    if let Some(head) = arch.mtp.as_ref().filter(|_| drafts) {
        for role in MTP {
            take(MTP_PREFIX, role, &mut mtp)?;
        }
        for layer in 0..head.num_layers {
            for (prefix, role) in layer_roles(&format!("{MTP_PREFIX}layers.{layer}."), LayerType::FullAttention) {
                take(&prefix, role, &mut mtp)?;
            }
        }
        for role in MTP_TAIL {
            take(MTP_PREFIX, role, &mut mtp)?;
        }
    }
    if !arch.tie_word_embeddings && !has_head {
        missing.push(LM_HEAD.to_owned());
    }
    let (dropped, unused) = sort_out(found.into_keys());
    if !missing.is_empty() {
        let unused = if unused.is_empty() {
            String::new()
        } else {
            format!("; not used: {}", list(&unused))
        };
        bail!(MissingTensor, "the source lacks {}{unused}", list(&missing));
    }
    if !unused.is_empty() {
        bail!(
            UnsupportedModel,
            "a {} model has no place for {}",
            family.model_type,
            list(&unused)
        );
    }
    let mut bound = Bound {
        tensors,
        dropped,
        notes,
    };
    if arch.tie_word_embeddings && has_head {
        untie(arch, &mut bound)?;
    }
    bound.tensors.extend(mtp);
    bound.dropped.sort();
    Ok(bound)
}

/// A multi-token head that the configuration does not announce and the source has all the same, as Qwen3-Next is published.
fn unannounced_head(found: &Found) -> Option<Mtp> {
    let of_head = |name: &str| found.contains_key(&format!("{MTP_PREFIX}{name}"));
    let has_layer = |layer: &usize| of_head(&format!("layers.{layer}.input_layernorm.weight"));
    let mut parts = MTP.iter().chain(MTP_TAIL);
    if !parts.all(|role| of_head(role.name)) || !has_layer(&0) {
        return None;
    }
    Some(Mtp {
        num_layers: (0..).take_while(has_layer).count(),
        share_lm_head: true,
        share_embed: true,
        hidden: None,
    })
}

/// Splits names of tensors that were not taken into those nothing needs, with the reason, and those nobody knows.
fn sort_out(names: impl Iterator<Item = String>) -> (Vec<String>, Vec<String>) {
    let (mut dropped, mut unused) = (Vec::new(), Vec::new());
    for name in names {
        if name.ends_with("rotary_emb.inv_freq") {
            dropped.push(format!("{name}: follows from rope_theta"));
        } else if name.starts_with(MTP_PREFIX) || name.starts_with("mtp.") {
            dropped.push(format!("{name}: not part of a multi-token head that can be converted"));
        } else {
            unused.push(name);
        }
    }
    unused.sort();
    (dropped, unused)
}

/// `names`, the first few of them.
fn list(names: &[String]) -> String {
    let shown: Vec<String> = names.iter().take(LISTED).map(|name| format!("'{name}'")).collect();
    match names.len().saturating_sub(LISTED) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

/// A model that is tied by its configuration and has an output projection all the same: a copy is dropped, a different one
/// is kept and the model is not tied.
fn untie(arch: &mut Arch, bound: &mut Bound) -> Result<()> {
    let Some(head) = bound.tensors.pop() else { return Ok(()) };
    let embed = bound.tensors.iter().find(|tensor| tensor.name == EMBED);
    let embed = embed.ok_or_else(|| Error::new(Kind::MissingTensor, format!("the source lacks '{EMBED}'")))?;
    if embed.data.same(&head.data)? {
        bound.dropped.push(format!("{LM_HEAD}: equal to the tied {EMBED}"));
    } else {
        arch.tie_word_embeddings = false;
        bound.notes.push(format!(
            "the configuration ties {LM_HEAD} to {EMBED}, but they differ: both are kept, untied"
        ));
        bound.tensors.push(head);
    }
    Ok(())
}

//! Picks the tensors that the network needs out of a source's tensors, under the container's names.
//!
//! Every tensor of the network is found and has the shape that follows from the configuration. Every other tensor is kept if
//! it is optional, listed as dropped, or refused. Knows no file format.

use super::arch;
use super::experts;
use super::family::{Delta, Family};
use super::matrix::Found;
use super::model::{Bound, Tensor};
use super::roles::{
    DELTA_INPUT, DENSE_PREFIX, EMBED, HEAD, LAYER_PREFIX, LM_HEAD, MTP, MTP_PREFIX, MTP_TAIL, Need, ROUTER, Role, TAIL,
    layer_roles,
};
use crate::error::{Result, bail, error};
use crate::format::{Arch, LayerType, Mtp};
use std::collections::HashSet;

/// Names that a message lists before it counts the rest.
const LISTED: usize = 5;

/// Picks the tensors of `family` with the dimensions of `arch` out of `found`, in the order embedding, layers, final norm,
/// output projection, draft head. Sets in `arch` whether the embedding is tied and whether there is a draft head.
///
/// Errors: `Parse` for an impossible network or a wrong shape, `MissingTensor`, `UnsupportedModel` for a tensor that the
/// network does not use.
pub(super) fn bind(family: &Family, arch: &mut Arch, found: Found) -> Result<Bound> {
    if arch.mtp.is_none() {
        arch.mtp = unannounced_draft_head(&found);
    }
    arch.validate()?;
    let mut notes = Vec::new();
    let drafts = found.keys().any(|name| name.starts_with(MTP_PREFIX));
    if !drafts && arch.mtp.take().is_some() {
        notes.push("the configuration announces a draft head, and the source has no tensors of one".to_owned());
    }
    let routers = found.keys().filter_map(|name| name.strip_suffix(ROUTER));
    let mixtures = routers.filter(|_| arch.moe.is_some()).map(str::to_owned).collect();
    let mut binder = Binder {
        family,
        arch,
        mixtures,
        found,
        missing: Vec::new(),
        tensors: Vec::new(),
    };
    binder.network()?;
    let mut tensors = std::mem::take(&mut binder.tensors);
    if let Some(head) = &arch.mtp {
        binder.draft_head(head)?;
    }
    let draft_head = std::mem::take(&mut binder.tensors);
    let has_head = tensors.last().is_some_and(|tensor| tensor.name == LM_HEAD);
    if !arch.tie_word_embeddings && !has_head {
        binder.missing.push(LM_HEAD.to_owned());
    }
    let mut dropped = binder.finish()?;
    if arch.tie_word_embeddings && has_head {
        untie(arch, &mut tensors, &mut dropped, &mut notes)?;
    }
    tensors.extend(draft_head);
    dropped.sort();
    Ok(Bound {
        tensors,
        dropped,
        notes,
    })
}

struct Binder<'n> {
    family: &'n Family,
    arch: &'n Arch,
    found: Found,
    /// Prefixes of the layers that are mixtures of experts.
    mixtures: HashSet<String>,
    missing: Vec<String>,
    tensors: Vec<Tensor>,
}

impl Binder<'_> {
    /// Takes the tensors of the network without its draft head; the last is the output projection, if there is one.
    fn network(&mut self) -> Result<()> {
        self.take_all("", HEAD)?;
        for (layer, &kind) in self.arch.layer_types.iter().enumerate() {
            self.layer(&format!("{LAYER_PREFIX}{layer}."), kind)?;
        }
        self.take_all("", TAIL)
    }

    fn draft_head(&mut self, head: &Mtp) -> Result<()> {
        self.take_all(MTP_PREFIX, MTP)?;
        for layer in 0..head.num_layers {
            self.layer(&format!("{MTP_PREFIX}layers.{layer}."), LayerType::FullAttention)?;
        }
        self.take_all(MTP_PREFIX, MTP_TAIL)
    }

    fn layer(&mut self, prefix: &str, kind: LayerType) -> Result<()> {
        let is_mixture = self.mixtures.contains(prefix);
        let inputs = self.delta_inputs(prefix);
        let belongs = |role: &&Role| match role.need {
            Need::DeltaInputs(stored) => inputs == Some(stored),
            _ => !(is_mixture && role.name.starts_with(DENSE_PREFIX)),
        };
        for role in layer_roles(kind).filter(belongs) {
            self.take(prefix, role)?;
        }
        if is_mixture {
            for (prefix, role) in experts::roles(prefix, self.arch) {
                self.take(&prefix, role)?;
            }
        }
        Ok(())
    }

    /// How the projections to q, k, v and z of a layer are stored.
    fn delta_inputs(&self, prefix: &str) -> Option<Delta> {
        let split = self.found.contains_key(&format!("{prefix}{DELTA_INPUT}"));
        self.family.delta.map(|usual| if split { Delta::Split } else { usual })
    }

    fn take_all(&mut self, prefix: &str, roles: &[Role]) -> Result<()> {
        roles.iter().try_for_each(|role| self.take(prefix, role))
    }

    /// Moves a tensor to `tensors`, if the family has it.
    fn take(&mut self, prefix: &str, role: &Role) -> Result<()> {
        let Some(required) = role.need.of(self.family) else {
            return Ok(());
        };
        let name = format!("{prefix}{}", role.name);
        match self.found.remove(&name) {
            Some(data) => {
                let shape: Vec<u64> = role.shape.iter().map(|&dim| arch::length(self.arch, dim)).collect();
                data.readable()?;
                if data.shape != shape {
                    bail!(
                        Parse,
                        "tensor '{name}' has shape {:?}, the configuration says {shape:?}",
                        data.shape
                    );
                }
                self.tensors.push(Tensor { name, data });
            }
            None if required => self.missing.push(name),
            None => {}
        }
        Ok(())
    }

    /// The tensors that are left out, with the reason. Errors: `MissingTensor` and `UnsupportedModel` for tensors that are
    /// missing or unknown.
    fn finish(self) -> Result<Vec<String>> {
        let (dropped, unused) = sort_out(self.found.into_keys());
        if !self.missing.is_empty() {
            let missing = list(&self.missing);
            match unused.is_empty() {
                true => bail!(MissingTensor, "the source lacks {missing}"),
                false => bail!(MissingTensor, "the source lacks {missing}; not used: {}", list(&unused)),
            }
        }
        if !unused.is_empty() {
            bail!(
                UnsupportedModel,
                "a {} model does not use {}",
                self.family.model_type,
                list(&unused)
            );
        }
        Ok(dropped)
    }
}

/// A draft head that the source has although the configuration does not announce one, as in published Qwen3-Next models.
fn unannounced_draft_head(found: &Found) -> Option<Mtp> {
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

/// Splits the names of tensors that were not taken into known ones that are not needed, with the reason, and unknown ones.
fn sort_out(names: impl Iterator<Item = String>) -> (Vec<String>, Vec<String>) {
    let (mut dropped, mut unused) = (Vec::new(), Vec::new());
    for name in names {
        if name.ends_with("rotary_emb.inv_freq") {
            dropped.push(format!("{name}: follows from rope_theta"));
        } else if name.starts_with(MTP_PREFIX) || name.starts_with("mtp.") {
            dropped.push(format!("{name}: not part of a draft head that can be converted"));
        } else {
            unused.push(name);
        }
    }
    unused.sort();
    (dropped, unused)
}

/// The first few of `names`, and the number of the rest.
fn list(names: &[String]) -> String {
    let shown: Vec<String> = names.iter().take(LISTED).map(|name| format!("'{name}'")).collect();
    match names.len().saturating_sub(LISTED) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

/// Handles an output projection, the last of `tensors`, in a model whose configuration ties it to the embedding. An equal one is
/// dropped. A different one is kept, and the model becomes untied.
fn untie(arch: &mut Arch, tensors: &mut Vec<Tensor>, dropped: &mut Vec<String>, notes: &mut Vec<String>) -> Result<()> {
    let Some(head) = tensors.pop() else { return Ok(()) };
    let embed = tensors.iter().find(|tensor| tensor.name == EMBED);
    let embed = embed.ok_or_else(|| error!(MissingTensor, "the source lacks '{EMBED}'"))?;
    if embed.data.same(&head.data)? {
        dropped.push(format!("{LM_HEAD}: equal to the tied {EMBED}"));
    } else {
        arch.tie_word_embeddings = false;
        notes.push(format!(
            "the configuration ties {LM_HEAD} to {EMBED}, but they differ: both are kept, untied"
        ));
        tensors.push(head);
    }
    Ok(())
}

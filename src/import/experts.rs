//! Mixtures of experts: the tensors of a layer, and the separation of tensors that hold all experts.
//!
//! Knows the tables of families and the dimensions of the network, no file format.

use super::arch::shared_width;
use super::family::Family;
use super::matrix::Found;
use super::roles::{EXPERT, LAYER_PREFIX, MIXTURE, ROUTER, Role, SHARED_EXPERT};
use crate::error::{Result, bail};
use crate::format::Arch;

/// The tensors of a mixture with the prefixes of their names, in the order in which they are written. `layer` is the prefix of
/// the layer.
pub(super) fn roles(layer: &str, arch: &Arch) -> Vec<(String, &'static Role)> {
    let count = arch.moe.as_ref().map_or(0, |moe| moe.num_experts);
    let mut roles: Vec<_> = MIXTURE.iter().map(|role| (layer.to_owned(), role)).collect();
    for role in EXPERT {
        roles.extend((0..count).map(|expert| (format!("{layer}mlp.experts.{expert}."), role)));
    }
    if shared_width(arch).is_some() {
        roles.extend(SHARED_EXPERT.iter().map(|role| (layer.to_owned(), role)));
    }
    roles
}

/// Replaces tensors that hold all experts of a layer, `[experts, rows, cols]`, by one tensor per expert: `gate_up_proj`, with
/// the rows of the gate before those of the up projection, and `gate_proj`, `up_proj`, `down_proj`.
///
/// Errors: `Parse` for a shape that differs from the configuration.
pub(super) fn split_stacked(found: &mut Found, arch: &Arch) -> Result<()> {
    let Some(moe) = &arch.moe else { return Ok(()) };
    // Bounds the dimensions that are multiplied here.
    arch.validate()?;
    let (count, hidden, inter) = (moe.num_experts, arch.hidden_size, moe.moe_intermediate_size);
    for name in found.keys().cloned().collect::<Vec<_>>() {
        let Some((layer, part)) = name.split_once("mlp.experts.") else {
            continue;
        };
        let (parts, rows, cols): (&[&str], _, _) = match part.strip_suffix(".weight").unwrap_or(part) {
            "gate_up_proj" => (&["gate_proj", "up_proj"], inter, hidden),
            "gate_proj" => (&["gate_proj"], inter, hidden),
            "up_proj" => (&["up_proj"], inter, hidden),
            "down_proj" => (&["down_proj"], hidden, inter),
            _ => continue,
        };
        let Some(all) = found.remove(&name) else { continue };
        let wanted = [count as u64, (rows * parts.len()) as u64, cols as u64];
        if all.shape != wanted {
            bail!(
                Parse,
                "tensor '{name}' has shape {:?}, the configuration says {wanted:?}",
                all.shape
            );
        }
        let names = (0..count).flat_map(|expert| parts.iter().map(move |part| (expert, part)));
        for (index, (expert, part)) in names.enumerate() {
            let name = format!("{layer}mlp.experts.{expert}.{part}.weight");
            if found
                .insert(
                    name.clone(),
                    all.rows(index * rows, rows)
                        .map_err(|err| err.context(format!("tensor '{name}'")))?,
                )
                .is_some()
            {
                bail!(Parse, "tensor '{name}' occurs twice");
            }
        }
    }
    Ok(())
}

/// Compares the configuration with the tensors: `mixtures` says for each layer whether it is a mixture.
///
/// Errors: `MissingTensor` for a mixture without router, `UnsupportedModel` for a router in a layer that should be dense.
pub(super) fn check_layers(found: &Found, family: &Family, mixtures: &[bool]) -> Result<()> {
    for (layer, &mixture) in mixtures.iter().enumerate() {
        let name = format!("{LAYER_PREFIX}{layer}.{ROUTER}");
        match (mixture, found.contains_key(&name)) {
            (true, false) => bail!(MissingTensor, "the source lacks '{name}'"),
            (false, true) => bail!(
                UnsupportedModel,
                "layer {layer} of this {} model is dense by its configuration, but there is '{name}'",
                family.model_type
            ),
            _ => {}
        }
    }
    Ok(())
}

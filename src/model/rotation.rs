//! Which tensors of a network are rotated.

use super::network::{FeedForward, GateUp, Layer, Linear, Mixer, Model, Rotation};
use crate::error::{Result, bail};
use crate::source::{Arch, TensorId, Tensors};
use std::collections::{BTreeMap, HashSet};

/// The rotated tensors of `model`, whose other parts are bound; `None` if the header names none.
///
/// Errors: `MissingTensor` for names that the file does not have; `UnsupportedFeature` for matrices whose inputs cannot be
/// rotated, and for widths that are no whole blocks; `Parse` for widths without signs.
pub fn bind(arch: &Arch, tensors: &dyn Tensors, model: &Model) -> Result<Option<Rotation>> {
    let Some(named) = &arch.prism_hadamard else {
        return Ok(None);
    };
    let projections = projections(model);
    let mut rotation = Rotation {
        block: named.block(),
        signs: BTreeMap::new(),
        forward: HashSet::new(),
        inverse: !named.inverse.is_empty(),
    };
    for name in named.forward.iter().chain(&named.inverse) {
        let Some(id) = tensors.find(name) else {
            bail!(MissingTensor, "rotated tensor '{name}' is not in the file");
        };
        let is_table = id == model.embed && named.inverse.contains(name);
        if !projections.contains(&id) && !is_table {
            bail!(
                UnsupportedFeature,
                "tensor '{name}' is named as rotated, but its input cannot be rotated"
            );
        }
        let width = tensors.infos()[id].rows_cols().1;
        let signs = named
            .signs(width)
            .map_err(|err| err.context(format_args!("tensor '{name}'")))?;
        rotation.signs.insert(width, signs.into());
        if named.forward.contains(name) {
            rotation.forward.insert(id);
        }
    }
    if let Some(other) = named
        .inverse
        .iter()
        .find(|name| tensors.find(name) != Some(model.embed))
    {
        bail!(
            UnsupportedFeature,
            "the rows of tensor '{other}' are rotated, supported for the embedding only"
        );
    }
    if model.lm_head.weight == model.embed && rotation.forward.contains(&model.embed) != rotation.inverse {
        bail!(
            UnsupportedFeature,
            "the embedding is also the output projection, but is named as rotated for one of the two only"
        );
    }
    Ok(Some(rotation))
}

/// The projections whose inputs can be rotated: those of dense networks.
fn projections(model: &Model) -> HashSet<TensorId> {
    let of_layers = model.layers.iter().flat_map(of_layer);
    of_layers.chain([&model.lm_head]).map(|linear| linear.weight).collect()
}

fn of_layer(layer: &Layer) -> Vec<&Linear> {
    let mut all = Vec::new();
    match &layer.mixer {
        Mixer::Attention(attention) => {
            all.extend(&attention.projections);
            all.push(&attention.o);
        }
        Mixer::DeltaNet(net) => {
            all.extend(net.linears());
            all.push(&net.o);
        }
    }
    if let FeedForward::Dense(ffn) = &layer.ffn {
        match &ffn.gate_up {
            GateUp::Split(gate, up) => all.extend([gate, up]),
            GateUp::Fused(both) => all.push(both),
        }
        all.push(&ffn.down);
    }
    all
}

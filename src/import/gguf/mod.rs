//! A GGUF file as a source: its tensors under the container's names, its metadata as a header.
//!
//! `network` reads the hyperparameters, `import::tokenizer` rebuilds the tokenizer.

mod delta;
mod keys;
mod network;
mod parts;

use super::bind::bind;
use super::family::Family;
use super::matrix::{Found, Matrix};
use super::model::{Description, Model};
use super::roles::{
    EXPERT, GGUF_LAYER_PREFIX, HEAD, LAYER, LAYER_PREFIX, MIXTURE, MTP_PREFIX, Role, SHARED_EXPERT, TAIL, is_router,
};
use super::{experts, tokenizer};
use crate::dtype::Dtype;
use crate::error::{Result, bail};
use crate::format::gguf::{Metadata, Rotation};
use crate::format::hadamard::Hadamard;
use crate::format::{Arch, NormStyle};
use keys::Keys;
use parts::Parts;
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::path::Path;

/// Recommended sampler settings: their names in GGUF files and in generation configurations.
const SAMPLING: [(&str, &str); 5] = [
    ("temp", "temperature"),
    ("top_k", "top_k"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("penalty_repeat", "repetition_penalty"),
];

/// The gate projections of all experts of a layer, and the tensor with gate and up projections that some files have instead.
const EXPERT_GATES: &str = "ffn_gate_exps.weight";
const EXPERT_GATES_AND_UPS: &str = "ffn_gate_up_exps.weight";

/// An open model.
pub(super) struct Source(Parts);

impl Source {
    /// Opens and checks a file, and the other parts of a split model.
    pub fn open(path: &Path) -> Result<Source> {
        Parts::open(path).map(Source)
    }

    /// The model in the files.
    pub fn model(&self) -> Result<Model> {
        let metadata = self.0.metadata();
        let Some(name) = metadata.string("general.architecture")? else {
            bail!(UnsupportedModel, "metadata key 'general.architecture' is missing");
        };
        let keys = Keys {
            metadata,
            prefix: name,
            bytes: self.0.bytes(),
        };
        let windowed = keys
            .unsigned("attention.sliding_window")?
            .is_some_and(|window| window > 0);
        let Some(family) = Family::of_gguf(name, windowed) else {
            bail!(
                UnsupportedModel,
                "GGUF architecture '{name}' cannot be converted; known are {}",
                Family::gguf_names()
            );
        };
        keys.refuse_unknown(family, if family.delta.is_some() { &delta::KEYS } else { &[] })?;
        let mut notes = Vec::new();
        let mut arch = network::read(&self.0, &keys, family, &mut notes)?;
        let rotation = self.0.rotation()?;
        if let Some(rotation) = &rotation {
            arch.prism_hadamard = Some(renamed(rotation, family)?);
        } else if self.0.tensors().any(|(_, tensor)| is_ternary(tensor.dtype)) {
            notes.push("the ternary weights are used as they are: the file states no Hadamard rotation".to_owned());
        }
        let grouped = rotation.is_some_and(|rotation| rotation.grouped_values);
        let mut found = self.tensors(family, &arch, grouped)?;
        experts::split_stacked(&mut found, &arch)?;
        let mut bound = bind(family, &mut arch, found)?;
        bound.notes.extend(notes);
        let tokens = tokenizer::read(metadata, self.0.bytes())?;
        let mut provenance = Map::new();
        for key in ["general.name", "general.license"] {
            if let Some(value) = metadata.string(key)? {
                provenance.insert(key.replace("general.", "source_"), value.into());
            }
        }
        bound.notes.extend(tokens.notes);
        Description {
            format: "gguf",
            arch,
            tokenizer_config: tokens.config,
            sampling: sampling(metadata)?,
            provenance,
            vocab: tokens.vocab,
            files: self.0.files(),
        }
        .model(bound)
    }

    /// The tensors under the container's names. `grouped`: value heads are in grouped order along the columns of rotated
    /// matrices.
    fn tensors(&self, family: &Family, arch: &Arch, grouped: bool) -> Result<Found> {
        let mut found = Found::new();
        for (file, tensor) in self.0.tensors().filter(|(_, tensor)| !network::describes(&tensor.name)) {
            let named = container_name(family, &tensor.name);
            let named = named.filter(|_| !is_extra(&tensor.name, arch));
            let (name, role) = match named {
                Some((name, role)) => (name, Some(role)),
                // Blocks after the layers are a draft head, which is dropped.
                None if family.delta.is_some() && is_extra(&tensor.name, arch) => {
                    (format!("{MTP_PREFIX}{}", tensor.name), None)
                }
                // The binder refuses unknown names.
                None => (tensor.name.clone(), None),
            };
            let mut matrix = Matrix::in_file(tensor.shape.clone(), file, tensor.range.clone(), Ok(tensor.dtype))?;
            if family.gguf_interleaves_qk && role.is_some_and(|role| role.rotates) {
                matrix = matrix.interleaved(arch.head_dim)?;
            }
            // Some files store a matrix of one row as a vector.
            if role.is_some_and(|role| is_router(role.name)) {
                matrix = matrix.one_row();
            }
            // Stores w, not 1+w with the other norm style: f16 keeps more bits of a small w than of 1+w.
            if family.norm_style == NormStyle::Gemma && role.is_some_and(|role| of_norm_style(role.name)) {
                matrix = matrix.less(1.0);
            }
            if let Some(role) = role.filter(|_| family.delta.is_some()) {
                let rotated = arch
                    .prism_hadamard
                    .as_ref()
                    .is_some_and(|rotation| rotation.forward.contains(&name));
                matrix = delta::arrange(matrix, role, family, arch, grouped && rotated)
                    .map_err(|err| err.context(format!("tensor '{}'", tensor.name)))?;
            }
            if found.insert(name.clone(), matrix).is_some() {
                bail!(Parse, "tensor '{name}' occurs twice");
            }
        }
        Ok(found)
    }
}

/// Whether a type is one of those that were published for rotated weights.
fn is_ternary(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::PQ2_0 | Dtype::PTQ1_0)
}

/// The rotation with the container's names. Errors: `UnsupportedFeature` for a tensor that is no part of the network.
fn renamed(rotation: &Rotation, family: &Family) -> Result<Hadamard> {
    let rename = |names: &BTreeSet<String>| {
        let names = names.iter().map(|name| match container_name(family, name) {
            Some((name, _)) => Ok(name),
            None => bail!(UnsupportedFeature, "rotated tensor '{name}' is no part of the network"),
        });
        names.collect::<Result<BTreeSet<_>>>()
    };
    let mut renamed = rotation.hadamard.clone();
    renamed.forward = rename(&rotation.hadamard.forward)?;
    renamed.inverse = rename(&rotation.hadamard.inverse)?;
    Ok(renamed)
}

/// Whether a tensor belongs to a block after the layers.
fn is_extra(name: &str, arch: &Arch) -> bool {
    let block = name
        .strip_prefix(GGUF_LAYER_PREFIX)
        .and_then(|rest| rest.split_once('.'));
    let number = block.and_then(|(number, _)| number.parse::<usize>().ok());
    number.is_some_and(|number| number >= arch.num_layers)
}

/// Whether a norm has the family's style. The norm of a recurrence is plain in all families.
fn of_norm_style(name: &str) -> bool {
    name.ends_with("norm.weight") && name != "linear_attn.norm.weight"
}

/// The sampler's settings under the names of a generation configuration.
fn sampling(metadata: &Metadata) -> Result<Map<String, Value>> {
    let mut found = Map::new();
    for (key, name) in SAMPLING {
        if let Some(value) = metadata.number(&format!("general.sampling.{key}"))? {
            found.insert(name.to_owned(), value);
        }
    }
    Ok(found)
}

/// The container's name of a GGUF tensor, and its role; `None` for unknown names.
fn container_name(family: &Family, name: &str) -> Option<(String, &'static Role)> {
    let of = |roles: &'static [Role], name: &str| {
        let mut own = roles.iter().filter(|role| role.need.of(family).is_some());
        own.find(|role| role.gguf == name)
    };
    if let Some((layer, rest)) = name
        .strip_prefix(GGUF_LAYER_PREFIX)
        .and_then(|rest| rest.split_once('.'))
    {
        // Only the canonical spelling of a number, so that a tensor cannot have two names.
        let number = layer.parse::<u64>().ok().filter(|number| number.to_string() == layer)?;
        // All experts of the layer in one tensor, which is split later.
        if let Some(role) = of(EXPERT, rest) {
            return Some((format!("{LAYER_PREFIX}{number}.mlp.experts.{}", role.name), role));
        }
        // Gate and up projections in one tensor, one after the other for each expert.
        if let Some(role) = of(EXPERT, EXPERT_GATES).filter(|_| rest == EXPERT_GATES_AND_UPS) {
            return Some((format!("{LAYER_PREFIX}{number}.mlp.experts.gate_up_proj.weight"), role));
        }
        let role = of(LAYER, rest)
            .or_else(|| of(MIXTURE, rest))
            .or_else(|| of(SHARED_EXPERT, rest))?;
        return Some((format!("{LAYER_PREFIX}{number}.{}", role.name), role));
    }
    let role = of(HEAD, name).or_else(|| of(TAIL, name))?;
    Some((role.name.to_owned(), role))
}

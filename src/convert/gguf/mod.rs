//! A GGUF file: its keys to the header, its tensor names to the container's.
//!
//! Knows the imported families' names of tensors; `network` knows their keys. The tokenizer is rebuilt next door.

mod delta;
mod keys;
mod network;
mod parts;

use super::bind::{Found, bind};
use super::family::{
    EXPERT, Family, GGUF_LAYER_PREFIX, HEAD, LAYER, LAYER_PREFIX, MIXTURE, MTP_PREFIX, Role, SHARED_EXPERT, TAIL,
};
use super::{Encoding, Import, Matrix, Model, experts, tokenizer};
use crate::container::gguf::Metadata;
use crate::container::{Arch, NormStyle};
use crate::error::{Result, bail};
use keys::Keys;
use parts::Parts;
use serde_json::{Map, Value};
use std::path::Path;

/// Recommended settings of the sampler, and what they are called elsewhere.
const SAMPLING: [(&str, &str); 5] = [
    ("temp", "temperature"),
    ("top_k", "top_k"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("penalty_repeat", "repetition_penalty"),
];

/// All gate projections of a layer's experts, and what some files have instead.
const EXPERT_GATES: &str = "ffn_gate_exps.weight";
const EXPERT_GATES_AND_UPS: &str = "ffn_gate_up_exps.weight";

/// An open model.
pub(super) struct Source(Parts);

impl Source {
    /// Opens and checks a file, and the other parts if it is one of several.
    pub fn open(path: &Path) -> Result<Source> {
        Parts::open(path).map(Source)
    }

    /// The files.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.0.files()
    }

    /// Reads what the files describe.
    pub fn model(&self) -> Result<Model<'_>> {
        let metadata = self.0.metadata();
        let Some(name) = metadata.string("general.architecture")? else {
            bail!(UnsupportedModel, "metadata key 'general.architecture' is missing");
        };
        let keys = Keys { metadata, prefix: name };
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
        let mut found = self.tensors(family, &arch)?;
        delta::join(&mut found, family, &arch)?;
        experts::take_apart(&mut found, &arch)?;
        let mut bound = bind(family, &mut arch, found)?;
        bound.notes.extend(notes);
        let tokens = tokenizer::read(metadata, self.0.bytes())?;
        let mut provenance = Map::new();
        provenance.insert("source_format".into(), "gguf".into());
        for key in ["general.name", "general.license"] {
            if let Some(value) = metadata.string(key)? {
                provenance.insert(key.replace("general.", "source_"), value.into());
            }
        }
        let sampling = sampling(metadata)?;
        if !sampling.is_empty() {
            provenance.insert("generation_config".into(), sampling.into());
        }
        bound.notes.extend(tokens.notes);
        Import {
            arch,
            tokenizer_config: tokens.config,
            provenance,
            vocab: tokens.vocab,
            bound,
        }
        .model()
    }

    /// The tensors under the container's names.
    fn tensors(&self, family: &Family, arch: &Arch) -> Result<Found<'_>> {
        let mut found = Found::new();
        for (file, tensor) in self.0.tensors().filter(|(_, tensor)| !network::describes(&tensor.name)) {
            let named = container_name(family, &tensor.name);
            let named = named.filter(|_| !is_extra(&tensor.name, arch));
            let (name, role) = match named {
                Some((name, role)) => (name, Some(role)),
                // Blocks behind the layers are a multi-token head, and are dropped as such.
                None if family.delta.is_some() && is_extra(&tensor.name, arch) => {
                    (format!("{MTP_PREFIX}{}", tensor.name), None)
                }
                // Left for the binder to refuse by the name it has.
                None => (tensor.name.clone(), None),
            };
            let encoding = Ok(Encoding::Blocks(tensor.kind));
            let mut matrix = Matrix::in_file(tensor.shape.clone(), file, tensor.range.clone(), encoding)?;
            if family.gguf_interleaves_qk && role.is_some_and(|role| role.rotates) {
                matrix = matrix.interleaved(arch.head_dim)?;
            }
            // Some files have the one row as a vector.
            if role.is_some_and(|role| experts::routes(role.name)) {
                matrix = matrix.one_row();
            }
            // 1+w becomes w again, not a norm of the other style: f16 has room for every bit of a small w, not of 1+w.
            if family.norm_style == NormStyle::Gemma && role.is_some_and(|role| of_norm_style(role.name)) {
                matrix = matrix.less(1.0);
            }
            if let Some(role) = role.filter(|_| family.delta.is_some()) {
                matrix = delta::arrange(matrix, role, family, arch)
                    .map_err(|err| err.context(format!("tensor '{}'", tensor.name)))?;
            }
            if found.insert(name.clone(), matrix).is_some() {
                bail!(Parse, "tensor '{name}' occurs twice");
            }
        }
        Ok(found)
    }
}

/// Whether a tensor belongs to a block behind the layers.
fn is_extra(name: &str, arch: &Arch) -> bool {
    let block = name
        .strip_prefix(GGUF_LAYER_PREFIX)
        .and_then(|rest| rest.split_once('.'));
    let number = block.and_then(|(number, _)| number.parse::<usize>().ok());
    number.is_some_and(|number| number >= arch.num_layers)
}

/// Whether a norm is of the family's style: that of a recurrence is plain in all of them.
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

/// The container's name of a GGUF tensor, and what it is; `None` for names that no family has.
fn container_name(family: &Family, name: &str) -> Option<(String, &'static Role)> {
    let of = |roles: &'static [Role], name: &str| {
        let mut own = roles.iter().filter(|role| role.need.of(family).is_some());
        own.find(|role| role.gguf == name)
    };
    if let Some((layer, rest)) = name
        .strip_prefix(GGUF_LAYER_PREFIX)
        .and_then(|rest| rest.split_once('.'))
    {
        // Only the spelling that a number has: two names of one tensor would hide a duplicate.
        let number = layer.parse::<u64>().ok().filter(|number| number.to_string() == layer)?;
        // The layer's experts in one tensor; they are taken apart later.
        if let Some(role) = of(EXPERT, rest) {
            return Some((format!("{LAYER_PREFIX}{number}.mlp.experts.{}", role.name), role));
        }
        // Gate and up projections together, those of an expert one below the other.
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

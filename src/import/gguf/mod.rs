//! A GGUF file as a source: its tensors under the container's names, its metadata as a header.
//!
//! `network` reads the hyperparameters, `import::tokenizer` rebuilds the tokenizer.

mod delta;
mod keys;
mod names;
mod network;
mod parts;

#[cfg(feature = "tools")]
pub use names::{Place, architecture, place};

use super::bind::bind;
use super::family::Family;
use super::matrix::{Found, Matrix};
use super::model::{Description, Model};
use super::roles::{GGUF_LAYER_PREFIX, MTP_PREFIX, is_router};
use super::{experts, tokenizer};
use crate::dtype::Dtype;
use crate::error::{Result, bail};
use crate::format::Arch;
use crate::format::gguf::{Metadata, Rotation};
use crate::format::hadamard::Hadamard;
use keys::Keys;
use names::container_name;
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
        let of_blocks = format!("{MTP_PREFIX}{GGUF_LAYER_PREFIX}");
        let left_out = bound.dropped.iter().filter(|name| name.starts_with(&of_blocks)).count();
        if left_out > 0 {
            bound.notes.push(format!(
                "{left_out} tensors of blocks after the layers are left out: they are no draft head that can be used"
            ));
        }
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
        let has_head =
            family.delta.is_some() && names::has_draft_head(arch.num_layers, |name| self.0.find(name).is_some());
        for (file, tensor) in self.0.tensors().filter(|(_, tensor)| !network::describes(&tensor.name)) {
            let is_extra = names::block(&tensor.name).is_some_and(|number| number >= arch.num_layers);
            let named = match is_extra {
                true if has_head => names::draft_head_name(family, &tensor.name, arch.num_layers),
                true => None,
                false => container_name(family, &tensor.name),
            };
            let (name, role) = match named {
                Some((name, role)) => (name, Some(role)),
                // Other blocks after the layers are dropped.
                None if family.delta.is_some() && is_extra => (format!("{MTP_PREFIX}{}", tensor.name), None),
                // The binder refuses unknown names.
                None => (tensor.name.clone(), None),
            };
            let mut matrix = Matrix::in_file(tensor.shape.clone(), file, tensor.range.clone(), Ok(tensor.dtype))?;
            // Some files store a matrix of one row as a vector.
            if role.is_some_and(|role| is_router(role.name)) {
                matrix = matrix.one_row();
            }
            if let Some(role) = role {
                if names::lacks_middle(role) && matrix.shape.len() == 2 {
                    matrix.shape.insert(1, 1);
                }
                let rotated = arch
                    .prism_hadamard
                    .as_ref()
                    .is_some_and(|rotation| rotation.forward.contains(&name));
                let form = names::form(role, family, arch, grouped && rotated);
                matrix = matrix
                    .in_form(form)
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

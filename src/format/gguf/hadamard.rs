//! The metadata of rotated weights: the keys `prism.hadamard.*`.

use super::{Gguf, Metadata, Tensor};
use crate::error::{Error, Kind, Result, bail};
use crate::format::hadamard::{AXIS, Hadamard, TRANSFORM};
use std::collections::BTreeSet;

const PREFIX: &str = "prism.hadamard.";
/// The embedding: the only matrix whose rows may be rotated.
const EMBEDDING: &str = "token_embd.weight";
/// The key that names it.
const INVERSE: &str = "inverse_weight_names";
/// The most names in a list: each is looked up in the list of tensors.
const MOST_NAMES: usize = 1 << 13;
/// Projections whose inputs the runtime can rotate: `output`, or one of these in a layer.
const PROJECTIONS: [&str; 10] = [
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_qkv",
    "attn_gate",
    "attn_output",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
    "ssm_out",
];
const KEYS: [&str; 11] = [
    "version",
    "block_size",
    "transform",
    "axis",
    "sign_mode",
    "sign_widths",
    "sign_values",
    "weight_names",
    INVERSE,
    "gdn_v_grouped",
    "tied_output",
];

/// What a file says of its rotated weights. Names are those of the file.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotation {
    /// Blocks, signs, names.
    pub hadamard: Hadamard,
    /// Whether the columns of rotated `ssm_out` matrices are in the container's order, in which the value heads of a key head
    /// are neighbours; otherwise they have tiled heads, as all other tensors do. Columns cannot move after the rotation.
    pub grouped_values: bool,
}

impl Gguf {
    /// The rotation of the weights in the file `bytes`; `None` if the file has no key of it. Errors: as [`Rotation::read`].
    pub fn rotation(&self, bytes: &[u8]) -> Result<Option<Rotation>> {
        Rotation::read(&self.metadata, bytes, &|name| self.find(name))
    }
}

/// The keys, and the tensors that they name.
struct Keys<'a> {
    metadata: &'a Metadata,
    /// The file with the metadata.
    bytes: &'a [u8],
    find: &'a dyn Fn(&str) -> Option<&'a Tensor>,
}

impl Rotation {
    /// The rotation that `metadata`, which is in the file `bytes`, states; `None` if there is no key of it. `find`: the tensor
    /// of a name, in any part of the model.
    ///
    /// Errors: `UnsupportedFeature` for a rotation that is not defined or incomplete, `MissingTensor` for names that the
    /// file does not have, `Parse` for signs that do not fit.
    pub fn read<'a>(
        metadata: &'a Metadata,
        bytes: &'a [u8],
        find: &'a dyn Fn(&str) -> Option<&'a Tensor>,
    ) -> Result<Option<Rotation>> {
        let mut present = metadata.keys().filter_map(|key| key.strip_prefix(PREFIX)).peekable();
        if present.peek().is_none() {
            return Ok(None);
        }
        if let Some(unknown) = present.find(|key| !KEYS.contains(key)) {
            bail!(UnsupportedFeature, "metadata key '{PREFIX}{unknown}' is unknown");
        }
        let keys = Keys { metadata, bytes, find };
        let version = required(metadata.uint32(&key("version"))?, "version")?;
        let tied = metadata.bool(&key("tied_output"))?.unwrap_or(false);
        if !matches!(version, 1 | 2) || (version == 2) != tied {
            bail!(
                UnsupportedFeature,
                "'{PREFIX}version' {version} with a {} output, supported: 1 untied and 2 tied",
                if tied { "tied" } else { "untied" }
            );
        }
        expect(metadata, "transform", &[TRANSFORM])?;
        expect(metadata, "axis", &[AXIS])?;
        let mut hadamard = blocks_and_signs(metadata, bytes)?;
        hadamard.forward = keys.names("weight_names")?;
        hadamard.inverse = keys.names(INVERSE)?;
        keys.check(&hadamard, tied)?;
        let grouped_values = metadata.bool(&key("gdn_v_grouped"))?.unwrap_or(false);
        Ok(Some(Rotation {
            hadamard,
            grouped_values,
        }))
    }
}

impl Keys<'_> {
    /// The names under a key. Errors: `Parse` for a key that is no list of strings; `UnsupportedFeature` for a name that occurs
    /// twice, and for rotated rows of another tensor; `MissingTensor`.
    fn names(&self, name: &str) -> Result<BTreeSet<String>> {
        let mut names = BTreeSet::new();
        let listed = self.metadata.strings(&key(name), self.bytes)?.unwrap_or_default();
        if listed.len() > MOST_NAMES {
            bail!(
                UnsupportedFeature,
                "'{PREFIX}{name}' has {} names, expected at most {MOST_NAMES}",
                listed.len()
            );
        }
        for tensor in listed {
            if name == INVERSE && tensor != EMBEDDING {
                bail!(
                    UnsupportedFeature,
                    "rotated rows of tensor '{tensor}', supported: {EMBEDDING}"
                );
            }
            if (self.find)(tensor).is_none() {
                bail!(
                    MissingTensor,
                    "'{PREFIX}{name}' names tensor '{tensor}', which is not in the file"
                );
            }
            if !names.insert(tensor.to_owned()) {
                bail!(UnsupportedFeature, "'{PREFIX}{name}' names tensor '{tensor}' twice");
            }
        }
        Ok(names)
    }

    fn check(&self, hadamard: &Hadamard, tied: bool) -> Result<()> {
        if hadamard.forward.is_empty() {
            bail!(UnsupportedFeature, "'{PREFIX}weight_names' is missing or empty");
        }
        let has_output = (self.find)("output.weight").is_some();
        if tied && (has_output || hadamard.inverse.is_empty() || !hadamard.forward.contains(EMBEDDING)) {
            bail!(
                UnsupportedFeature,
                "a tied rotated output needs {EMBEDDING} in '{PREFIX}weight_names' and in '{PREFIX}{INVERSE}', and no output.weight"
            );
        }
        if !tied && !has_output && !hadamard.inverse.is_empty() {
            bail!(
                UnsupportedFeature,
                "a rotated {EMBEDDING} of version 1 needs an output.weight"
            );
        }
        for name in hadamard.forward.iter().chain(&hadamard.inverse) {
            let is_embedding = name == EMBEDDING && (tied || hadamard.inverse.contains(name));
            if !is_embedding && !is_projection(name) {
                bail!(
                    UnsupportedFeature,
                    "'{PREFIX}weight_names' names '{name}', whose input cannot be rotated"
                );
            }
            let width = (self.find)(name)
                .and_then(|tensor| tensor.shape.last().copied())
                .unwrap_or(0);
            hadamard
                .signs(width as usize)
                .map_err(|err| err.context(format_args!("tensor '{name}'")))?;
        }
        Ok(())
    }
}

/// Whether a matrix of this name multiplies an input that can be rotated.
fn is_projection(name: &str) -> bool {
    let Some(stem) = name.strip_suffix(".weight") else {
        return false;
    };
    let in_layer = stem.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    match in_layer {
        None => stem == "output",
        Some((layer, role)) => {
            layer.parse::<u64>().is_ok_and(|number| number.to_string() == layer) && PROJECTIONS.contains(&role)
        }
    }
}

fn blocks_and_signs(metadata: &Metadata, bytes: &[u8]) -> Result<Hadamard> {
    let block = required(metadata.uint32(&key("block_size"))?, "block_size")?;
    let mode = expect(metadata, "sign_mode", &["explicit", "identity"])?;
    let widths = metadata.integers(&key("sign_widths"), bytes)?.unwrap_or_default();
    let values = metadata.integers(&key("sign_values"), bytes)?.unwrap_or_default();
    if mode == "identity" {
        if !widths.is_empty() || !values.is_empty() {
            bail!(
                UnsupportedFeature,
                "'{PREFIX}sign_mode' is 'identity', but there are signs"
            );
        }
        return Hadamard::new(block.into(), None);
    }
    let values: Vec<f32> = values.into_iter().map(|value| value as f32).collect();
    Hadamard::new(block.into(), Some((&widths, &values)))
}

fn key(name: &str) -> String {
    format!("{PREFIX}{name}")
}

fn required<T>(value: Option<T>, name: &str) -> Result<T> {
    value.ok_or_else(|| {
        Error::new(
            Kind::UnsupportedFeature,
            format!("metadata key '{PREFIX}{name}' is missing"),
        )
    })
}

/// The text of a key, which must be one of these. Errors: `UnsupportedFeature`.
fn expect<'a>(metadata: &'a Metadata, name: &str, supported: &[&str]) -> Result<&'a str> {
    let found = required(metadata.string(&key(name))?, name)?;
    if !supported.contains(&found) {
        bail!(
            UnsupportedFeature,
            "'{PREFIX}{name}' is '{found}', supported: {}",
            supported.join(", ")
        );
    }
    Ok(found)
}

//! The rotation of ternary weights: signs are objects, the block size is in the configuration.

use super::names::{SIGNS, WIDTHS};
use super::objects::Objects;
use crate::dtype::Dtype;
use crate::error::{Error, Result, bail, error};
use crate::format::hadamard::{AXIS, Hadamard, TRANSFORM};
use crate::format::ninfer::Format;
use crate::import::hf::keys::{Keys, brief};
use crate::import::model::Tensor;
use crate::import::roles::EMBED;
use serde_json::{Map, Value, json};

/// The member of the configuration with the rotation.
pub(super) const MEMBER: &str = "prism_hadamard";
/// Its members. The last two name the objects with signs and widths.
const MEMBERS: [&str; 10] = [
    "version",
    "block_size",
    "transform",
    "axis",
    "sign_mode",
    "sign_widths",
    "gdn_v_grouped",
    "tied_output",
    "signs",
    "widths",
];

/// The member, of the networks that files need not describe.
pub(super) fn of_known() -> Value {
    json!({"version": 1, "block_size": 1024, "transform": TRANSFORM, "axis": AXIS, "sign_mode": "explicit"})
}

/// Blocks and signs; the names are not known yet. `None`: the file has none.
///
/// Errors: `UnsupportedFeature` for a rotation that is not defined, `Parse` for signs and widths that do not fit,
/// `MissingTensor` if there is only one of their objects.
pub(super) fn read(objects: &Objects, config: &Map<String, Value>) -> Result<Option<Hadamard>> {
    let root = Keys::new(config, "config.json");
    let keys = match root.object("text_config")? {
        Some(inner) => Keys {
            map: inner,
            outer: Some(config),
            ..root
        },
        None => root,
    };
    let signs = objects.words(SIGNS, Format::Fp32, f32::from_le_bytes)?;
    let widths = objects.words(WIDTHS, Format::I32, |word| i64::from(i32::from_le_bytes(word)))?;
    let signs = match (widths, signs) {
        (Some(widths), Some(signs)) => Some((widths, signs)),
        (None, None) => None,
        (Some(_), None) => bail!(MissingTensor, "there is '{WIDTHS}' without '{SIGNS}'"),
        (None, Some(_)) => bail!(MissingTensor, "there is '{SIGNS}' without '{WIDTHS}'"),
    };
    let Some(stated) = keys.object(MEMBER)? else {
        if signs.is_some() {
            bail!(
                UnsupportedFeature,
                "there is '{SIGNS}', and config.json has no key '{MEMBER}' with the block size"
            );
        }
        return Ok(None);
    };
    let stated = Keys::new(stated, MEMBER);
    let tied = keys.bool("tie_word_embeddings")?.unwrap_or(false);
    check(&stated, tied)?;
    let block = required(stated.unsigned("block_size")?, "block_size")?;
    let identity = expect(&stated, "sign_mode", &["explicit", "identity"])? == "identity";
    match (&signs, identity) {
        (Some(_), true) => bail!(
            UnsupportedFeature,
            "'{MEMBER}.sign_mode' is 'identity', but there is '{SIGNS}'"
        ),
        // Without signs, nothing may be rotated.
        (None, false) => return Ok(None),
        _ => {}
    }
    let signs = signs
        .as_ref()
        .map(|(widths, signs)| (widths.as_slice(), signs.as_slice()));
    let named = stated.typed("sign_widths", "a list of integers", |value| {
        value.as_array()?.iter().map(Value::as_i64).collect::<Option<Vec<_>>>()
    })?;
    let widths = signs.map_or(&[][..], |(widths, _)| widths);
    if let Some(named) = named.filter(|named| named != widths) {
        bail!(
            Parse,
            "'{MEMBER}.sign_widths' is {named:?}, and '{WIDTHS}' has {widths:?}"
        );
    }
    Hadamard::new(block, signs).map(Some)
}

/// Errors: `UnsupportedFeature` for a rotation that is not defined.
fn check(stated: &Keys, tied: bool) -> Result<()> {
    if let Some(unknown) = stated.map.keys().find(|key| !MEMBERS.contains(&key.as_str())) {
        bail!(UnsupportedFeature, "config key '{MEMBER}.{unknown}' is unknown");
    }
    let version = required(stated.unsigned("version")?, "version")?;
    if version != 1 && !(version == 2 && tied) {
        bail!(
            UnsupportedFeature,
            "'{MEMBER}.version' {version} with a {} output, supported: 1, and 2 if it is tied",
            if tied { "tied" } else { "separate" }
        );
    }
    expect(stated, "transform", &[TRANSFORM])?;
    expect(stated, "axis", &[AXIS])?;
    if stated.bool("gdn_v_grouped")? == Some(false) {
        bail!(
            UnsupportedFeature,
            "'{MEMBER}.gdn_v_grouped' is false, value heads of these files are grouped"
        );
    }
    for (key, object) in [("signs", SIGNS), ("widths", WIDTHS)] {
        if stated.get(key).is_some() {
            expect(stated, key, &[object])?;
        }
    }
    Ok(())
}

fn required<T>(value: Option<T>, key: &str) -> Result<T> {
    value.ok_or_else(|| error!(UnsupportedFeature, "config key '{MEMBER}.{key}' is missing"))
}

/// The text of a key, which must be one of these. Errors: `UnsupportedFeature`.
fn expect<'a>(stated: &Keys<'a>, key: &str, supported: &[&str]) -> Result<&'a str> {
    let value = required(stated.get(key), key)?;
    match value.as_str().filter(|text| supported.contains(text)) {
        Some(text) => Ok(text),
        None => bail!(
            UnsupportedFeature,
            "'{MEMBER}.{key}' is {}, supported: {}",
            brief(value),
            supported.join(", ")
        ),
    }
}

/// The rotation of the ternary ones of `tensors`: rows of the embedding, inputs of all others. A `tied` embedding is both.
/// `None` if none is ternary.
///
/// Errors: `MissingTensor` for ternary weights without signs; `Parse` for a width without signs, `UnsupportedFeature` for one
/// of no whole blocks.
pub(super) fn of_tensors(hadamard: Option<Hadamard>, tensors: &[Tensor], tied: bool) -> Result<Option<Hadamard>> {
    let is_ternary = |tensor: &&Tensor| matches!(tensor.data.dtype(), Ok(Dtype::PQ2_0 | Dtype::PTQ1_0));
    let mut ternary = tensors.iter().filter(is_ternary).peekable();
    let Some(first) = ternary.peek() else { return Ok(None) };
    let missing = || {
        error!(
            MissingTensor,
            "tensor '{}' is ternary, and there is no '{SIGNS}'", first.name
        )
    };
    let mut hadamard = hadamard.ok_or_else(missing)?;
    for tensor in ternary {
        let name = &tensor.name;
        let named = |err: Error| err.context(format_args!("tensor '{name}'"));
        hadamard.signs(tensor.data.rows_cols().1).map_err(named)?;
        if name == EMBED {
            hadamard.inverse.insert(name.clone());
        }
        if name != EMBED || tied {
            hadamard.forward.insert(name.clone());
        }
    }
    Ok(Some(hadamard))
}

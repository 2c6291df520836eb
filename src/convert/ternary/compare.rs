//! The comparison of a written file with its source.

use super::values::{self, is_ternary};
use crate::error::{Error, Result, bail};
use crate::format::Arch;
use crate::import::{Model, Tensor};
use serde_json::{Map, Value};
use std::collections::{BTreeSet, HashMap};

/// Checks that `written`, a file in the format called `format`, holds the model of `source`. Returns remarks for the user.
///
/// Errors: `UnsupportedModel` with the member of the description that the file does not have; `NonFinite` for a
/// vector that is not finite; `Internal` for other weights.
pub(super) fn all_kept(source: &Model, written: &Model, format: &str) -> Result<Vec<String>> {
    same_network(&source.arch, &written.arch, format)?;
    let mut notes = same_tokens(&source.tokenizer_config, &written.tokenizer_config, format)?;
    let by_name: HashMap<&str, &Tensor> = written
        .tensors
        .iter()
        .map(|tensor| (tensor.name.as_str(), tensor))
        .collect();
    if by_name.len() != source.tensors.len() {
        bail!(
            Internal,
            "{} tensors were written, expected {}",
            by_name.len(),
            source.tensors.len()
        );
    }
    for tensor in &source.tensors {
        let named = |err: Error| err.context(format_args!("tensor '{}'", tensor.name));
        let Some(other) = by_name.get(tensor.name.as_str()) else {
            bail!(Internal, "tensor '{}' was not written", tensor.name);
        };
        let is_vector = tensor.data.shape.len() == 1;
        if is_vector {
            finite(tensor).map_err(named)?;
        }
        if same_weights(tensor, other).map_err(named)? {
            continue;
        }
        if !is_vector {
            bail!(Internal, "tensor '{}' was written with other weights", tensor.name);
        }
        // The network computes with 1 + w or exp(a) in f32, which is what one of the formats holds.
        notes.push(format!(
            "tensor '{}' has its values to within a rounding to f32: {format} files hold a function of them",
            tensor.name
        ));
        close(tensor, other).map_err(named)?;
    }
    Ok(notes)
}

/// Errors: `UnsupportedModel` with the first member that differs.
fn same_network(source: &Arch, written: &Arch, format: &str) -> Result<()> {
    let members = |arch: &Arch| match arch.to_json()? {
        Value::Object(members) => Ok(members),
        _ => Ok(Map::new()),
    };
    let (source, written) = (members(source)?, members(written)?);
    let keys: BTreeSet<&String> = source.keys().chain(written.keys()).collect();
    match keys.into_iter().find(|key| source.get(*key) != written.get(*key)) {
        None => Ok(()),
        Some(key) => {
            let shown = |members: &Map<String, Value>| match members.get(key) {
                Some(value) => value.to_string().chars().take(60).collect(),
                None => "nothing".to_owned(),
            };
            bail!(
                UnsupportedModel,
                "the network's '{key}' is {}, and a {format} file would say {}",
                shown(&source),
                shown(&written)
            )
        }
    }
}

/// Errors: `Tokenizer` for a template or a token that was lost.
fn same_tokens(source: &Map<String, Value>, written: &Map<String, Value>, format: &str) -> Result<Vec<String>> {
    for key in ["chat_template", "bos_token_id", "pad_token_id"] {
        if source.get(key) != written.get(key) {
            bail!(
                Tokenizer,
                "a {format} file would lose '{key}' of the tokenizer's settings"
            );
        }
    }
    let stops = |config: &Map<String, Value>| {
        let ids = config.get("eos_token_ids").and_then(Value::as_array);
        let ids = ids.into_iter().flatten().filter_map(Value::as_u64);
        ids.collect::<BTreeSet<_>>()
    };
    let (source, written) = (stops(source), stops(written));
    if let Some(id) = source.difference(&written).next() {
        bail!(Tokenizer, "a {format} file would not end answers at token {id}");
    }
    let more = written.difference(&source);
    Ok(more
        .map(|id| format!("answers of the written file also end at token {id}"))
        .collect())
}

fn same_weights(source: &Tensor, written: &Tensor) -> Result<bool> {
    match is_ternary(source) {
        true => Ok(source.data.dtype()? == written.data.dtype()?
            && source.data.shape == written.data.shape
            && source.data.ordered_bytes()? == written.data.ordered_bytes()?),
        false => source.data.same(&written.data),
    }
}

/// Errors: `NonFinite`.
fn finite(tensor: &Tensor) -> Result<()> {
    match values::read_all(tensor)?.iter().find(|value| !value.is_finite()) {
        None => Ok(()),
        Some(value) => bail!(NonFinite, "expected finite values, found {value}"),
    }
}

/// Errors: `Internal` if values of a vector differ by more than a rounding of numbers of about 1.
fn close(source: &Tensor, written: &Tensor) -> Result<()> {
    let (wanted, found) = (values::read_all(source)?, values::read_all(written)?);
    let near = |a: f32, b: f32| (a - b).abs() <= f32::EPSILON * a.abs().max(1.0);
    match wanted.iter().zip(&found).find(|&(a, b)| !near(*a, *b)) {
        None => Ok(()),
        Some((wanted, found)) => bail!(Internal, "{wanted} was written as {found}"),
    }
}

//! A source as the converter sees it: a header, and tensors that can be read row by row.

use crate::error::{Error, Kind, Result, bail};
use crate::format::Arch;
use crate::format::cmf::CmfContainer;
use crate::import::{self, StackedProjections, Tensor};
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

/// A source.
pub(super) struct Model {
    pub header: Map<String, Value>,
    /// `tokenizer.json`.
    pub vocab: Option<Vec<u8>>,
    /// The container that the tensors come from, whose masks are copied.
    pub container: Option<Arc<CmfContainer>>,
    pub tensors: Vec<Tensor>,
    /// Tensors that the network does not use, each with the reason.
    pub dropped: Vec<String>,
    /// Remarks for the user.
    pub notes: Vec<String>,
    /// The files that are read.
    pub files: Vec<PathBuf>,
}

impl Model {
    /// A model that was trained elsewhere, with its header. Errors: those of joining tensors that the container has as one.
    pub fn imported(model: import::Model) -> Result<Model> {
        let (model, tensors) = Model::joined(model)?;
        let arch = serde_json::to_value(&model.arch).map_err(|err| {
            Error::new(
                Kind::Parse,
                format!("the network's description is not valid JSON: {err}"),
            )
        })?;
        if let Some(vocab) = &model.vocab {
            // Readers of the container load it later; an error here can still name the source.
            crate::text::Tokenizer::from_json(vocab).map_err(|err| err.context("the source's tokenizer"))?;
        }
        let header = [
            ("arch", arch),
            ("provenance", model.provenance.into()),
            ("tokenizer_config", model.tokenizer_config.into()),
        ];
        Ok(Model {
            header: header.into_iter().map(|(key, value)| (key.to_owned(), value)).collect(),
            vocab: model.vocab,
            container: None,
            tensors,
            dropped: model.dropped,
            notes: model.notes,
            files: model.files,
        })
    }

    /// A model that was trained elsewhere, and its tensors as a container has them. Errors: those of joining them.
    pub fn joined(mut model: import::Model) -> Result<(import::Model, Vec<Tensor>)> {
        let tensors = join_delta_inputs(std::mem::take(&mut model.tensors), &model.arch)?;
        Ok((model, tensors))
    }
}

/// Joins the projections to q, k, v and z of layers whose gates are fused: the container has them as one tensor. Files may have
/// two, q, k and v of all heads, and z of all heads.
///
/// Errors: `UnsupportedModel` for tensors that do not have the heads of `arch`.
fn join_delta_inputs(tensors: Vec<Tensor>, arch: &Arch) -> Result<Vec<Tensor>> {
    const PARTS: [&str; 3] = ["in_proj_qkv.weight", "in_proj_z.weight", "in_proj_ba.weight"];
    let names: HashMap<&str, usize> = tensors.iter().enumerate().map(|(i, t)| (t.name.as_str(), i)).collect();
    let of_layer = |name: &str| {
        let layer = name.strip_suffix(PARTS[0])?;
        let beside = |part: &str| names.get(format!("{layer}{part}").as_str()).copied();
        beside(PARTS[2])?;
        beside(PARTS[1])
    };
    let partners: Vec<Option<usize>> = tensors.iter().map(|tensor| of_layer(&tensor.name)).collect();
    let mut left: Vec<Option<Tensor>> = tensors.into_iter().map(Some).collect();
    let mut joined = Vec::with_capacity(left.len());
    for (index, partner) in partners.into_iter().enumerate() {
        let lower = partner.and_then(|partner| left.get_mut(partner)?.take());
        match (left[index].take(), lower) {
            (Some(upper), Some(lower)) => joined.push(stacked(upper, lower, arch)?),
            (tensor, _) => joined.extend(tensor),
        }
    }
    Ok(joined)
}

fn stacked(upper: Tensor, lower: Tensor, arch: &Arch) -> Result<Tensor> {
    let of = |dim: Option<usize>| dim.unwrap_or(0);
    let (heads, key) = (of(arch.linear_num_key_heads), of(arch.linear_key_head_dim));
    let values = of(arch.linear_num_value_heads).saturating_mul(of(arch.linear_value_head_dim));
    if heads == 0 || !values.is_multiple_of(heads) {
        bail!(
            UnsupportedModel,
            "tensor '{}' has {values} rows, expected a multiple of {heads} key heads",
            lower.name
        );
    }
    let widths = [key, key, values / heads, values / heads];
    let named = format!("tensors '{}' and '{}'", upper.name, lower.name);
    let data = upper.data.stacked(lower.data, StackedProjections { heads, widths });
    Ok(Tensor {
        name: upper.name.replace("in_proj_qkv.", "in_proj_qkvz."),
        data: data.map_err(|err| err.context(named))?,
    })
}

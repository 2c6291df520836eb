//! A ternary model as a `.ninfer` file: objects of codes and scales in planes, signs, and the small files of a model.

use super::steps::Steps;
use super::values::{self, is_ternary};
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result, bail, error};
use crate::format::hadamard::{AXIS, Hadamard, TRANSFORM};
use crate::format::ninfer::{self, Format, Identity, NewObject, RowSplit, Tensor as Shape};
use crate::format::{Arch, HiddenAct, LayerType};
use crate::import::{EMBED, FRONTEND, Layout, Model, Rows, SIGNS, Tensor, WIDTHS, known, layout};
use serde_json::{Map, Value, json};
use std::path::Path;

/// What published files say of their weights.
const WEIGHTS: &str = "folded-ternary";

/// Writes the file and returns its length. Errors: those of [`exchange`](super::exchange).
pub(super) fn write(path: &Path, model: &Model, steps: &Steps) -> Result<u64> {
    let rotation = rotation(model)?;
    let mut objects = resources(model, rotation)?;
    for layout in layout(&model.arch, &model.tensors)? {
        objects.push(object(layout, &model.tensors, steps)?);
    }
    objects.extend(signs(rotation)?);
    let name = model.provenance.get("source_name").and_then(Value::as_str);
    let identity = Identity {
        model_id: known(&model.arch).map_or_else(|| identifier(name.unwrap_or_default()), str::to_owned),
        weights_id: WEIGHTS.into(),
    };
    ninfer::write(path, &identity, objects)
}

/// A name as an identifier: in small letters, with a hyphen for everything but letters, digits and dots.
fn identifier(name: &str) -> String {
    let parts = name.split(|c: char| !c.is_ascii_alphanumeric() && c != '.');
    let parts: Vec<String> = parts
        .filter(|part| !part.is_empty())
        .map(str::to_ascii_lowercase)
        .collect();
    match parts.is_empty() {
        true => "model".into(),
        false => parts.join("-"),
    }
}

/// The rotation. In these files all ternary matrices are rotated, and no others.
///
/// Errors: `UnsupportedFeature` with a matrix that is not so.
fn rotation(model: &Model) -> Result<&Hadamard> {
    let Some(rotation) = &model.arch.prism_hadamard else {
        bail!(
            UnsupportedFeature,
            "the source states no rotation, and ternary weights of .ninfer files are always rotated"
        );
    };
    for tensor in &model.tensors {
        let (name, ternary) = (&tensor.name, is_ternary(tensor));
        let is_input = ternary && (name != EMBED || model.arch.tie_word_embeddings);
        let is_lookup = ternary && name == EMBED;
        if rotation.forward.contains(name) != is_input || rotation.inverse.contains(name) != is_lookup {
            let (expected, found) = if ternary {
                ("rotated", "plain")
            } else {
                ("plain", "rotated")
            };
            bail!(
                UnsupportedFeature,
                "tensor '{name}' of type {}: expected {expected} weights in a .ninfer file, found {found} ones",
                tensor.data.dtype()?.name()
            );
        }
    }
    Ok(rotation)
}

fn signs(rotation: &Hadamard) -> Result<Vec<NewObject<'static>>> {
    let widths: Vec<usize> = rotation.widths().collect();
    if rotation.is_identity() {
        return Ok(Vec::new());
    }
    let mut all = Vec::new();
    for &width in &widths {
        all.extend(rotation.signs(width)?);
    }
    let vector = |name: &str, format, count: usize, bytes: Vec<u8>| NewObject {
        name: name.to_owned(),
        tensor: Some(Shape {
            shape: vec![count as u64],
            format,
        }),
        bytes: bytes.len() as u64,
        payload: Box::new(move || Ok(bytes)),
    };
    let words = widths.iter().flat_map(|&width| (width as i32).to_le_bytes()).collect();
    Ok(vec![
        vector(SIGNS, Format::Fp32, all.len(), values::as_f32(&all)),
        vector(WIDTHS, Format::I32, widths.len(), words),
    ])
}

/// An object with the rows that its layout names.
fn object<'a>(layout: Layout, tensors: &'a [Tensor], steps: &'a Steps) -> Result<NewObject<'a>> {
    let Some(first) = layout.parts.first().map(|rows| &tensors[rows.tensor]) else {
        bail!(Internal, "object '{}' has no rows", layout.name);
    };
    let named = |err: Error| err.context(format_args!("tensor '{}'", first.name));
    let dtype = first.data.dtype().map_err(named)?;
    let format = match dtype {
        Dtype::PQ2_0 => Format::Pq2_0,
        Dtype::PTQ1_0 => Format::Ptq1_0,
        // Values that a file has as f32 are often those of bf16.
        Dtype::F32 | Dtype::F16 | Dtype::Bf16 => {
            match !layout.single && values::are_bf16(&all_values(&layout, tensors)?) {
                true => Format::Bf16,
                false => Format::Fp32,
            }
        }
        other => bail!(
            UnsupportedTensorType,
            "tensor '{}': .ninfer files hold no weights of type {} exactly",
            first.name,
            other.name()
        ),
    };
    let rows = layout
        .parts
        .iter()
        .flat_map(|rows| &rows.ranges)
        .map(|range| range.len())
        .sum::<usize>();
    let cols = first.data.rows_cols().1;
    let shape = match (first.data.shape.len(), layout.transposed) {
        (1, _) => vec![cols as u64],
        (_, true) => vec![cols as u64, rows as u64],
        (_, false) => vec![rows as u64, cols as u64],
    };
    let bytes = format.size(&shape)?;
    Ok(NewObject {
        name: layout.name.clone(),
        tensor: Some(Shape { shape, format }),
        bytes,
        payload: Box::new(move || {
            let payload = match format {
                Format::Pq2_0 | Format::Ptq1_0 => {
                    planes(&layout, tensors, RowSplit::new(format, rows as u64, cols as u64))?
                }
                _ => {
                    let mut all = all_values(&layout, tensors)?;
                    if layout.transposed {
                        all = (0..all.len()).map(|at| all[at % rows * cols + at / rows]).collect();
                    }
                    if format == Format::Bf16 {
                        values::as_bf16(&all)
                    } else {
                        values::as_f32(&all)
                    }
                }
            };
            for Rows { tensor, .. } in &layout.parts {
                tensors[*tensor].data.release();
                steps.step(&tensors[*tensor].name)?;
            }
            Ok(payload)
        }),
    })
}

fn all_values(layout: &Layout, tensors: &[Tensor]) -> Result<Vec<f32>> {
    let parts = layout
        .parts
        .iter()
        .map(|rows| values::read(&tensors[rows.tensor], &rows.ranges));
    Ok(parts.collect::<Result<Vec<_>>>()?.concat())
}

/// The blocks of the rows in planes.
fn planes(layout: &Layout, tensors: &[Tensor], planes: Option<RowSplit>) -> Result<Vec<u8>> {
    let planes = planes.ok_or_else(|| error!(Internal, "object '{}' has no planes", layout.name))?;
    let row_bytes = planes.block_row_bytes();
    let mut payload = vec![0; planes.bytes as usize];
    let mut row = 0;
    for Rows { tensor, ranges } in &layout.parts {
        let tensor = &tensors[*tensor];
        let named = |err: Error| err.context(format_args!("tensor '{}'", tensor.name));
        let bytes = tensor.data.ordered_bytes().map_err(named)?;
        for source in ranges.iter().cloned().flatten() {
            let blocks = bytes.get(source * row_bytes..(source + 1) * row_bytes);
            let blocks = blocks.ok_or_else(|| error!(Bounds, "tensor '{}' has no row {source}", tensor.name))?;
            planes.set_blocks(&mut payload, row, blocks)?;
            row += 1;
        }
    }
    Ok(payload)
}

/// The small files: tokenizer, template, settings, and the description of the network.
fn resources(model: &Model, rotation: &Hadamard) -> Result<Vec<NewObject<'static>>> {
    let text =
        |value: Value| serde_json::to_vec_pretty(&value).map_err(|err| Error::new(Kind::Internal, err.to_string()));
    let config = &model.tokenizer_config;
    let mut files = Vec::new();
    if let Some(vocab) = &model.vocab {
        files.push(("tokenizer.json", vocab.clone()));
        files.push(("tokenizer_config.json", text(special_tokens(vocab, config)?)?));
    }
    if let Some(template) = config
        .get("chat_template")
        .and_then(Value::as_str)
        .filter(|text| !text.is_empty())
    {
        files.push(("chat_template.jinja", template.as_bytes().to_vec()));
    }
    files.push(("generation_config.json", text(generation(model))?));
    files.push(("config.json", text(network(&model.arch, rotation)?)?));
    let resource = |(name, bytes): (&str, Vec<u8>)| NewObject {
        name: format!("{FRONTEND}{name}"),
        tensor: None,
        bytes: bytes.len() as u64,
        payload: Box::new(move || Ok(bytes)),
    };
    Ok(files.into_iter().map(resource).collect())
}

/// The special tokens by their texts. Errors: `Parse`.
fn special_tokens(vocab: &[u8], config: &Map<String, Value>) -> Result<Value> {
    let document = crate::format::json::parse_object(vocab, "tokenizer.json")?;
    let added = document.get("added_tokens").and_then(Value::as_array);
    let mut decoder = Map::new();
    for token in added.into_iter().flatten().filter_map(Value::as_object) {
        let mut token = token.clone();
        if let Some(id) = token.remove("id") {
            decoder.insert(id.to_string(), token.into());
        }
    }
    let mut file = Map::new();
    let first = config.get("eos_token_ids").and_then(|ids| ids.get(0));
    let ids = [
        ("eos_token", first),
        ("bos_token", config.get("bos_token_id")),
        ("pad_token", config.get("pad_token_id")),
    ];
    for (key, id) in ids {
        let token = id.and_then(|id| decoder.get(&id.to_string())?.get("content"));
        file.extend(token.map(|token| (key.to_owned(), token.clone())));
    }
    file.insert("added_tokens_decoder".into(), decoder.into());
    file.insert("tokenizer_class".into(), "PreTrainedTokenizerFast".into());
    Ok(file.into())
}

fn generation(model: &Model) -> Value {
    let mut file = match model.provenance.get("generation_config") {
        Some(Value::Object(settings)) => settings.clone(),
        _ => Map::new(),
    };
    for (key, from) in [
        ("eos_token_id", "eos_token_ids"),
        ("bos_token_id", "bos_token_id"),
        ("pad_token_id", "pad_token_id"),
    ] {
        file.extend(
            model
                .tokenizer_config
                .get(from)
                .map(|value| (key.to_owned(), value.clone())),
        );
    }
    file.into()
}

/// The network as a Hugging Face configuration, with its rotation.
fn network(arch: &Arch, rotation: &Hadamard) -> Result<Value> {
    let kinds = arch.layer_types.iter().map(|kind| match kind {
        LayerType::FullAttention => "full_attention",
        LayerType::SlidingAttention => "sliding_attention",
        LayerType::LinearAttention => "linear_attention",
    });
    let mut rope = json!({
        "rope_type": "default", "rope_theta": arch.rope_theta, "partial_rotary_factor": arch.partial_rotary_factor,
    });
    if let Some(yarn) = &arch.yarn {
        rope["rope_type"] = "yarn".into();
        rope["factor"] = yarn.factor.into();
        rope["original_max_position_embeddings"] = yarn.original_max_position_embeddings.into();
        rope["beta_fast"] = yarn.beta_fast.into();
        rope["beta_slow"] = yarn.beta_slow.into();
        rope["attention_factor"] = yarn.attention_factor.into();
    }
    let widths: Vec<usize> = rotation.widths().collect();
    let mut file = json!({
        "model_type": arch.arch_name,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.intermediate_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_attention_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "vocab_size": arch.vocab_size,
        "rms_norm_eps": arch.rms_norm_eps,
        "layer_types": kinds.collect::<Vec<_>>(),
        "tie_word_embeddings": arch.tie_word_embeddings,
        "rope_parameters": rope,
        "prism_hadamard": {
            "version": if arch.tie_word_embeddings { 2 } else { 1 },
            "transform": TRANSFORM,
            "block_size": rotation.block(),
            "axis": AXIS,
            "sign_mode": if rotation.is_identity() { "identity" } else { "explicit" },
            "sign_widths": widths,
            "signs": SIGNS,
            "widths": WIDTHS,
        },
    });
    let activation = arch.hidden_act.map(|act| match act {
        HiddenAct::Silu => "silu",
        HiddenAct::GeluTanh => "gelu_pytorch_tanh",
    });
    let optional = [
        ("hidden_act", activation.map(Value::from)),
        ("max_position_embeddings", arch.max_position_embeddings.map(Value::from)),
        ("sliding_window", arch.sliding_window.map(Value::from)),
        ("linear_conv_kernel_dim", arch.linear_conv_kernel_dim.map(Value::from)),
        ("linear_num_key_heads", arch.linear_num_key_heads.map(Value::from)),
        ("linear_num_value_heads", arch.linear_num_value_heads.map(Value::from)),
        ("linear_key_head_dim", arch.linear_key_head_dim.map(Value::from)),
        ("linear_value_head_dim", arch.linear_value_head_dim.map(Value::from)),
    ];
    for (key, value) in optional {
        if let Some(value) = value {
            file[key] = value;
        }
    }
    Ok(file)
}

//! A ternary model as a GGUF file: blocks of codes and scales, and everything else as keys.

use super::steps::Steps;
use super::values::{self, is_ternary};
use crate::dtype::{Dtype, Order, RowOrder};
use crate::error::{Error, Result, bail, error};
use crate::format::gguf::{self, Item, NewTensor};
use crate::format::hadamard::{AXIS, Hadamard, TRANSFORM};
use crate::format::{Arch, LayerType};
use crate::import::{Applied, EMBED, Model, Place, Tensor, architecture, describe, place, yarn_attention};
use serde_json::Value;
use std::path::Path;

/// Writes the file and returns its length. Errors: those of [`exchange`](super::exchange).
pub(super) fn write(path: &Path, model: &Model, steps: &Steps) -> Result<u64> {
    let mut keys = network(model)?;
    if let Some(rotation) = &model.arch.prism_hadamard {
        keys.extend(hadamard(&model.arch, rotation, &model.tensors)?);
    }
    if let Some(vocab) = &model.vocab {
        keys.extend(describe(vocab, &model.tokenizer_config, model.arch.vocab_size)?);
    }
    let tensors = model.tensors.iter().map(|tensor| {
        let place = placed(&model.arch, &tensor.name)?;
        new_tensor(tensor, place, steps)
    });
    gguf::write(path, &keys, tensors.collect::<Result<_>>()?)
}

fn placed(arch: &Arch, name: &str) -> Result<Place> {
    place(arch, name).ok_or_else(|| error!(UnsupportedModel, "tensor '{name}': no GGUF tensor is written for it"))
}

fn new_tensor<'a>(tensor: &'a Tensor, place: Place, steps: &'a Steps) -> Result<NewTensor<'a>> {
    let Place {
        name,
        form,
        lacks_middle,
    } = place;
    let mut shape = tensor.data.shape.clone();
    if lacks_middle && shape.len() == 3 {
        shape.remove(1);
    }
    let source = tensor
        .data
        .dtype()
        .map_err(|err| err.context(format_args!("tensor '{}'", tensor.name)))?;
    let dtype = match source {
        Dtype::PQ2_0 | Dtype::PTQ1_0 => source,
        Dtype::F16 | Dtype::Bf16 if shape.len() > 1 && !lacks_middle && form.applied == Applied::Identity => source,
        Dtype::F32 | Dtype::F16 | Dtype::Bf16 => Dtype::F32,
        other => bail!(
            UnsupportedTensorType,
            "tensor '{}': type {} is not written to GGUF files",
            tensor.name,
            other.name()
        ),
    };
    Ok(NewTensor {
        name,
        dtype,
        shape,
        payload: Box::new(move || {
            let payload = match is_ternary(tensor) {
                true => blocks(tensor, form.order)?,
                false => plain(tensor, dtype, form.order, form.applied)?,
            };
            tensor.data.release();
            steps.step(&tensor.name)?;
            Ok(payload)
        }),
    })
}

/// The blocks of a ternary matrix, in the file's order of rows.
fn blocks(tensor: &Tensor, order: Order) -> Result<Vec<u8>> {
    let named = |err: Error| err.context(format_args!("tensor '{}'", tensor.name));
    let bytes = tensor.data.ordered_bytes().map_err(named)?;
    if order.cols.is_some() {
        bail!(
            UnsupportedFeature,
            "tensor '{}': its columns would have to move, and ternary blocks of columns cannot",
            tensor.name
        );
    }
    let (rows, _) = tensor.data.rows_cols();
    let mut moved = vec![0; bytes.len()];
    move_rows(&bytes, &mut moved, rows, order.rows);
    Ok(moved)
}

/// Moves every row to the place where the file has it.
fn move_rows<T: Copy>(from: &[T], to: &mut [T], rows: usize, order: RowOrder) {
    let len = (from.len() / rows.max(1)).max(1);
    for (row, values) in from.chunks_exact(len).enumerate() {
        let first = order.source(row) * len;
        to[first..first + len].copy_from_slice(values);
    }
}

/// Weights of a type without blocks, in the file's form.
fn plain(tensor: &Tensor, dtype: Dtype, order: Order, applied: Applied) -> Result<Vec<u8>> {
    let (rows, cols) = tensor.data.rows_cols();
    let mut values = values::read_all(tensor)?;
    values.iter_mut().for_each(|value| *value = applied.apply(*value));
    // Elements of a vector are its rows.
    let rows = if tensor.data.shape.len() == 1 { cols } else { rows };
    let mut moved = vec![0.0; values.len()];
    move_rows(&values, &mut moved, rows, order.rows);
    if let Some(heads) = order.cols {
        for (from, to) in moved.chunks_exact(cols).zip(values.chunks_exact_mut(cols)) {
            from.iter()
                .enumerate()
                .for_each(|(col, &value)| to[heads.source(col)] = value);
        }
        moved = values;
    }
    Ok(match dtype {
        Dtype::F16 => moved
            .iter()
            .flat_map(|&value| half::f16::from_f32(value).to_le_bytes())
            .collect(),
        Dtype::Bf16 => values::as_bf16(&moved),
        _ => values::as_f32(&moved),
    })
}

/// The keys that describe the network.
fn network(model: &Model) -> Result<Vec<(String, Item)>> {
    let arch = &model.arch;
    let Some(family) = architecture(arch) else {
        bail!(UnsupportedModel, "'{}' is not the name of a family", arch.arch_name);
    };
    let mut keys = vec![
        ("general.architecture".to_owned(), Item::Text(family.into())),
        ("general.type".to_owned(), Item::Text("model".into())),
        ("general.quantization_version".to_owned(), Item::Unsigned(2)),
    ];
    for key in ["name", "license"] {
        let text = model.provenance.get(&format!("source_{key}")).and_then(Value::as_str);
        keys.extend(text.map(|text| (format!("general.{key}"), Item::Text(text.into()))));
    }
    keys.extend(sampling(model));
    let heads = |heads: Option<usize>, width: Option<usize>| heads?.checked_mul(width?);
    let is_recurrent = arch.linear_num_value_heads.is_some();
    let rotated = (arch.head_dim as f64 * arch.partial_rotary_factor) as usize;
    let sizes = [
        ("block_count", Some(arch.num_layers)),
        ("context_length", arch.max_position_embeddings),
        ("embedding_length", Some(arch.hidden_size)),
        ("feed_forward_length", Some(arch.intermediate_size)),
        ("attention.head_count", Some(arch.num_attention_heads)),
        ("attention.head_count_kv", Some(arch.num_kv_heads)),
        ("attention.key_length", Some(arch.head_dim)),
        ("attention.value_length", Some(arch.head_dim)),
        ("attention.sliding_window", arch.sliding_window),
        ("rope.dimension_count", Some(rotated)),
        ("ssm.conv_kernel", arch.linear_conv_kernel_dim),
        ("ssm.state_size", arch.linear_key_head_dim),
        ("ssm.group_count", arch.linear_num_key_heads),
        ("ssm.time_step_rank", arch.linear_num_value_heads),
        (
            "ssm.inner_size",
            heads(arch.linear_num_value_heads, arch.linear_value_head_dim),
        ),
        ("full_attention_interval", is_recurrent.then(|| interval(arch))),
        (
            "rope.scaling.original_context_length",
            arch.yarn.as_ref().map(|yarn| yarn.original_max_position_embeddings),
        ),
    ];
    let own = |key: &str| format!("{family}.{key}");
    for (key, size) in sizes {
        if let Some(size) = size {
            let size =
                u32::try_from(size).map_err(|_| error!(UnsupportedModel, "{key} {size} does not fit 32 bits"))?;
            keys.push((own(key), Item::Unsigned(size)));
        }
    }
    let mut float = |key: &str, value: f64| keys.push((own(key), Item::Float(value as f32)));
    float("rope.freq_base", arch.rope_theta);
    float("attention.layer_norm_rms_epsilon", arch.rms_norm_eps);
    if let Some(yarn) = &arch.yarn {
        float("rope.scaling.factor", yarn.factor);
        float("rope.scaling.yarn_beta_fast", yarn.beta_fast);
        float("rope.scaling.yarn_beta_slow", yarn.beta_slow);
        let usual = yarn_attention(yarn.factor, 1.0);
        float(
            "rope.scaling.attn_factor",
            yarn.attention_factor.unwrap_or(usual) / usual,
        );
        keys.push((own("rope.scaling.type"), Item::Text("yarn".into())));
    }
    if is_recurrent {
        // Three positions of a token turn parts of the frequencies. In texts all three are the same.
        let pairs = rotated / 2;
        let sections = [pairs.div_ceil(3), pairs.saturating_sub(1).div_ceil(3), pairs / 3, 0];
        let sections = sections.map(|pairs| pairs as i32).to_vec();
        keys.push((own("rope.dimension_sections"), Item::Integers(sections)));
    }
    Ok(keys)
}

/// The number of layers up to the first with attention.
fn interval(arch: &Arch) -> usize {
    let first = arch
        .layer_types
        .iter()
        .position(|&kind| kind == LayerType::FullAttention);
    first.map_or(arch.num_layers, |layer| layer) + 1
}

/// The settings of the sampler.
fn sampling(model: &Model) -> Vec<(String, Item)> {
    let settings = model.provenance.get("generation_config").and_then(Value::as_object);
    let key = |name: &str| match name {
        "temperature" => Some("temp"),
        "top_k" => Some("top_k"),
        "top_p" => Some("top_p"),
        "min_p" => Some("min_p"),
        "repetition_penalty" => Some("penalty_repeat"),
        _ => None,
    };
    let item = |(name, value): (&String, &Value)| {
        let item = match value.as_u64() {
            Some(number) if name == "top_k" => Item::Unsigned(u32::try_from(number).ok()?),
            _ => Item::Float(value.as_f64()? as f32),
        };
        Some((format!("general.sampling.{}", key(name)?), item))
    };
    settings.into_iter().flatten().filter_map(item).collect()
}

/// The keys of the rotation.
fn hadamard(arch: &Arch, rotation: &Hadamard, tensors: &[Tensor]) -> Result<Vec<(String, Item)>> {
    let names = |of: &dyn Fn(&str) -> bool| {
        let own = tensors.iter().filter(|tensor| of(&tensor.name));
        let names = own.map(|tensor| Ok(placed(arch, &tensor.name)?.name));
        names.collect::<Result<Vec<_>>>()
    };
    let tied = arch.tie_word_embeddings && rotation.forward.contains(EMBED);
    let mut keys = vec![
        ("version", Item::Unsigned(if tied { 2 } else { 1 })),
        ("block_size", Item::Unsigned(rotation.block() as u32)),
        ("transform", Item::Text(TRANSFORM.into())),
        ("axis", Item::Text(AXIS.into())),
        (
            "weight_names",
            Item::Texts(names(&|name| rotation.forward.contains(name))?),
        ),
        (
            "inverse_weight_names",
            Item::Texts(names(&|name| rotation.inverse.contains(name))?),
        ),
    ];
    let mode = if rotation.is_identity() { "identity" } else { "explicit" };
    keys.push(("sign_mode", Item::Text(mode.into())));
    if !rotation.is_identity() {
        let widths: Vec<usize> = rotation.widths().collect();
        let mut signs = Vec::new();
        for &width in &widths {
            signs.extend(rotation.signs(width)?.into_iter().map(|sign| sign as i32));
        }
        let widths = widths.into_iter().map(|width| width as i32).collect();
        keys.push(("sign_widths", Item::Integers(widths)));
        keys.push(("sign_values", Item::Integers(signs)));
    }
    if arch.linear_num_value_heads.is_some() {
        keys.push(("gdn_v_grouped", Item::Bool(true)));
    }
    if tied {
        keys.push(("tied_output", Item::Bool(true)));
    }
    Ok(keys
        .into_iter()
        .map(|(key, item)| (format!("prism.hadamard.{key}"), item))
        .collect())
}

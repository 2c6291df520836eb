//! Gated DeltaNet layers in GGUF files: their keys, and tensors that are stored in another order and form.
//!
//! By the converter of llama.cpp (architecture `qwen35`): value heads come with the first of every key head first, then the
//! second of every key head, and so on; decay rates as -exp(A_log); the convolution without its middle dimension.

use super::keys::Keys;
use crate::container::Arch;
use crate::convert::Matrix;
use crate::convert::arch::recurring;
use crate::convert::family::{Family, Role};
use crate::convert::matrix::Tiles;
use crate::error::{Result, bail};

/// Hyperparameters of these families; the sections of the rotation make no difference to texts.
pub(super) const KEYS: [&str; 8] = [
    "ssm.conv_kernel",
    "ssm.state_size",
    "ssm.group_count",
    "ssm.time_step_rank",
    "ssm.inner_size",
    "full_attention_interval",
    "nextn_predict_layers",
    "rope.dimension_sections",
];

/// Blocks at the end that are no layers of the network: multi-token heads.
pub(super) fn extra_blocks(keys: &Keys, family: &Family) -> Result<u64> {
    Ok(match family.delta {
        Some(_) => keys.unsigned("nextn_predict_layers")?.unwrap_or(0),
        None => 0,
    })
}

/// Completes the description of families with such layers. Errors: `UnsupportedModel` for keys that are missing or make no
/// sense.
pub(super) fn read(keys: &Keys, family: &Family, arch: &mut Arch) -> Result<()> {
    if family.delta.is_none() {
        return Ok(());
    }
    let count = |key: &str| keys.size(key).and_then(|value| keys.need(key, value));
    let (heads, inner) = (count("ssm.time_step_rank")?, count("ssm.inner_size")?);
    if heads == 0 || !inner.is_multiple_of(heads) {
        bail!(
            UnsupportedModel,
            "metadata key '{}' is {inner}, which is not shared by {heads} heads",
            keys.full("ssm.inner_size")
        );
    }
    arch.linear_conv_kernel_dim = Some(count("ssm.conv_kernel")?);
    arch.linear_num_key_heads = Some(count("ssm.group_count")?);
    arch.linear_num_value_heads = Some(heads);
    arch.linear_key_head_dim = Some(count("ssm.state_size")?);
    arch.linear_value_head_dim = Some(inner / heads);
    let interval = keys.size("full_attention_interval")?;
    let usual = family
        .default("full_attention_interval")
        .map(|interval| interval as usize);
    let interval = keys.need("full_attention_interval", interval.or(usual))?;
    recurring(arch, interval)
}

/// A tensor of such a layer in the container's order and form.
pub(super) fn arrange<'a>(mut matrix: Matrix<'a>, role: &Role, arch: &Arch) -> Result<Matrix<'a>> {
    let Some(part) = role.name.strip_prefix("linear_attn.") else {
        return Ok(matrix);
    };
    let of = |dim: Option<usize>| dim.unwrap_or(0);
    let (key_heads, heads) = (of(arch.linear_num_key_heads), of(arch.linear_num_value_heads));
    let keys = key_heads.saturating_mul(of(arch.linear_key_head_dim)).saturating_mul(2);
    let value = of(arch.linear_value_head_dim);
    let tiles = |first: usize, width: usize| Tiles {
        first,
        key_heads,
        heads,
        width,
    };
    if part == "conv1d.weight" && matrix.shape.len() == 2 {
        matrix.shape.insert(1, 1);
    }
    match part {
        "in_proj_qkv.weight" | "conv1d.weight" => matrix.tiled_rows(tiles(keys, value)),
        "in_proj_z.weight" => matrix.tiled_rows(tiles(0, value)),
        "in_proj_a.weight" | "in_proj_b.weight" | "dt_bias" => matrix.tiled_rows(tiles(0, 1)),
        "A_log" => Ok(matrix.tiled_rows(tiles(0, 1))?.negative_exponentials()),
        "out_proj.weight" => matrix.tiled_cols(tiles(0, value)),
        _ => Ok(matrix),
    }
}

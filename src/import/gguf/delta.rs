//! Gated DeltaNet layers in GGUF files: their keys, and tensors that are stored in another order and form.
//!
//! As llama.cpp's converter writes them: decay rates are stored as -exp(A_log), the convolution without its middle dimension.
//! If inputs are split (`qwen35`), value heads are in tiled order: the first value head of every key head, then the second of
//! every key head, and so on. If inputs are fused (`qwen3next`), value heads keep their order, and the fused tensor is split in
//! two: q of all heads, k of all heads and v of all heads; z of all heads. Older files have the fused tensor. Both forms are
//! presented as they are.

use super::keys::Keys;
use crate::dtype::TiledHeads;
use crate::error::{Result, bail};
use crate::format::Arch;
use crate::import::arch::set_recurrent;
use crate::import::family::{Delta, Family};
use crate::import::matrix::Matrix;
use crate::import::roles::Role;

/// Hyperparameters of these families. The sections of the rotation do not affect text.
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

/// The number of blocks after the network's layers, which belong to draft heads.
pub(super) fn extra_blocks(keys: &Keys, family: &Family) -> Result<u64> {
    Ok(match family.delta {
        Some(_) => keys.unsigned("nextn_predict_layers")?.unwrap_or(0),
        None => 0,
    })
}

/// Completes the description of families with such layers. Errors: `UnsupportedModel` for keys that are missing or
/// inconsistent.
pub(super) fn read(keys: &Keys, family: &Family, arch: &mut Arch) -> Result<()> {
    if family.delta.is_none() {
        return Ok(());
    }
    let count = |key: &str| keys.size(key).and_then(|value| keys.need(key, value));
    let (heads, inner) = (count("ssm.time_step_rank")?, count("ssm.inner_size")?);
    if heads == 0 || !inner.is_multiple_of(heads) {
        bail!(
            UnsupportedModel,
            "metadata key '{}' is {inner}, expected a multiple of {heads} heads",
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
    set_recurrent(arch, interval)
}

/// A tensor of such a layer in the container's order and form.
/// `grouped`: the value heads along its columns are in the container's order.
pub(super) fn arrange(mut matrix: Matrix, role: &Role, family: &Family, arch: &Arch, grouped: bool) -> Result<Matrix> {
    let Some(part) = role.name.strip_prefix("linear_attn.") else {
        return Ok(matrix);
    };
    let of = |dim: Option<usize>| dim.unwrap_or(0);
    let (key_heads, heads) = (of(arch.linear_num_key_heads), of(arch.linear_num_value_heads));
    let keys = key_heads.saturating_mul(of(arch.linear_key_head_dim)).saturating_mul(2);
    let value = of(arch.linear_value_head_dim);
    let tiles = |first: usize, width: usize| TiledHeads {
        first,
        key_heads,
        heads,
        width,
    };
    if part == "conv1d.weight" && matrix.shape.len() == 2 {
        matrix.shape.insert(1, 1);
    }
    if family.delta == Some(Delta::Fused) {
        return Ok(match part {
            "A_log" => matrix.negative_exponentials(),
            _ => matrix,
        });
    }
    match part {
        "in_proj_qkv.weight" | "conv1d.weight" => matrix.tiled_rows(tiles(keys, value)),
        "in_proj_z.weight" => matrix.tiled_rows(tiles(0, value)),
        "in_proj_a.weight" | "in_proj_b.weight" | "dt_bias" => matrix.tiled_rows(tiles(0, 1)),
        "A_log" => Ok(matrix.tiled_rows(tiles(0, 1))?.negative_exponentials()),
        "out_proj.weight" if !grouped => matrix.tiled_cols(tiles(0, value)),
        _ => Ok(matrix),
    }
}

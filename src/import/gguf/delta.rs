//! Gated DeltaNet layers in GGUF files: their keys.

use super::keys::Keys;
use crate::error::{Result, bail};
use crate::format::Arch;
use crate::import::arch::set_recurrent;
use crate::import::family::Family;

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

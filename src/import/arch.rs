//! From the dimensions that every source states to the container's description of a network.
//!
//! Knows families and dimensions, not the sources of a number.

use super::family::Family;
use super::roles::Dim;
use crate::error::{Result, bail};
use crate::format::{Arch, LayerType};
use serde_json::json;

/// Larger dimensions are taken for damage. They are refused before anything of that size is allocated.
const MAX_DIM: u64 = 1 << 24;

/// The basic dimensions of a network.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dims {
    pub hidden: u64,
    pub inter: u64,
    pub layers: u64,
    pub heads: u64,
    pub kv_heads: u64,
    pub head_dim: u64,
    pub vocab: u64,
}

impl Dims {
    /// The plain network of `family` with these dimensions; the caller sets the rest. `tensors` is the number of tensors in
    /// the source, which has at least one per layer.
    ///
    /// Errors: `UnsupportedModel` with the number that is out of range.
    pub fn arch(self, family: &Family, tensors: usize) -> Result<Arch> {
        let size = |name: &str, value: u64| {
            if value == 0 || value > MAX_DIM {
                bail!(UnsupportedModel, "the {name} is {value}, expected 1 to {MAX_DIM}");
            }
            Ok(value as usize)
        };
        let layers = size("layer count", self.layers)?;
        if layers > tensors {
            bail!(
                UnsupportedModel,
                "the layer count is {layers}, but there are only {tensors} tensors"
            );
        }
        if !self.head_dim.is_multiple_of(2) {
            bail!(UnsupportedModel, "the head dimension {} is odd", self.head_dim);
        }
        Ok(Arch {
            arch_name: family.model_type.to_owned(),
            hidden_size: size("hidden size", self.hidden)?,
            intermediate_size: match family.experts {
                // All layers may be mixtures.
                Some(_) if self.inter == 0 => 0,
                _ => size("intermediate size", self.inter)?,
            },
            num_layers: layers,
            num_attention_heads: size("attention head count", self.heads)?,
            num_kv_heads: size("key-value head count", self.kv_heads)?,
            head_dim: size("head dimension", self.head_dim)?,
            vocab_size: size("vocabulary size", self.vocab)?,
            layer_types: vec![LayerType::FullAttention; layers],
            rms_norm_eps: 1e-6,
            // The value of configurations and GGUF files that state none.
            rope_theta: 10_000.0,
            partial_rotary_factor: 1.0,
            num_loops: 1,
            norm_style: Some(family.norm_style),
            hidden_act: Some(family.activation),
            tie_word_embeddings: family.tied,
            embed_multiplier: if family.scales_embedding {
                (self.hidden as f64).sqrt()
            } else {
                1.0
            },
            ..Arch::default()
        })
    }
}

/// The length of `dim` in a network.
pub(super) fn length(arch: &Arch, dim: Dim) -> u64 {
    let of = |dim: Option<usize>| dim.unwrap_or(0);
    let heads = |heads: usize| heads.saturating_mul(arch.head_dim);
    let (query, key_value) = (heads(arch.num_attention_heads), heads(arch.num_kv_heads));
    let keys = of(arch.linear_num_key_heads).saturating_mul(of(arch.linear_key_head_dim));
    let values = of(arch.linear_num_value_heads).saturating_mul(of(arch.linear_value_head_dim));
    let channels = keys.saturating_mul(2).saturating_add(values);
    let length = match dim {
        Dim::Hidden => arch.hidden_size,
        Dim::Inter => arch.intermediate_size,
        Dim::Vocab => arch.vocab_size,
        Dim::Query => query,
        Dim::KeyValue => key_value,
        Dim::Head => arch.head_dim,
        Dim::Fused => key_value.saturating_mul(2).saturating_add(query),
        Dim::TwoInter => arch.intermediate_size.saturating_mul(2),
        Dim::TwoHidden => arch.hidden_size.saturating_mul(2),
        Dim::TwoQuery => query.saturating_mul(2),
        Dim::DeltaChannels => channels,
        Dim::DeltaValues => values,
        Dim::DeltaAll => channels.saturating_add(values),
        Dim::DeltaHeads => of(arch.linear_num_value_heads),
        Dim::TwoDeltaHeads => of(arch.linear_num_value_heads).saturating_mul(2),
        Dim::DeltaHead => of(arch.linear_value_head_dim),
        Dim::One => 1,
        Dim::Taps => of(arch.linear_conv_kernel_dim),
        Dim::Experts => arch.moe.as_ref().map_or(0, |moe| moe.num_experts),
        Dim::ExpertInter => arch.moe.as_ref().map_or(0, |moe| moe.moe_intermediate_size),
        Dim::SharedInter => of(shared_width(arch)),
    };
    length as u64
}

/// The width of the shared expert, if there is one.
pub(super) fn shared_width(arch: &Arch) -> Option<usize> {
    arch.moe.as_ref().and_then(|moe| moe.shared_expert_intermediate_size)
}

/// The number of rotary frequencies. Errors: `UnsupportedModel` when the rotary factor does not give whole pairs.
pub(super) fn frequencies(arch: &Arch) -> Result<usize> {
    let factor = arch.partial_rotary_factor;
    if !(factor > 0.0 && factor <= 1.0) {
        bail!(
            UnsupportedModel,
            "the partial rotary factor is {factor}, expected more than 0 and at most 1"
        );
    }
    let rotated = (arch.head_dim as f64 * factor) as usize;
    if rotated == 0 || !rotated.is_multiple_of(2) {
        bail!(
            UnsupportedModel,
            "{rotated} of {} head dimensions rotate, expected an even number of at least 2",
            arch.head_dim
        );
    }
    Ok(rotated / 2)
}

/// Makes all layers recurrent except every `interval`-th. Errors: `UnsupportedModel` for an interval of 0.
pub(super) fn set_recurrent(arch: &mut Arch, interval: usize) -> Result<()> {
    if interval == 0 {
        bail!(UnsupportedModel, "'full_attention_interval' is 0");
    }
    let slots = arch.layer_types.iter_mut().enumerate();
    slots
        .filter(|(layer, _)| !(layer + 1).is_multiple_of(interval))
        .for_each(|(_, slot)| *slot = LayerType::LinearAttention);
    // Other readers of the container need this member.
    arch.linear_core = Some(json!({
        "kind": "gated_delta_net",
        "num_heads": arch.linear_num_value_heads,
        "value_head_dim": arch.linear_value_head_dim,
    }));
    Ok(())
}

/// Whether a layer has a sliding window by the rule: all layers, or all except every `pattern`-th.
pub(super) fn slides(layer: usize, pattern: Option<usize>) -> bool {
    pattern.is_none_or(|pattern| !(layer + 1).is_multiple_of(pattern))
}

/// Sets the window of sliding layers, after `layer_types`. A `pattern` that agrees with the list is stored as well, for readers
/// that know only one of the two.
///
/// Errors: `UnsupportedModel` when there are sliding layers and no window.
pub(super) fn set_window(arch: &mut Arch, window: Option<usize>, pattern: Option<usize>) -> Result<()> {
    if !arch.layer_types.contains(&LayerType::SlidingAttention) {
        return Ok(());
    }
    let Some(window) = window else {
        bail!(
            UnsupportedModel,
            "layers have sliding windows, but 'sliding_window' is missing"
        );
    };
    let agrees = |pattern: &usize| {
        let slides = |layer| slides(layer, Some(*pattern));
        let mut types = arch.layer_types.iter().enumerate();
        types.all(|(layer, &kind)| slides(layer) == (kind == LayerType::SlidingAttention))
    };
    arch.sliding_window_pattern = pattern.filter(agrees);
    arch.sliding_window = Some(window);
    Ok(())
}

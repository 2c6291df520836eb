//! From `config.json`, in its spellings of several years, to the header's `arch`.
//!
//! Knows the keys of Hugging Face configurations and refuses those that it does not support. Knows no tensors.

use super::keys::{Keys, brief};
use crate::error::{Result, bail};
use crate::format::{Arch, HiddenAct, LayerType, Moe, Mtp, Yarn};
use crate::import::arch::{Dims, frequencies, set_recurrent, set_window, slides};
use crate::import::family::{Family, Renormalise, Window};
use crate::import::rope::{self, Llama3};
use serde_json::{Map, Value};

/// The contents of `config.json`.
pub struct Config {
    pub family: &'static Family,
    pub arch: Arch,
    /// For each layer, whether it is a mixture of experts.
    pub mixtures: Vec<bool>,
    /// Whether the language model is part of a larger one, whose tensors have other prefixes.
    pub nested: bool,
    pub notes: Vec<String>,
}

/// Reads the configuration of a model with `tensors` tensors.
///
/// Errors: `UnsupportedModel` names the family or the key that is not supported; `Parse` the key with a value of the wrong type.
pub fn read(root: &Map<String, Value>, tensors: usize) -> Result<Config> {
    let whole = Keys::new(root, "config.json");
    let text = whole.object("text_config")?;
    let keys = match text {
        Some(inner) => Keys {
            map: inner,
            outer: Some(root),
            defaults: None,
            place: "config.json (text_config)",
        },
        None => whole,
    };
    let name = keys.need("model_type", keys.string("model_type")?)?;
    let Some(family) = Family::of_model_type(name) else {
        bail!(
            UnsupportedModel,
            "model_type '{name}' cannot be converted; known are {}",
            Family::names()
        );
    };
    let defaults = family
        .defaults
        .iter()
        .map(|&(key, value)| (key.to_owned(), value.into()));
    let defaults = Map::from_iter(defaults);
    let keys = Keys {
        defaults: Some(&defaults),
        ..keys
    };
    if keys.get("quantization_config").is_some() {
        bail!(
            UnsupportedModel,
            "config key 'quantization_config': quantised weights are not supported"
        );
    }
    let count = |key: &str| keys.unsigned(key).and_then(|value| keys.need(key, value));
    let (hidden, heads) = (count("hidden_size")?, count("num_attention_heads")?);
    let head_dim = match keys.unsigned("head_dim")? {
        Some(head_dim) => head_dim,
        None if heads > 0 && hidden.is_multiple_of(heads) => hidden / heads,
        None => bail!(
            UnsupportedModel,
            "hidden size {hidden} is not a multiple of {heads} heads and there is no head_dim"
        ),
    };
    let dims = Dims {
        hidden,
        heads,
        head_dim,
        inter: match (family.experts, keys.unsigned("intermediate_size")?) {
            // All layers may be mixtures.
            (Some(_), None) => 0,
            (_, inter) => keys.need("intermediate_size", inter)?,
        },
        layers: count("num_hidden_layers")?,
        kv_heads: keys.unsigned("num_key_value_heads")?.unwrap_or(heads),
        vocab: count("vocab_size")?,
    };
    let mut arch = dims.arch(family, tensors)?;
    arch.rms_norm_eps = keys.float("rms_norm_eps")?.unwrap_or(arch.rms_norm_eps);
    let named = keys.string("hidden_activation")?.or(keys.string("hidden_act")?);
    if let Some(name) = named {
        arch.hidden_act = Some(activation(name)?);
    }
    if keys.bool("use_bidirectional_attention")? == Some(true) {
        bail!(
            UnsupportedModel,
            "config key 'use_bidirectional_attention' is true; only causal attention is supported"
        );
    }
    arch.tie_word_embeddings = keys.bool("tie_word_embeddings")?.unwrap_or(family.tied);
    arch.max_position_embeddings = keys.size("max_position_embeddings")?;
    arch.query_pre_attn_scalar = keys.float("query_pre_attn_scalar")?;
    arch.attn_logit_softcapping = keys.float("attn_logit_softcapping")?;
    arch.final_logit_softcapping = keys.float("final_logit_softcapping")?;
    arch.mtp = mtp(&keys)?;
    linear_attention(&keys, family, &mut arch)?;
    arch.moe = experts(&keys, family)?;
    let mixtures = mixtures(&keys, &arch)?;
    if !mixtures.contains(&true) {
        arch.moe = None;
    }
    layer_types(&keys, family, &mut arch)?;
    let mut notes = Vec::new();
    rotation(&keys, family, &mut arch, &mut notes)?;
    Ok(Config {
        family,
        arch,
        mixtures,
        nested: text.is_some(),
        notes,
    })
}

/// The mixture of experts, in families that have one.
fn experts(keys: &Keys, family: &Family) -> Result<Option<Moe>> {
    let count = keys.unsigned("num_experts")?;
    let Some(renormalise) = family.experts else {
        if let Some(count) = count.filter(|&count| count > 0) {
            bail!(
                UnsupportedModel,
                "config key 'num_experts' is {count}; {} models have no experts",
                family.model_type
            );
        }
        return Ok(None);
    };
    // A family of mixtures may have dense models.
    if count == Some(0) {
        return Ok(None);
    }
    let size = |key: &str| keys.size(key).and_then(|value| keys.need(key, value));
    let num_experts = match keys.size("num_local_experts")? {
        Some(count) => count,
        None => size("num_experts")?,
    };
    let norm = keys.bool("norm_topk_prob")?;
    Ok(Some(Moe {
        num_experts,
        top_k: size("num_experts_per_tok")?,
        moe_intermediate_size: size("moe_intermediate_size")?,
        norm_topk_prob: match renormalise {
            Renormalise::Always => true,
            Renormalise::Configured(default) => norm.unwrap_or(default),
        },
        shared_expert_intermediate_size: keys.size("shared_expert_intermediate_size")?.filter(|&width| width > 0),
        router_sigmoid: false,
        routed_scaling_factor: 1.0,
    }))
}

/// Whether each layer is a mixture: every `decoder_sparse_step`-th except those in `mlp_only_layers`.
fn mixtures(keys: &Keys, arch: &Arch) -> Result<Vec<bool>> {
    if arch.moe.is_none() {
        return Ok(vec![false; arch.num_layers]);
    }
    let step = keys.size("decoder_sparse_step")?.unwrap_or(1);
    let wanted = "a list of layer numbers";
    let list = keys.typed("mlp_only_layers", wanted, |value| {
        value.as_array()?.iter().map(Value::as_u64).collect::<Option<Vec<_>>>()
    })?;
    let dense = list.unwrap_or_default();
    let mixture = |layer: usize| step > 0 && (layer + 1).is_multiple_of(step) && !dense.contains(&(layer as u64));
    Ok((0..arch.num_layers).map(mixture).collect())
}

/// The draft head (multi-token prediction) that the configuration announces.
fn mtp(keys: &Keys) -> Result<Option<Mtp>> {
    let named = match keys.size("num_nextn_predict_layers")? {
        Some(layers) => Some(layers),
        None => keys.size("mtp_num_hidden_layers")?,
    };
    let layers = named.filter(|&layers| layers > 0);
    if layers.is_some() && keys.bool("mtp_use_dedicated_embeddings")? == Some(true) {
        bail!(
            UnsupportedModel,
            "config key 'mtp_use_dedicated_embeddings' is true; only draft heads that share the embedding are supported"
        );
    }
    Ok(layers.map(|num_layers| Mtp {
        num_layers,
        share_lm_head: true,
        share_embed: true,
        hidden: None,
    }))
}

fn activation(name: &str) -> Result<HiddenAct> {
    match name {
        "silu" | "swish" => Ok(HiddenAct::Silu),
        "gelu_pytorch_tanh" | "gelu_tanh" => Ok(HiddenAct::GeluTanh),
        _ => bail!(
            UnsupportedModel,
            "config key 'hidden_act' is '{name}'; supported are silu and gelu_pytorch_tanh"
        ),
    }
}

/// The dimensions of Gated DeltaNet layers, and the types of the layers by the family's rule.
fn linear_attention(keys: &Keys, family: &Family, arch: &mut Arch) -> Result<()> {
    if family.delta.is_none() {
        return Ok(());
    }
    if keys.bool("attn_output_gate")? == Some(false) {
        bail!(
            UnsupportedModel,
            "config key 'attn_output_gate' is false; the attention of {} models has gates",
            family.model_type
        );
    }
    let size = |key: &str| keys.size(key).and_then(|value| keys.need(key, value)).map(Some);
    arch.linear_conv_kernel_dim = size("linear_conv_kernel_dim")?;
    arch.linear_num_key_heads = size("linear_num_key_heads")?;
    arch.linear_num_value_heads = size("linear_num_value_heads")?;
    arch.linear_key_head_dim = size("linear_key_head_dim")?;
    arch.linear_value_head_dim = size("linear_value_head_dim")?;
    let interval = keys.need("full_attention_interval", keys.size("full_attention_interval")?)?;
    set_recurrent(arch, interval)
}

fn layer_types(keys: &Keys, family: &Family, arch: &mut Arch) -> Result<()> {
    let window = keys.size("sliding_window")?;
    let pattern = match family.window {
        Window::Pattern => keys.size("sliding_window_pattern")?,
        _ => None,
    };
    if let Some(value) = keys.get("layer_types") {
        let Some(names) = value.as_array() else {
            bail!(
                Parse,
                "config.json: key 'layer_types': expected a list, found {}",
                brief(value)
            );
        };
        if names.len() != arch.layer_types.len() {
            bail!(
                UnsupportedModel,
                "'layer_types' has {} entries for {} layers",
                names.len(),
                arch.num_layers
            );
        }
        for (slot, name) in arch.layer_types.iter_mut().zip(names) {
            *slot = match name.as_str() {
                Some("full_attention") => LayerType::FullAttention,
                Some("sliding_attention") => LayerType::SlidingAttention,
                Some("linear_attention") if family.delta.is_some() => LayerType::LinearAttention,
                _ => bail!(
                    UnsupportedModel,
                    "config key 'layer_types' has the unknown entry {}",
                    brief(name)
                ),
            };
        }
    } else {
        let first = match family.window {
            Window::Never => arch.num_layers,
            Window::FromMaxWindowLayers if keys.bool("use_sliding_window")?.unwrap_or(false) => {
                keys.need("max_window_layers", keys.size("max_window_layers")?)?
            }
            Window::FromMaxWindowLayers => arch.num_layers,
            Window::All | Window::Pattern if window.is_none() => arch.num_layers,
            Window::All | Window::Pattern => 0,
        };
        let slots = arch.layer_types.iter_mut().enumerate().skip(first);
        slots
            .filter(|&(layer, _)| slides(layer, pattern))
            .for_each(|(_, slot)| *slot = LayerType::SlidingAttention);
    }
    set_window(arch, window, pattern)
}

fn rotation(keys: &Keys, family: &Family, arch: &mut Arch, notes: &mut Vec<String>) -> Result<()> {
    let block = match keys.object("rope_parameters")? {
        Some(block) => Some((block, "rope_parameters")),
        None => keys.object("rope_scaling")?.map(|block| (block, "rope_scaling")),
    };
    let empty = Map::new();
    let (mut block, mut place) = block.unwrap_or((&empty, "rope_scaling"));
    if let Some(theta) = family.local_theta {
        arch.rope_local_base_freq = Some(keys.float("rope_local_base_freq")?.unwrap_or(theta));
        if let Some(local) = Keys::new(block, place).object("sliding_attention")? {
            let local = Keys::new(local, "rope_parameters.sliding_attention");
            if let Some(kind) = local.string("rope_type")?.filter(|&kind| kind != "default") {
                bail!(
                    UnsupportedModel,
                    "config key 'rope_parameters.sliding_attention' has rope type '{kind}'; supported is default"
                );
            }
            arch.rope_local_base_freq = local.float("rope_theta")?.or(arch.rope_local_base_freq);
        }
        if let Some(global) = Keys::new(block, place).object("full_attention")? {
            (block, place) = (global, "rope_parameters.full_attention");
        }
    }
    let own = |name: &str| family.local_theta.is_some() && name == "sliding_attention";
    if let Some((name, _)) = block.iter().find(|(name, value)| value.is_object() && !own(name)) {
        bail!(
            UnsupportedModel,
            "config key '{place}.{name}': this family has no rotation per layer type"
        );
    }
    let rope = Keys::new(block, place);
    arch.rope_theta = rope
        .float("rope_theta")?
        .or(keys.float("rope_theta")?)
        .unwrap_or(arch.rope_theta);
    let partial = rope
        .float("partial_rotary_factor")?
        .or(keys.float("partial_rotary_factor")?);
    arch.partial_rotary_factor = partial.unwrap_or(1.0);
    let frequencies = frequencies(arch)?;
    let kind = rope.string("rope_type")?.or(rope.string("type")?).unwrap_or("default");
    // Early Phi-3 configurations have other names for LongRoPE.
    let long = matches!(kind, "su" | "yarn") && rope.get("short_factor").is_some();
    let kind = if long { "longrope" } else { kind };
    let number = |key: &str| rope.float(key).and_then(|value| rope.need(key, value));
    match kind {
        "default" => {}
        "linear" => arch.rope_freq_factors = Some(rope::linear(number("factor")?, frequencies)?),
        "llama3" => {
            let llama3 = Llama3 {
                factor: number("factor")?,
                low_freq_factor: number("low_freq_factor")?,
                high_freq_factor: number("high_freq_factor")?,
                original_max_position_embeddings: number("original_max_position_embeddings")?,
            };
            arch.rope_freq_factors = Some(llama3.divisors(arch.rope_theta, frequencies)?);
        }
        "yarn" => {
            if rope.bool("truncate")? == Some(false) {
                bail!(
                    UnsupportedModel,
                    "config key '{place}.truncate' is false; only rounded correction ranges are supported"
                );
            }
            let factor = number("factor")?;
            let original = rope
                .size("original_max_position_embeddings")?
                .or(arch.max_position_embeddings);
            let scale = match (rope.float("mscale")?, rope.float("mscale_all_dim")?) {
                (Some(part), Some(all)) if part != 0.0 && all != 0.0 => {
                    rope::yarn_attention(factor, part) / rope::yarn_attention(factor, all)
                }
                _ => rope::yarn_attention(factor, 1.0),
            };
            arch.yarn = Some(Yarn {
                factor,
                original_max_position_embeddings: rope.need("original_max_position_embeddings", original)?,
                beta_fast: rope.float("beta_fast")?.unwrap_or(32.0),
                beta_slow: rope.float("beta_slow")?.unwrap_or(1.0),
                attention_factor: Some(rope.float("attention_factor")?.unwrap_or(scale)),
            });
        }
        "longrope" => longrope(keys, &rope, arch, frequencies, notes)?,
        other => bail!(
            UnsupportedModel,
            "config key '{place}' has rope type '{other}'; supported are default, linear, llama3, yarn, longrope"
        ),
    }
    Ok(())
}

/// LongRoPE has two lists of divisors: one for contexts up to the original length, one for longer ones. The container holds
/// one list, so the first is kept and the context is limited to the original length.
fn longrope(keys: &Keys, rope: &Keys, arch: &mut Arch, frequencies: usize, notes: &mut Vec<String>) -> Result<()> {
    let original = rope
        .size("original_max_position_embeddings")?
        .or(keys.size("original_max_position_embeddings")?);
    let original = keys.need("original_max_position_embeddings", original)?;
    let trained = keys.need("max_position_embeddings", arch.max_position_embeddings)?;
    let Some(list) = rope.get("short_factor").and_then(Value::as_array) else {
        bail!(UnsupportedModel, "{}: key 'short_factor' is not a list", rope.place);
    };
    let factors: Option<Vec<f64>> = list.iter().map(Value::as_f64).collect();
    let Some(factors) = factors.filter(|factors| factors.len() == frequencies) else {
        bail!(
            UnsupportedModel,
            "{}: key 'short_factor': expected {frequencies} numbers, found {} values",
            rope.place,
            list.len()
        );
    };
    let attention = match rope.float("attention_factor")? {
        Some(factor) => factor,
        None => rope::long_attention(trained as f64 / original as f64, original as f64)?,
    };
    rope::set_long(arch, factors, original, attention, notes);
    Ok(())
}

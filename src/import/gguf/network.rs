//! From the hyperparameters of a GGUF file to the container's description of the network.
//!
//! Keys that files leave out have the family's defaults, which are those of the programs that read such files.

use super::delta;
use super::keys::Keys;
use super::parts::Parts;
use crate::error::{Result, bail};
use crate::format::gguf::shortest;
use crate::format::{Arch, LayerType, Moe, Yarn};
use crate::import::arch::{Dims, frequencies, set_window, slides};
use crate::import::family::{Family, Window};
use crate::import::roles::{HEAD, LM_HEAD, TAIL};
use crate::import::rope;

/// Divisors of the rotary frequencies, stored as a tensor.
const ROPE_FREQS: &str = "rope_freqs.weight";
/// The two lists of LongRoPE.
const ROPE_SHORT: &str = "rope_factors_short.weight";
const ROPE_LONG: &str = "rope_factors_long.weight";

/// Whether a tensor of the file is part of the description, not a weight.
pub(super) fn describes(name: &str) -> bool {
    [ROPE_FREQS, ROPE_SHORT, ROPE_LONG].contains(&name)
}

/// Reads the description. Errors: `UnsupportedModel` with the key that is missing or has an unsupported value, `Parse` for
/// malformed values and tensors.
pub(super) fn read(parts: &Parts, keys: &Keys, family: &Family, notes: &mut Vec<String>) -> Result<Arch> {
    let Some((_, embed)) = HEAD.first().and_then(|role| parts.find(role.gguf)) else {
        bail!(MissingTensor, "the source lacks the token embedding");
    };
    let tied = TAIL
        .iter()
        .all(|role| role.name != LM_HEAD || parts.find(role.gguf).is_none());
    let (hidden, heads) = (keys.count("embedding_length")?, keys.count("attention.head_count")?);
    let head_dim = match keys.unsigned("attention.key_length")? {
        Some(length) => length,
        None if heads > 0 && hidden.is_multiple_of(heads) => hidden / heads,
        None => bail!(
            UnsupportedModel,
            "{}: {hidden} is not a multiple of {heads} heads",
            keys.full("embedding_length")
        ),
    };
    let vocab = embed.shape.first().copied().unwrap_or(0);
    for key in [
        "attention.value_length",
        "attention.key_length_swa",
        "attention.value_length_swa",
    ] {
        keys.same(key, head_dim)?;
    }
    keys.same("vocab_size", vocab)?;
    let dims = Dims {
        hidden,
        heads,
        head_dim,
        vocab,
        inter: match family.experts {
            Some(_) => keys.unsigned("feed_forward_length")?.unwrap_or(0),
            None => keys.count("feed_forward_length")?,
        },
        layers: keys
            .count("block_count")?
            .saturating_sub(delta::extra_blocks(keys, family)?),
        kv_heads: keys.unsigned("attention.head_count_kv")?.unwrap_or(heads),
    };
    let mut arch = dims.arch(family, parts.tensors().count())?;
    arch.tie_word_embeddings = tied;
    arch.rms_norm_eps = keys.need(
        "attention.layer_norm_rms_epsilon",
        keys.float("attention.layer_norm_rms_epsilon")?,
    )?;
    arch.max_position_embeddings = keys.size("context_length")?;
    let cap = |key: &str| -> Result<Option<f64>> { Ok(keys.float(key)?.or(family.default(key))) };
    arch.attn_logit_softcapping = cap("attn_logit_softcapping")?;
    arch.final_logit_softcapping = cap("final_logit_softcapping")?;
    if let Some(wide) = family.gguf_wide {
        let scalar = match arch.num_layers == wide {
            true => (arch.hidden_size / arch.num_attention_heads) as f64,
            false => arch.head_dim as f64,
        };
        arch.query_pre_attn_scalar = Some(scalar);
    }
    delta::read(keys, family, &mut arch)?;
    arch.moe = experts(parts, keys, family)?;
    layer_types(parts, keys, family, &mut arch)?;
    rotation(parts, keys, family, &mut arch, notes)?;
    Ok(arch)
}

/// The mixture of experts, in families that have one. If older files leave widths out, they are read from the tensors.
fn experts(parts: &Parts, keys: &Keys, family: &Family) -> Result<Option<Moe>> {
    if family.experts.is_none() {
        return Ok(None);
    }
    // The second to last dimension of the first tensor with this name after its layer's prefix.
    let width_of = |suffix: &str| {
        let mut named = parts.tensors().filter(|(_, tensor)| tensor.name.ends_with(suffix));
        let (_, tensor) = named.next()?;
        let rows = tensor.shape.iter().rev().nth(1).copied()?;
        usize::try_from(rows).ok()
    };
    let size = |key: &str, tensor: &str| -> Result<Option<usize>> { Ok(keys.size(key)?.or_else(|| width_of(tensor))) };
    let inter = size("expert_feed_forward_length", ".ffn_gate_exps.weight")?;
    let shared = size("expert_shared_feed_forward_length", ".ffn_gate_shexp.weight")?;
    let count = |key: &str| keys.size(key).and_then(|value| keys.need(key, value));
    // 1 is softmax, also the default.
    keys.same("expert_gating_func", 1)?;
    if let Some(scale) = keys
        .float("expert_weights_scale")?
        .filter(|&scale| scale != 0.0 && scale != 1.0)
    {
        bail!(
            UnsupportedModel,
            "metadata key '{}' is {scale}; the experts of {} are not scaled",
            keys.full("expert_weights_scale"),
            family.model_type
        );
    }
    let norm = keys.metadata.bool(&keys.full("expert_weights_norm"))?;
    Ok(Some(Moe {
        num_experts: count("expert_count")?,
        top_k: count("expert_used_count")?,
        moe_intermediate_size: keys.need("expert_feed_forward_length", inter)?,
        norm_topk_prob: norm.unwrap_or(family.gguf_renormalises),
        shared_expert_intermediate_size: shared.filter(|&width| width > 0),
        router_sigmoid: false,
        routed_scaling_factor: 1.0,
    }))
}

fn layer_types(parts: &Parts, keys: &Keys, family: &Family, arch: &mut Arch) -> Result<()> {
    const WINDOW: &str = "attention.sliding_window";
    const PATTERN: &str = "attention.sliding_window_pattern";
    let window = keys.size(WINDOW)?.filter(|&window| window > 0);
    let period = match family.window {
        Window::All => None,
        Window::Pattern => family.default("sliding_window_pattern").map(|period| period as usize),
        Window::Never | Window::FromMaxWindowLayers => {
            return match window {
                Some(window) => bail!(
                    UnsupportedModel,
                    "metadata key '{}' is {window}, but the layers with sliding windows are not specified",
                    keys.full(WINDOW)
                ),
                None => Ok(()),
            };
        }
    };
    if window.is_none() {
        return Ok(());
    }
    let (sliding, period) = if keys.is_list(PATTERN) {
        (keys.switches(PATTERN, arch.num_layers, parts.bytes())?, period)
    } else {
        // 0: all layers have the window.
        let period = keys.size(PATTERN)?.or(period).filter(|&period| period > 0);
        (
            (0..arch.num_layers).map(|layer| slides(layer, period)).collect(),
            period,
        )
    };
    for (slot, sliding) in arch.layer_types.iter_mut().zip(sliding) {
        if sliding {
            *slot = LayerType::SlidingAttention;
        }
    }
    set_window(arch, window, period)
}

fn rotation(parts: &Parts, keys: &Keys, family: &Family, arch: &mut Arch, notes: &mut Vec<String>) -> Result<()> {
    arch.rope_theta = keys
        .float("rope.freq_base")?
        .or(family.default("rope_theta"))
        .unwrap_or(arch.rope_theta);
    if let Some(rotated) = keys.unsigned("rope.dimension_count")? {
        arch.partial_rotary_factor = rotated as f64 / arch.head_dim as f64;
        keys.same("rope.dimension_count_swa", rotated)?;
    }
    match keys.float("rope.freq_base_swa")? {
        Some(base) if family.local_theta.is_none() && base != arch.rope_theta => bail!(
            UnsupportedModel,
            "metadata key '{}' is {base}, but sliding layers of {} models have no rotary base of their own",
            keys.full("rope.freq_base_swa"),
            family.model_type
        ),
        base => arch.rope_local_base_freq = family.local_theta.map(|theta| base.unwrap_or(theta)),
    }
    let frequencies = frequencies(arch)?;
    // Old files have the second key. A factor of 0 means none.
    let factor = match keys.float("rope.scaling.factor")? {
        None => keys.float("rope.scale_linear")?,
        factor => factor,
    };
    let factor = factor.filter(|&factor| factor != 0.0);
    let short = divisors(parts, ROPE_SHORT, frequencies)?;
    match keys.string("rope.scaling.type")? {
        None | Some("longrope") if short.is_some() => {}
        None | Some("linear") => {
            let factor = factor.filter(|&factor| factor != 1.0);
            arch.rope_freq_factors = factor.map(|factor| rope::linear(factor, frequencies)).transpose()?;
        }
        Some("none") => {}
        Some("yarn") => arch.yarn = Some(yarn(keys, keys.need("rope.scaling.factor", factor)?)?),
        Some(other) => bail!(
            UnsupportedModel,
            "{} is '{other}'; known are none, linear, yarn, and longrope with its tensors",
            keys.full("rope.scaling.type")
        ),
    }
    let freqs = divisors(parts, ROPE_FREQS, frequencies)?;
    if [
        arch.rope_freq_factors.is_some() || arch.yarn.is_some(),
        freqs.is_some(),
        short.is_some(),
    ]
    .into_iter()
    .filter(|&scales| scales)
    .count()
        > 1
    {
        bail!(
            UnsupportedModel,
            "expected one scaling of the rotation, found two or more of {} and the tensors '{ROPE_FREQS}' and '{ROPE_SHORT}'",
            keys.full("rope.scaling.type")
        );
    }
    if freqs.is_some() {
        arch.rope_freq_factors = freqs;
    }
    if let Some(short) = short {
        let original = keys.size("rope.scaling.original_context_length")?;
        let original = keys.need("rope.scaling.original_context_length", original)?;
        let trained = keys.need("context_length", arch.max_position_embeddings)?;
        let attention = match keys.float("rope.scaling.attn_factor")? {
            Some(factor) => factor,
            None => rope::long_attention(trained as f64 / original as f64, original as f64)?,
        };
        rope::set_long(arch, short, original, attention, notes);
    }
    Ok(())
}

fn yarn(keys: &Keys, factor: f64) -> Result<Yarn> {
    let original = keys.size("rope.scaling.original_context_length")?;
    let blend = keys.float("rope.scaling.yarn_ext_factor")?;
    if blend.is_some_and(|value| value != 1.0) {
        bail!(
            UnsupportedModel,
            "metadata key '{}': only 1 is known",
            keys.full("rope.scaling.yarn_ext_factor")
        );
    }
    // A factor in the file multiplies the default one.
    let extra = keys
        .float("rope.scaling.attn_factor")?
        .or(keys.float("rope.scaling.yarn_attn_factor")?);
    Ok(Yarn {
        factor,
        original_max_position_embeddings: keys.need("rope.scaling.original_context_length", original)?,
        beta_fast: keys.float("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
        beta_slow: keys.float("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
        attention_factor: Some(rope::yarn_attention(factor, 1.0) * extra.unwrap_or(1.0)),
    })
}

/// The values of a tensor with one divisor for each frequency, `None` when there is no such tensor.
fn divisors(parts: &Parts, name: &str, frequencies: usize) -> Result<Option<Vec<f64>>> {
    let Some((file, tensor)) = parts.find(name) else {
        return Ok(None);
    };
    if tensor.shape != [frequencies as u64] {
        bail!(
            Parse,
            "tensor '{name}' has shape {:?}, expected [{frequencies}]",
            tensor.shape
        );
    }
    let mut divisors = vec![0.0; frequencies];
    let bytes = file.bytes().get(tensor.range.clone()).unwrap_or_default();
    tensor.dtype.decoder(bytes, 1, frequencies)?.row(0, &mut divisors);
    Ok(Some(divisors.into_iter().map(shortest).collect()))
}

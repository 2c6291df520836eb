//! From a header and the tensors of a file to a [`Model`]. Every tensor is used or listed as unused, every shape is checked.

use super::binder::Binder;
use super::network::{Activation, Attention, FeedForward, HeadInput, Layer, Linear, Mixer, Model, Mtp};
use super::rope;
use super::rotation;
use crate::error::{Result, bail};
use crate::source::{Arch, HiddenAct, LayerType, MtpHidden, NormStyle, Tensors};

/// Binds the network that `arch` describes to `tensors`.
///
/// Errors: `MissingTensor` by name; `Parse` for shapes that contradict the header; `UnsupportedModel` for a network that this
/// program cannot run, by header key or tensor.
pub fn bind(arch: &Arch, tensors: &dyn Tensors) -> Result<Model> {
    let norm_add = check(arch)?;
    let (hidden, vocab) = (arch.hidden_size, arch.vocab_size);
    let mut binder = Binder::new(arch, tensors);
    let embed = binder.required("model.embed_tokens.weight", &[vocab as u64, hidden as u64])?;
    let ropes = match arch.rope_local_base_freq.is_some() || arch.local_partial_rotary_factor.is_some() {
        true => vec![rope::global(arch)?, rope::local(arch)?],
        false => vec![rope::global(arch)?],
    };
    let mut layers = Vec::new();
    for layer in 0..arch.num_layers {
        layers.push(binder.layer(layer, &format!("model.layers.{layer}"), ropes.len())?);
    }
    let final_norm = binder.vector("model.norm.weight", hidden)?;
    let lm_head = match arch.tie_word_embeddings {
        true => Linear {
            weight: embed,
            bias: None,
            rows: vocab,
            cols: hidden,
        },
        false => binder.linear("lm_head", vocab, hidden)?,
    };
    let mtp = binder.mtp(ropes.len())?;
    let rope_ends = rope::ends(arch);
    let unused = binder.unused();
    let mut model = Model {
        hidden,
        vocab,
        embed,
        embed_multiplier: arch.embed_multiplier as f32,
        layers,
        loops: arch.num_loops,
        loop_norm: arch.loop_final_norm == Some(true),
        final_norm,
        lm_head,
        mtp,
        norm_add,
        eps: arch.rms_norm_eps as f32,
        logit_multiplier: arch.logit_multiplier.unwrap_or(1.0) as f32,
        logit_softcap: arch.final_logit_softcapping.unwrap_or(0.0) as f32,
        activation: match arch.hidden_act {
            None | Some(HiddenAct::Silu) => Activation::Silu,
            Some(HiddenAct::GeluTanh) => Activation::GeluTanh,
        },
        ropes,
        masks: tensors.masks().cloned().unwrap_or_default(),
        max_positions: [arch.max_position_embeddings, rope_ends].into_iter().flatten().min(),
        rope_ends,
        rotation: None,
        unused,
    };
    model.rotation = rotation::bind(arch, tensors, &model)?;
    Ok(model)
}

/// Refuses constants that the kernels do not support. Returns the number that is added to norm weights.
///
/// Errors: `UnsupportedModel`.
fn check(arch: &Arch) -> Result<f32> {
    if arch.attention_sink == Some(true) {
        bail!(
            UnsupportedModel,
            "arch.attention_sink of {:?} is not supported",
            arch.arch_name
        );
    }
    if !arch.hidden_size.is_multiple_of(4) {
        bail!(
            UnsupportedModel,
            "arch.hidden_size {}: expected a multiple of 4",
            arch.hidden_size
        );
    }
    match arch.norm_style {
        Some(NormStyle::Qwen) => Ok(0.0),
        Some(NormStyle::Gemma) => Ok(1.0),
        None => bail!(
            UnsupportedModel,
            "arch.norm_style is absent, expected \"qwen\" or \"gemma\""
        ),
    }
}

/// The window of a layer, `None` = it attends to all positions. If all layers have the same type, every `pattern`-th attends to
/// all.
fn window(arch: &Arch, layer: usize) -> Result<Option<usize>> {
    // The layers of a draft head are numbered after the network's and have no window.
    if layer >= arch.num_layers {
        return Ok(None);
    }
    let alike = arch.layer_types.iter().all(|&ty| ty == LayerType::FullAttention);
    let slides = match arch.sliding_window_pattern {
        Some(pattern) if alike && arch.sliding_window.is_some() => !(layer + 1).is_multiple_of(pattern),
        _ => arch.layer_types.get(layer) == Some(&LayerType::SlidingAttention),
    };
    match (slides, arch.sliding_window) {
        (false, _) => Ok(None),
        (true, Some(window)) => Ok(Some(window)),
        (true, None) => bail!(
            Parse,
            "layer {layer} has a sliding window, but arch.sliding_window is absent"
        ),
    }
}

impl Binder<'_> {
    /// Layer number `layer`, whose tensors have the prefix `at`; there are `ropes` rotary tables.
    fn layer(&mut self, layer: usize, at: &str, ropes: usize) -> Result<Layer> {
        let name = |part: &str| format!("{at}.{part}");
        let hidden = self.arch.hidden_size;
        let mixer = match self.delta_net(layer, at)? {
            Some(delta_net) => Mixer::DeltaNet(delta_net),
            None => Mixer::Attention(self.attention(layer, at, ropes)?),
        };
        let ffn = match self.has(&name("mlp.gate.weight")) {
            true => FeedForward::Moe(self.moe(layer, at)?),
            false => FeedForward::Dense(self.ffn(&name("mlp"))?),
        };
        // With post-norms, `post_attention_layernorm` is one of them; without, it precedes the feed-forward network.
        let before = name("pre_feedforward_layernorm.weight");
        let after = name("post_feedforward_layernorm.weight");
        let has_post_norms = self.has(&before) || self.has(&after);
        let mut norm = |name: &str| self.vector(name, hidden);
        let attn_norm = norm(&name("input_layernorm.weight"))?;
        let post_attention = norm(&name("post_attention_layernorm.weight"))?;
        let (attn_post_norm, ffn_norm, ffn_post_norm) = match has_post_norms {
            true => (Some(post_attention), norm(&before)?, Some(norm(&after)?)),
            false => (None, post_attention, None),
        };
        Ok(Layer {
            attn_norm,
            mixer,
            attn_post_norm,
            ffn_norm,
            ffn,
            ffn_post_norm,
        })
    }

    fn attention(&mut self, layer: usize, at: &str, ropes: usize) -> Result<Attention> {
        let name = |part: &str| format!("{at}.self_attn.{part}");
        let arch = self.arch;
        let of = |per_layer: &Option<Vec<usize>>, all: usize| match per_layer {
            Some(heads) => heads.get(layer).copied().unwrap_or(all),
            None => all,
        };
        let (hidden, head_dim) = (arch.hidden_size, arch.head_dim);
        let heads = of(&arch.attention_heads_per_layer, arch.num_attention_heads);
        let kv_heads = of(&arch.kv_heads_per_layer, arch.num_kv_heads);
        let (q_rows, kv_rows) = (heads * head_dim, kv_heads * head_dim);
        // A query projection with twice the rows has gates.
        let gated = self.rows(&name("q_proj.weight")) == q_rows.checked_mul(2);
        let projections = if self.has(&name("qkv_proj.weight")) {
            vec![self.linear(&name("qkv_proj"), q_rows + 2 * kv_rows, hidden)?]
        } else {
            vec![
                self.linear(&name("q_proj"), if gated { 2 * q_rows } else { q_rows }, hidden)?,
                self.linear(&name("k_proj"), kv_rows, hidden)?,
                self.linear(&name("v_proj"), kv_rows, hidden)?,
            ]
        };
        let window = window(arch, layer)?;
        let scale = arch.query_pre_attn_scalar.unwrap_or(head_dim as f64);
        let attention = Attention {
            projections,
            gated,
            o: self.linear(&name("o_proj"), hidden, q_rows)?,
            q_norm: self.optional(&name("q_norm.weight"), &[head_dim as u64])?,
            k_norm: self.optional(&name("k_norm.weight"), &[head_dim as u64])?,
            norm_after_rope: arch.qk_norm_after_rope == Some(true),
            v_norm: arch.attn_v_norm == Some(true),
            heads,
            kv_heads,
            head_dim,
            scale: (1.0 / scale.sqrt()) as f32,
            softcap: arch.attn_logit_softcapping.unwrap_or(0.0) as f32,
            window,
            // The second table, if there is one, is that of layers with a window.
            rope: if window.is_some() { ropes - 1 } else { 0 },
        };
        if attention.q_norm.is_some() != attention.k_norm.is_some() {
            bail!(
                UnsupportedModel,
                "layer {layer} normalises only one of queries and keys"
            );
        }
        Ok(attention)
    }

    /// The draft head, if its tensors are present, under the container's names or those of published models.
    fn mtp(&mut self, ropes: usize) -> Result<Option<Mtp>> {
        let (arch, hidden) = (self.arch, self.arch.hidden_size);
        let spellings = [
            ("model.mtp", ["enorm", "hnorm", "eh_proj"]),
            ("mtp", ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc"]),
        ];
        let mut spellings = spellings.into_iter();
        let Some((at, [enorm, hnorm, eh_proj])) =
            spellings.find(|(at, [_, _, eh_proj])| self.has(&format!("{at}.{eh_proj}.weight")))
        else {
            return Ok(None);
        };
        if arch
            .mtp
            .as_ref()
            .is_some_and(|mtp| !(mtp.share_lm_head && mtp.share_embed))
        {
            bail!(
                UnsupportedModel,
                "a draft head with its own embedding or output projection is not supported"
            );
        }
        let mut layers = Vec::new();
        let prefix = |layer: usize| format!("{at}.layers.{layer}");
        while self.has_any(&format!("{}.", prefix(layers.len()))) {
            let layer = layers.len();
            layers.push(self.layer(arch.num_layers + layer, &prefix(layer), ropes)?);
        }
        if layers.is_empty() {
            bail!(
                MissingTensor,
                "the draft head '{at}.*' has no tensors '{}.*'",
                prefix(0)
            );
        }
        Ok(Some(Mtp {
            enorm: self.vector(&format!("{at}.{enorm}.weight"), hidden)?,
            hnorm: self.vector(&format!("{at}.{hnorm}.weight"), hidden)?,
            eh_proj: self.linear(&format!("{at}.{eh_proj}"), hidden, 2 * hidden)?,
            layers,
            norm: self.vector(&format!("{at}.norm.weight"), hidden)?,
            input: arch.mtp.as_ref().and_then(|mtp| mtp.hidden).map(|hidden| match hidden {
                MtpHidden::PreNorm => HeadInput::Stream,
                MtpHidden::PostNorm => HeadInput::Normed,
            }),
        }))
    }
}

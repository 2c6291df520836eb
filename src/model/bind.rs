//! From a header and a directory to a [`Model`]: every tensor is consumed or named as unused, every shape is checked.

use super::{Activation, Attention, FeedForward, Ffn, GateUp, HeadInput, Layer, Linear, Mixer, Model, Mtp, rope};
use crate::container::{Arch, HiddenAct, LayerType, MtpHidden, NormStyle, TensorId, Tensors};
use crate::error::{Result, bail};

/// Binds the network that `arch` describes to the tensors that are there.
///
/// Errors: `MissingTensor` by name; `Parse` for shapes that contradict the header; `UnsupportedModel` for what this program
/// cannot run, by key or tensor.
pub fn bind(arch: &Arch, tensors: &dyn Tensors) -> Result<Model> {
    refuse_unsupported(arch)?;
    let mut binder = Binder {
        tensors,
        used: vec![false; tensors.infos().len()],
    };
    let hidden = arch.hidden_size;
    if !hidden.is_multiple_of(4) {
        bail!(UnsupportedModel, "arch.hidden_size {hidden}: wanted a multiple of 4");
    }
    let norm_add = match arch.norm_style {
        Some(NormStyle::Qwen) => 0.0,
        Some(NormStyle::Gemma) => 1.0,
        None => bail!(
            UnsupportedModel,
            "arch.norm_style is absent, wanted \"qwen\" or \"gemma\""
        ),
    };
    let embed = binder.matrix("model.embed_tokens.weight", arch.vocab_size, hidden)?;
    let ropes = match arch.rope_local_base_freq.is_some() || arch.local_partial_rotary_factor.is_some() {
        true => vec![rope::global(arch)?, rope::local(arch)?],
        false => vec![rope::global(arch)?],
    };
    let mut layers = Vec::new();
    for layer in 0..arch.num_layers {
        layers.push(binder.layer(arch, layer, &format!("model.layers.{layer}"), ropes.len())?);
    }
    let final_norm = binder.vector("model.norm.weight", hidden)?;
    let tied = Linear {
        weight: embed,
        bias: None,
        rows: arch.vocab_size,
        cols: hidden,
    };
    let lm_head = match arch.tie_word_embeddings {
        true => tied,
        false => binder.linear("lm_head", arch.vocab_size, hidden)?,
    };
    let mtp = binder.mtp(arch, ropes.len())?;
    let scale = arch.query_pre_attn_scalar.unwrap_or(arch.head_dim as f64);
    let unused = (0..binder.used.len()).filter(|&id| !binder.used[id]).collect();
    Ok(Model {
        hidden,
        vocab: arch.vocab_size,
        head_dim: arch.head_dim,
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
        attn_scale: (1.0 / scale.sqrt()) as f32,
        attn_softcap: arch.attn_logit_softcapping.unwrap_or(0.0) as f32,
        logit_multiplier: arch.logit_multiplier.unwrap_or(1.0) as f32,
        logit_softcap: arch.final_logit_softcapping.unwrap_or(0.0) as f32,
        activation: match arch.hidden_act {
            None | Some(HiddenAct::Silu) => Activation::Silu,
            Some(HiddenAct::GeluTanh) => Activation::GeluTanh,
        },
        ropes,
        masks: tensors.masks().cloned().unwrap_or_default(),
        max_positions: [arch.max_position_embeddings, rope::ends(arch)]
            .into_iter()
            .flatten()
            .min(),
        rope_ends: rope::ends(arch),
        unused,
    })
}

/// What the header may ask for and this program does not do yet.
fn refuse_unsupported(arch: &Arch) -> Result<()> {
    if arch.attention_sink == Some(true) {
        bail!(
            UnsupportedModel,
            "arch.attention_sink of {:?} is not supported yet",
            arch.arch_name
        );
    }
    Ok(())
}

/// Positions that a layer's queries see, `None` = all. A pattern of N makes every Nth layer global when the header calls all
/// layers alike.
fn window(arch: &Arch, layer: usize) -> Result<Option<usize>> {
    // A draft head's layers come after the network's and see everything.
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
        (true, None) => bail!(Parse, "layer {layer} slides, but arch.sliding_window is absent"),
    }
}

pub(super) struct Binder<'a> {
    pub(super) tensors: &'a dyn Tensors,
    used: Vec<bool>,
}

impl Binder<'_> {
    pub(super) fn find(&mut self, name: &str) -> Option<TensorId> {
        let id = self.tensors.find(name)?;
        self.used[id] = true;
        Some(id)
    }

    pub(super) fn shaped(&mut self, name: &str, wanted: &[u64]) -> Result<Option<TensorId>> {
        let Some(id) = self.find(name) else { return Ok(None) };
        let found = &self.tensors.infos()[id].shape;
        if found != wanted {
            bail!(
                Parse,
                "tensor '{name}' has shape {found:?}, the header wants {wanted:?}"
            );
        }
        Ok(Some(id))
    }

    pub(super) fn required(&mut self, name: &str, wanted: &[u64]) -> Result<TensorId> {
        match self.shaped(name, wanted)? {
            Some(id) => Ok(id),
            None => bail!(MissingTensor, "the network needs tensor '{name}' of shape {wanted:?}"),
        }
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<TensorId> {
        self.required(name, &[rows as u64, cols as u64])
    }

    pub(super) fn vector(&mut self, name: &str, len: usize) -> Result<TensorId> {
        self.required(name, &[len as u64])
    }

    pub(super) fn linear(&mut self, name: &str, rows: usize, cols: usize) -> Result<Linear> {
        let weight = self.matrix(&format!("{name}.weight"), rows, cols)?;
        let bias = self.shaped(&format!("{name}.bias"), &[rows as u64])?;
        Ok(Linear {
            weight,
            bias,
            rows,
            cols,
        })
    }

    /// Layer number `layer`, whose tensors are named `at`.
    fn layer(&mut self, arch: &Arch, layer: usize, at: &str, ropes: usize) -> Result<Layer> {
        let name = |part: &str| format!("{at}.{part}");
        let hidden = arch.hidden_size;
        let mixer = match self.delta_net(arch, layer, at)? {
            Some(delta_net) => Mixer::DeltaNet(delta_net),
            None => Mixer::Attention(self.attention(arch, layer, at, ropes)?),
        };
        let ffn = match self.tensors.find(&name("mlp.gate.weight")) {
            Some(_) => FeedForward::Moe(self.moe(arch, layer, at)?),
            None => FeedForward::Dense(self.ffn(&name("mlp"), hidden)?),
        };
        let attn_norm = self.vector(&name("input_layernorm.weight"), hidden)?;
        // With norms on both sides of a block, `post_attention_layernorm` is what its name says; without, it precedes the
        // feed-forward network.
        let [before, behind] = ["pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"];
        let norms = if [before, behind]
            .iter()
            .any(|norm| self.tensors.find(&name(norm)).is_some())
        {
            [Some("post_attention_layernorm.weight"), Some(before), Some(behind)]
        } else {
            [None, Some("post_attention_layernorm.weight"), None]
        };
        let mut ids = [None; 3];
        for (id, norm) in ids.iter_mut().zip(norms) {
            *id = norm.map(|norm| self.vector(&name(norm), hidden)).transpose()?;
        }
        let [attn_post_norm, ffn_norm, ffn_post_norm] = ids;
        let Some(ffn_norm) = ffn_norm else {
            bail!(
                MissingTensor,
                "layer {layer} has no norm before its feed-forward network"
            );
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

    fn attention(&mut self, arch: &Arch, layer: usize, at: &str, ropes: usize) -> Result<Attention> {
        let name = |part: &str| format!("{at}.self_attn.{part}");
        let of = |per_layer: &Option<Vec<usize>>, all: usize| match per_layer {
            Some(heads) => heads.get(layer).copied().unwrap_or(all),
            None => all,
        };
        let (hidden, head_dim) = (arch.hidden_size, arch.head_dim);
        let heads = of(&arch.attention_heads_per_layer, arch.num_attention_heads);
        let kv_heads = of(&arch.kv_heads_per_layer, arch.num_kv_heads);
        let (q_rows, kv_rows) = (heads * head_dim, kv_heads * head_dim);
        // A query projection of twice the rows has a gate after each head.
        let found = self.tensors.find(&name("q_proj.weight"));
        let found_rows = found.map(|id| self.tensors.infos()[id].rows_cols().0);
        let gated = found_rows == q_rows.checked_mul(2);
        let projections = if self.tensors.find(&name("qkv_proj.weight")).is_some() {
            vec![self.linear(&name("qkv_proj"), q_rows + 2 * kv_rows, hidden)?]
        } else {
            vec![
                self.linear(&name("q_proj"), if gated { 2 * q_rows } else { q_rows }, hidden)?,
                self.linear(&name("k_proj"), kv_rows, hidden)?,
                self.linear(&name("v_proj"), kv_rows, hidden)?,
            ]
        };
        let window = window(arch, layer)?;
        let attention = Attention {
            projections,
            gated,
            o: self.linear(&name("o_proj"), hidden, q_rows)?,
            q_norm: self.shaped(&name("q_norm.weight"), &[head_dim as u64])?,
            k_norm: self.shaped(&name("k_norm.weight"), &[head_dim as u64])?,
            norm_after_rope: arch.qk_norm_after_rope == Some(true),
            v_norm: arch.attn_v_norm == Some(true),
            heads,
            kv_heads,
            window,
            // Layers that slide have the second table, where there are two.
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

    /// The gated network whose tensors' names begin with `prefix`.
    pub(super) fn ffn(&mut self, prefix: &str, hidden: usize) -> Result<Ffn> {
        let name = |part: &str| format!("{prefix}.{part}");
        let rows = |tensor: &str| {
            self.tensors
                .find(tensor)
                .map(|id| self.tensors.infos()[id].rows_cols().0)
        };
        // The directory decides a layer's width: pruned layers differ.
        let (gate_up, width) = match (rows(&name("gate_up_proj.weight")), rows(&name("gate_proj.weight"))) {
            (Some(rows), _) if rows.is_multiple_of(2) => (
                GateUp::Fused(self.linear(&name("gate_up_proj"), rows, hidden)?),
                rows / 2,
            ),
            (Some(rows), _) => bail!(
                Parse,
                "tensor '{}' has {rows} rows, wanted two halves",
                name("gate_up_proj.weight")
            ),
            (None, Some(width)) => {
                let gate = self.linear(&name("gate_proj"), width, hidden)?;
                (
                    GateUp::Split(gate, self.linear(&name("up_proj"), width, hidden)?),
                    width,
                )
            }
            (None, None) => bail!(MissingTensor, "the network needs tensor '{}'", name("gate_proj.weight")),
        };
        let down = self.linear(&name("down_proj"), hidden, width)?;
        Ok(Ffn { gate_up, down })
    }

    /// The draft head, where its tensors are there, under the container's names or the hub's.
    fn mtp(&mut self, arch: &Arch, ropes: usize) -> Result<Option<Mtp>> {
        let hidden = arch.hidden_size;
        let spellings = [
            ("model.mtp", ["enorm", "hnorm", "eh_proj"]),
            ("mtp", ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc"]),
        ];
        let there =
            |(at, [_, _, proj]): &(&str, [&str; 3])| self.tensors.find(&format!("{at}.{proj}.weight")).is_some();
        let Some((at, [enorm, hnorm, eh_proj])) = spellings.into_iter().find(there) else {
            return Ok(None);
        };
        if let Some(mtp) = &arch.mtp
            && !(mtp.share_lm_head && mtp.share_embed)
        {
            bail!(
                UnsupportedModel,
                "a draft head with an embedding or an output projection of its own is not supported yet"
            );
        }
        let mut layers = Vec::new();
        let prefix = |i: usize| format!("{at}.layers.{i}");
        while self
            .tensors
            .infos()
            .iter()
            .any(|info| info.name.starts_with(&format!("{}.", prefix(layers.len()))))
        {
            let i = layers.len();
            layers.push(self.layer(arch, arch.num_layers + i, &prefix(i), ropes)?);
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
            input: match arch.mtp.as_ref().and_then(|mtp| mtp.hidden) {
                None => HeadInput::Unsaid,
                Some(MtpHidden::PreNorm) => HeadInput::Stream,
                Some(MtpHidden::PostNorm) => HeadInput::Normed,
            },
        }))
    }
}

//! From a header and a directory to a [`Model`]: every tensor is consumed or named as unused, every shape is checked.

use super::{Activation, Attention, Ffn, Layer, Linear, Model, rope};
use crate::container::{Arch, HiddenAct, LayerType, NormStyle, TensorId, Tensors};
use crate::error::{Result, bail};

/// Binds the network that `arch` describes to the tensors that are there.
///
/// Errors: `MissingTensor` by name; `Parse` for shapes that contradict the header; `UnsupportedModel` for what this program
/// cannot run, by key or tensor.
pub fn bind(arch: &Arch, tensors: &dyn Tensors) -> Result<Model> {
    refuse_unsupported(arch)?;
    let mut binder = Binder { tensors, used: vec![false; tensors.infos().len()] };
    let hidden = arch.hidden_size;
    if !hidden.is_multiple_of(4) {
        bail!(UnsupportedModel, "arch.hidden_size {hidden}: wanted a multiple of 4");
    }
    let norm_add = match arch.norm_style {
        Some(NormStyle::Qwen) => 0.0,
        Some(NormStyle::Gemma) => 1.0,
        None => bail!(UnsupportedModel, "arch.norm_style is absent, wanted \"qwen\" or \"gemma\""),
    };
    let embed = binder.matrix("model.embed_tokens.weight", arch.vocab_size, hidden)?;
    let ropes = vec![rope::global(arch)?];
    let mut layers = Vec::new();
    for layer in 0..arch.num_layers {
        layers.push(binder.layer(arch, layer)?);
    }
    let final_norm = binder.vector("model.norm.weight", hidden)?;
    let tied = Linear { weight: embed, bias: None, rows: arch.vocab_size, cols: hidden };
    let lm_head = match arch.tie_word_embeddings {
        true => tied,
        false => binder.linear("lm_head", arch.vocab_size, hidden)?,
    };
    let scale = arch.query_pre_attn_scalar.unwrap_or(arch.head_dim as f64);
    let unused = (0..binder.used.len()).filter(|&id| !binder.used[id]).collect();
    Ok(Model {
        hidden,
        vocab: arch.vocab_size,
        head_dim: arch.head_dim,
        embed,
        embed_multiplier: arch.embed_multiplier as f32,
        layers,
        final_norm,
        lm_head,
        norm_add,
        eps: arch.rms_norm_eps as f32,
        attn_scale: (1.0 / scale.sqrt()) as f32,
        activation: match arch.hidden_act {
            None | Some(HiddenAct::Silu) => Activation::Silu,
            Some(HiddenAct::GeluTanh) => Activation::GeluTanh,
        },
        ropes,
        max_positions: arch.max_position_embeddings,
        unused,
    })
}

/// What the header may ask for and this program does not do yet.
fn refuse_unsupported(arch: &Arch) -> Result<()> {
    let asks = [
        ("attn_logit_softcapping", arch.attn_logit_softcapping.is_some()),
        ("final_logit_softcapping", arch.final_logit_softcapping.is_some()),
        ("logit_multiplier", arch.logit_multiplier.is_some_and(|factor| factor != 1.0)),
        ("sliding_window", arch.sliding_window.is_some()),
        ("rope_local_base_freq", arch.rope_local_base_freq.is_some()),
        ("local_partial_rotary_factor", arch.local_partial_rotary_factor.is_some()),
        ("attn_v_norm", arch.attn_v_norm == Some(true)),
        ("qk_norm_after_rope", arch.qk_norm_after_rope == Some(true)),
        ("attention_sink", arch.attention_sink == Some(true)),
        ("num_loops", arch.num_loops != 1),
    ];
    if let Some((key, _)) = asks.iter().find(|(_, asked)| *asked) {
        bail!(UnsupportedModel, "arch.{key} of {:?} is not supported yet", arch.arch_name);
    }
    if let Some(layer) = arch.layer_types.iter().position(|&ty| ty != LayerType::FullAttention) {
        bail!(UnsupportedModel, "layer {layer} of {:?} is {:?}, which is not supported yet", arch.arch_name, arch.layer_types[layer]);
    }
    Ok(())
}

struct Binder<'a> {
    tensors: &'a dyn Tensors,
    used: Vec<bool>,
}

impl Binder<'_> {
    fn find(&mut self, name: &str) -> Option<TensorId> {
        let id = self.tensors.find(name)?;
        self.used[id] = true;
        Some(id)
    }

    fn shaped(&mut self, name: &str, wanted: &[u64]) -> Result<Option<TensorId>> {
        let Some(id) = self.find(name) else { return Ok(None) };
        let found = &self.tensors.infos()[id].shape;
        if found != wanted {
            bail!(Parse, "tensor '{name}' has shape {found:?}, the header wants {wanted:?}");
        }
        Ok(Some(id))
    }

    fn required(&mut self, name: &str, wanted: &[u64]) -> Result<TensorId> {
        match self.shaped(name, wanted)? {
            Some(id) => Ok(id),
            None => bail!(MissingTensor, "the network needs tensor '{name}' of shape {wanted:?}"),
        }
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<TensorId> {
        self.required(name, &[rows as u64, cols as u64])
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<TensorId> {
        self.required(name, &[len as u64])
    }

    fn linear(&mut self, name: &str, rows: usize, cols: usize) -> Result<Linear> {
        let weight = self.matrix(&format!("{name}.weight"), rows, cols)?;
        let bias = self.shaped(&format!("{name}.bias"), &[rows as u64])?;
        Ok(Linear { weight, bias, rows, cols })
    }

    fn layer(&mut self, arch: &Arch, layer: usize) -> Result<Layer> {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        for (marker, what) in [
            ("mlp.gate.weight", "a mixture of experts"),
            ("linear_attn.in_proj_qkvz.weight", "linear attention"),
            ("linear_attn.in_proj_qkv.weight", "linear attention"),
            ("pre_feedforward_layernorm.weight", "norms around the feed-forward network"),
            ("post_feedforward_layernorm.weight", "norms around the feed-forward network"),
            ("self_attn.qkv_proj.weight", "a fused qkv projection"),
        ] {
            if self.tensors.find(&name(marker)).is_some() {
                bail!(UnsupportedModel, "layer {layer} has {what} (tensor '{}'), which is not supported yet", name(marker));
            }
        }
        let of = |per_layer: &Option<Vec<usize>>, all: usize| match per_layer {
            Some(heads) => heads.get(layer).copied().unwrap_or(all),
            None => all,
        };
        let hidden = arch.hidden_size;
        let heads = of(&arch.attention_heads_per_layer, arch.num_attention_heads);
        let kv_heads = of(&arch.kv_heads_per_layer, arch.num_kv_heads);
        let (q_rows, kv_rows) = (heads * arch.head_dim, kv_heads * arch.head_dim);
        let attention = Attention {
            q: self.linear(&name("self_attn.q_proj"), q_rows, hidden)?,
            k: self.linear(&name("self_attn.k_proj"), kv_rows, hidden)?,
            v: self.linear(&name("self_attn.v_proj"), kv_rows, hidden)?,
            o: self.linear(&name("self_attn.o_proj"), hidden, q_rows)?,
            q_norm: self.shaped(&name("self_attn.q_norm.weight"), &[arch.head_dim as u64])?,
            k_norm: self.shaped(&name("self_attn.k_norm.weight"), &[arch.head_dim as u64])?,
            heads,
            kv_heads,
            window: None,
            rope: 0,
        };
        if attention.q_norm.is_some() != attention.k_norm.is_some() {
            bail!(UnsupportedModel, "layer {layer} normalises only one of queries and keys");
        }
        // The directory decides a layer's width: pruned layers differ.
        let gate = name("mlp.gate_proj.weight");
        let width = match self.tensors.find(&gate) {
            Some(id) => self.tensors.infos()[id].rows_cols().0,
            None => bail!(MissingTensor, "the network needs tensor '{gate}'"),
        };
        let ffn = Ffn {
            gate: self.linear(&name("mlp.gate_proj"), width, hidden)?,
            up: self.linear(&name("mlp.up_proj"), width, hidden)?,
            down: self.linear(&name("mlp.down_proj"), hidden, width)?,
        };
        Ok(Layer {
            attn_norm: self.vector(&name("input_layernorm.weight"), hidden)?,
            attention,
            ffn_norm: self.vector(&name("post_attention_layernorm.weight"), hidden)?,
            ffn,
        })
    }
}

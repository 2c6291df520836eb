//! The model families that can be imported, one row each, and the tensors of their layers, one row each.
//!
//! Both importers read these tables: Hugging Face names are the container's names, GGUF names are mapped to them.
//! Knows no file format. A new family is a row here, and rows in [`LAYER`] when it brings tensors of its own.

use crate::container::NormStyle;

/// Which layers attend through a sliding window, by the family's own rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Window {
    /// None, whatever the configuration says.
    Never,
    /// Those from `max_window_layers` on, when `use_sliding_window` is true.
    FromMaxWindowLayers,
}

/// What sets a family apart.
#[derive(Debug)]
pub(super) struct Family {
    /// `model_type` in a Hugging Face configuration and `arch_name` in the container.
    pub model_type: &'static str,
    /// `general.architecture` in a GGUF file.
    pub gguf: &'static str,
    /// How norm weights apply.
    pub norm_style: NormStyle,
    /// Whether q and k are normalised per head before they rotate.
    pub qk_norm: bool,
    /// Whether GGUF files hold the rows of q and k with the two halves of each head interleaved.
    pub gguf_interleaves_qk: bool,
    /// `tie_word_embeddings` when the configuration does not say.
    pub tied: bool,
    /// `head_dim` when the configuration does not say; `None` is hidden / heads.
    pub head_dim: Option<u64>,
    /// The sliding-window rule.
    pub window: Window,
}

const FAMILIES: [Family; 3] = [
    Family {
        model_type: "llama",
        gguf: "llama",
        norm_style: NormStyle::Qwen,
        qk_norm: false,
        gguf_interleaves_qk: true,
        tied: false,
        head_dim: None,
        window: Window::Never,
    },
    Family {
        model_type: "qwen2",
        gguf: "qwen2",
        norm_style: NormStyle::Qwen,
        qk_norm: false,
        gguf_interleaves_qk: false,
        tied: false,
        head_dim: None,
        window: Window::FromMaxWindowLayers,
    },
    Family {
        model_type: "qwen3",
        gguf: "qwen3",
        norm_style: NormStyle::Qwen,
        qk_norm: true,
        gguf_interleaves_qk: false,
        tied: false,
        head_dim: Some(128),
        window: Window::FromMaxWindowLayers,
    },
];

impl Family {
    /// The family of a Hugging Face `model_type`.
    pub fn of_model_type(name: &str) -> Option<&'static Family> {
        FAMILIES.iter().find(|family| family.model_type == name)
    }

    /// The family of a GGUF `general.architecture`.
    pub fn of_gguf(name: &str) -> Option<&'static Family> {
        FAMILIES.iter().find(|family| family.gguf == name)
    }

    /// The names for a message that refuses another one.
    pub fn names() -> String {
        FAMILIES.map(|family| family.model_type).join(", ")
    }
}

/// A length that the configuration determines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dim {
    Hidden,
    Inter,
    Vocab,
    /// Query heads × head_dim.
    Query,
    /// Key-value heads × head_dim.
    KeyValue,
    Head,
}

/// When a tensor must be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    Always,
    /// Carried over when present.
    Optional,
    /// Always in families with `qk_norm`, never in others.
    QkNorm,
}

/// One tensor of the network: its two names, its shape, and what is special about it.
#[derive(Debug)]
pub(super) struct Role {
    /// The name in the container, after the layer's prefix.
    pub name: &'static str,
    /// The name in a GGUF file, after the layer's prefix.
    pub gguf: &'static str,
    /// Row-major shape.
    pub shape: &'static [Dim],
    /// When it must be there.
    pub need: Need,
    /// Its rows are heads that rotate.
    pub rotates: bool,
}

const fn role(name: &'static str, gguf: &'static str, shape: &'static [Dim], need: Need) -> Role {
    Role {
        name,
        gguf,
        shape,
        need,
        rotates: false,
    }
}

const fn rotating(name: &'static str, gguf: &'static str, shape: &'static [Dim], need: Need) -> Role {
    Role {
        name,
        gguf,
        shape,
        need,
        rotates: true,
    }
}

use Dim::{Head, Hidden, Inter, KeyValue, Query, Vocab};

/// Name of the token embedding.
pub(super) const EMBED: &str = "model.embed_tokens.weight";
/// Name of the output projection.
pub(super) const LM_HEAD: &str = "lm_head.weight";
/// What the layers' names start with in the container, before the layer's number.
pub(super) const LAYER_PREFIX: &str = "model.layers.";
/// What the layers' names start with in a GGUF file.
pub(super) const GGUF_LAYER_PREFIX: &str = "blk.";

/// Before the layers.
pub(super) const HEAD: &[Role] = &[role(EMBED, "token_embd.weight", &[Vocab, Hidden], Need::Always)];

/// Each layer, in the order in which it is written.
pub(super) const LAYER: &[Role] = &[
    role("input_layernorm.weight", "attn_norm.weight", &[Hidden], Need::Always),
    rotating(
        "self_attn.q_proj.weight",
        "attn_q.weight",
        &[Query, Hidden],
        Need::Always,
    ),
    rotating("self_attn.q_proj.bias", "attn_q.bias", &[Query], Need::Optional),
    rotating(
        "self_attn.k_proj.weight",
        "attn_k.weight",
        &[KeyValue, Hidden],
        Need::Always,
    ),
    rotating("self_attn.k_proj.bias", "attn_k.bias", &[KeyValue], Need::Optional),
    role(
        "self_attn.v_proj.weight",
        "attn_v.weight",
        &[KeyValue, Hidden],
        Need::Always,
    ),
    role("self_attn.v_proj.bias", "attn_v.bias", &[KeyValue], Need::Optional),
    role(
        "self_attn.o_proj.weight",
        "attn_output.weight",
        &[Hidden, Query],
        Need::Always,
    ),
    role("self_attn.o_proj.bias", "attn_output.bias", &[Hidden], Need::Optional),
    role("self_attn.q_norm.weight", "attn_q_norm.weight", &[Head], Need::QkNorm),
    role("self_attn.k_norm.weight", "attn_k_norm.weight", &[Head], Need::QkNorm),
    role(
        "post_attention_layernorm.weight",
        "ffn_norm.weight",
        &[Hidden],
        Need::Always,
    ),
    role(
        "mlp.gate_proj.weight",
        "ffn_gate.weight",
        &[Inter, Hidden],
        Need::Always,
    ),
    role("mlp.gate_proj.bias", "ffn_gate.bias", &[Inter], Need::Optional),
    role("mlp.up_proj.weight", "ffn_up.weight", &[Inter, Hidden], Need::Always),
    role("mlp.up_proj.bias", "ffn_up.bias", &[Inter], Need::Optional),
    role(
        "mlp.down_proj.weight",
        "ffn_down.weight",
        &[Hidden, Inter],
        Need::Always,
    ),
    role("mlp.down_proj.bias", "ffn_down.bias", &[Hidden], Need::Optional),
];

/// After the layers. The output projection is optional here; a tied model does without it.
pub(super) const TAIL: &[Role] = &[
    role("model.norm.weight", "output_norm.weight", &[Hidden], Need::Always),
    role(LM_HEAD, "output.weight", &[Vocab, Hidden], Need::Optional),
];

//! The model families that can be imported, one row each.
//!
//! Both importers read this table. A new family is a row here, and rows in `roles` for tensors that no other family has. Knows
//! no file format.

use crate::format::{HiddenAct, NormStyle};

/// The family's rule for which layers attend through a sliding window. A list of layer types overrides it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Window {
    /// No layer, even if the configuration has a window.
    Never,
    /// The layers from `max_window_layers` on, if `use_sliding_window` is true.
    FromMaxWindowLayers,
    /// All layers, if there is a window.
    All,
    /// All layers except every `sliding_window_pattern`-th.
    Pattern,
}

/// How the input projections of Gated DeltaNet layers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Delta {
    /// q, k and v in one matrix; z, b and a in one each.
    Split,
    /// q, k, v and z of each key head in one matrix, b and a of each in another.
    Fused,
}

/// Whether the weights of the experts used for a token are divided by their sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Renormalise {
    /// Always; the configuration has no key for it.
    Always,
    /// As `norm_topk_prob` says; this if the key is absent.
    Configured(bool),
}

/// One family.
#[derive(Debug)]
pub(super) struct Family {
    /// `model_type` in a Hugging Face configuration and `arch_name` in the container.
    pub model_type: &'static str,
    /// `general.architecture` in a GGUF file.
    pub gguf: &'static str,
    /// How norm weights apply. If they apply as 1+w, GGUF files store 1+w.
    pub norm_style: NormStyle,
    /// Whether q and k are normalised per head before the rotation.
    pub qk_norm: bool,
    /// Families with Gated DeltaNet layers: how their inputs are stored. All layers except every `full_attention_interval`-th
    /// are Gated DeltaNet, unless there is a list of layer types. The queries of the other layers have a gate.
    pub delta: Option<Delta>,
    /// Whether attention and feed-forward network have a norm before and after them.
    pub sandwich: bool,
    /// Whether q, k and v are one matrix, and gate and up another.
    pub fused: bool,
    /// Whether embeddings are multiplied by √hidden.
    pub scales_embedding: bool,
    /// Whether GGUF files hold the rows of q and k with the two halves of each head interleaved.
    pub gguf_interleaves_qk: bool,
    /// Families with a special attention scale: the layer count of the model size whose scale is 1/√(hidden / heads). The other
    /// sizes have 1/√head_dim. GGUF files do not store the scale.
    pub gguf_wide: Option<usize>,
    /// The default of `tie_word_embeddings`.
    pub tied: bool,
    /// The default activation.
    pub activation: HiddenAct,
    /// The sliding-window rule.
    pub window: Window,
    /// Families whose layers may be mixtures of experts: how the weights of the experts used are normalised.
    pub experts: Option<Renormalise>,
    /// Whether they are renormalised in GGUF files, most of which do not store it.
    pub gguf_renormalises: bool,
    /// Families with a separate rotation in sliding layers: its default base. It is not scaled.
    pub local_theta: Option<f64>,
    /// Defaults of other configuration keys that are commonly left out.
    pub defaults: &'static [(&'static str, f64)],
}

/// Values that most families share.
const PLAIN: Family = Family {
    model_type: "llama",
    gguf: "llama",
    norm_style: NormStyle::Qwen,
    qk_norm: false,
    delta: None,
    sandwich: false,
    fused: false,
    scales_embedding: false,
    gguf_interleaves_qk: false,
    gguf_wide: None,
    tied: false,
    activation: HiddenAct::Silu,
    window: Window::Never,
    experts: None,
    gguf_renormalises: false,
    local_theta: None,
    defaults: &[],
};

/// Values that the families with Gated DeltaNet layers share.
const RECURRENT: Family = Family {
    model_type: "qwen3_5_text",
    gguf: "qwen35",
    norm_style: NormStyle::Gemma,
    qk_norm: true,
    delta: Some(Delta::Split),
    defaults: &[
        ("head_dim", 256.0),
        ("partial_rotary_factor", 0.25),
        ("full_attention_interval", 4.0),
        ("linear_conv_kernel_dim", 4.0),
        ("linear_key_head_dim", 128.0),
        ("linear_value_head_dim", 128.0),
        ("linear_num_key_heads", 16.0),
        ("linear_num_value_heads", 32.0),
    ],
    ..PLAIN
};

/// The families. If several rows have the same GGUF architecture, the first one is used, but see [`Family::of_gguf`].
const FAMILIES: [Family; 12] = [
    Family {
        gguf_interleaves_qk: true,
        ..PLAIN
    },
    Family {
        model_type: "mistral",
        gguf_interleaves_qk: true,
        window: Window::All,
        defaults: &[("num_key_value_heads", 8.0), ("sliding_window", 4096.0)],
        ..PLAIN
    },
    Family {
        model_type: "qwen2",
        gguf: "qwen2",
        window: Window::FromMaxWindowLayers,
        ..PLAIN
    },
    Family {
        model_type: "qwen3",
        gguf: "qwen3",
        qk_norm: true,
        window: Window::FromMaxWindowLayers,
        defaults: &[("head_dim", 128.0)],
        ..PLAIN
    },
    RECURRENT,
    Family {
        model_type: "qwen3_next",
        gguf: "qwen3next",
        gguf_renormalises: true,
        delta: Some(Delta::Fused),
        experts: Some(Renormalise::Configured(true)),
        ..RECURRENT
    },
    Family {
        model_type: "qwen3_5_moe_text",
        gguf: "qwen35moe",
        gguf_renormalises: true,
        experts: Some(Renormalise::Always),
        ..RECURRENT
    },
    Family {
        model_type: "qwen2_moe",
        gguf: "qwen2moe",
        window: Window::FromMaxWindowLayers,
        experts: Some(Renormalise::Configured(false)),
        ..PLAIN
    },
    Family {
        model_type: "qwen3_moe",
        gguf: "qwen3moe",
        qk_norm: true,
        window: Window::FromMaxWindowLayers,
        experts: Some(Renormalise::Configured(false)),
        gguf_renormalises: true,
        defaults: &[("head_dim", 128.0)],
        ..PLAIN
    },
    Family {
        model_type: "gemma2",
        gguf: "gemma2",
        gguf_wide: Some(46),
        norm_style: NormStyle::Gemma,
        sandwich: true,
        scales_embedding: true,
        tied: true,
        activation: HiddenAct::GeluTanh,
        window: Window::Pattern,
        defaults: &[
            ("num_attention_heads", 8.0),
            ("num_key_value_heads", 4.0),
            ("head_dim", 256.0),
            ("vocab_size", 256_000.0),
            ("max_position_embeddings", 8192.0),
            ("query_pre_attn_scalar", 256.0),
            ("attn_logit_softcapping", 50.0),
            ("final_logit_softcapping", 30.0),
            ("sliding_window", 4096.0),
            ("sliding_window_pattern", 2.0),
        ],
        ..PLAIN
    },
    Family {
        model_type: "gemma3_text",
        gguf: "gemma3",
        gguf_wide: Some(62),
        norm_style: NormStyle::Gemma,
        qk_norm: true,
        sandwich: true,
        scales_embedding: true,
        tied: true,
        activation: HiddenAct::GeluTanh,
        window: Window::Pattern,
        local_theta: Some(10_000.0),
        defaults: &[
            ("num_attention_heads", 8.0),
            ("num_key_value_heads", 4.0),
            ("head_dim", 256.0),
            ("vocab_size", 262_208.0),
            ("max_position_embeddings", 131_072.0),
            ("query_pre_attn_scalar", 256.0),
            ("rope_theta", 1_000_000.0),
            ("sliding_window", 4096.0),
            ("sliding_window_pattern", 6.0),
        ],
        ..PLAIN
    },
    Family {
        model_type: "phi3",
        gguf: "phi3",
        fused: true,
        window: Window::All,
        defaults: &[("original_max_position_embeddings", 4096.0)],
        ..PLAIN
    },
];

impl Family {
    /// The family of a Hugging Face `model_type`.
    pub fn of_model_type(name: &str) -> Option<&'static Family> {
        FAMILIES.iter().find(|family| family.model_type == name)
    }

    /// The family of a GGUF `general.architecture`. `windowed`: whether the file has a sliding window.
    pub fn of_gguf(name: &str, windowed: bool) -> Option<&'static Family> {
        let mut rows = FAMILIES.iter().filter(|family| family.gguf == name);
        let first = rows.next();
        // Mistral's files have the architecture llama; only the window distinguishes them.
        match first {
            Some(family) if windowed && family.window == Window::Never => rows.next().or(first),
            _ => first,
        }
    }

    /// The default of a configuration key.
    pub fn default(&self, key: &str) -> Option<f64> {
        let found = self.defaults.iter().find(|(name, _)| *name == key);
        found.map(|&(_, value)| value)
    }

    /// All GGUF architectures, for error messages.
    pub fn gguf_names() -> String {
        let mut names = FAMILIES.map(|family| family.gguf).to_vec();
        names.dedup();
        names.join(", ")
    }

    /// All model types, for error messages.
    pub fn names() -> String {
        FAMILIES.map(|family| family.model_type).join(", ")
    }
}

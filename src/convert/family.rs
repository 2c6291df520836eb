//! The model families that can be imported, one row each, and the tensors of their layers, one row each.
//!
//! Both importers read these tables: Hugging Face names are the container's names, GGUF names are mapped to them.
//! Knows no file format. A new family is a row here, and rows in [`LAYER`] when it brings tensors of its own.

use crate::container::{HiddenAct, LayerType, NormStyle};

/// Which layers attend through a sliding window, by the family's own rule. A list of layer types overrides it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Window {
    /// None, whatever the configuration says.
    Never,
    /// Those from `max_window_layers` on, when `use_sliding_window` is true.
    FromMaxWindowLayers,
    /// All, when there is a window.
    All,
    /// All but every `sliding_window_pattern`-th.
    Pattern,
}

/// How the inputs of Gated DeltaNet layers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Delta {
    /// q, k and v in one matrix; z, b and a in one each.
    Split,
    /// q, k, v and z of each key head in one matrix, b and a of each in another.
    Fused,
}

/// Whether the weights of the experts that a token takes are divided by their sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Renormalise {
    /// Always; there is no key.
    Always,
    /// As `norm_topk_prob` says, and this when it does not.
    AsSaid(bool),
}

/// What sets a family apart.
#[derive(Debug)]
pub(super) struct Family {
    /// `model_type` in a Hugging Face configuration and `arch_name` in the container.
    pub model_type: &'static str,
    /// `general.architecture` in a GGUF file; empty when such files are not known.
    pub gguf: &'static str,
    /// How norm weights apply. GGUF files of families with 1+w hold 1+w.
    pub norm_style: NormStyle,
    /// Whether q and k are normalised per head before they rotate.
    pub qk_norm: bool,
    /// Which layers are Gated DeltaNet is said layer by layer, or every `full_attention_interval`-th is not; in these families
    /// queries of the others have a gate.
    pub delta: Option<Delta>,
    /// Whether attention and feed-forward network have a norm on both sides.
    pub sandwich: bool,
    /// Whether q, k and v are one matrix, and gate and up another.
    pub fused: bool,
    /// Whether embeddings are multiplied by √hidden.
    pub scales_embedding: bool,
    /// Whether GGUF files hold the rows of q and k with the two halves of each head interleaved.
    pub gguf_interleaves_qk: bool,
    /// In families with a scale of their own for attention: how many layers the size has whose scale is 1/√(hidden / heads).
    /// In the others it is 1/√head_dim. GGUF files do not say.
    pub gguf_wide: Option<usize>,
    /// `tie_word_embeddings` when the configuration does not say.
    pub tied: bool,
    /// The activation when the configuration does not say.
    pub activation: HiddenAct,
    /// The sliding-window rule.
    pub window: Window,
    /// Whether layers may be mixtures of experts, and how the weights of the chosen ones become what they are.
    pub experts: Option<Renormalise>,
    /// Whether the weights of chosen experts are renormalised in models of the family that were made into GGUF files, which
    /// do not say.
    pub gguf_renormalises: bool,
    /// The base of the rotation in sliding layers, where it is their own and nothing else scales it.
    pub local_theta: Option<f64>,
    /// What other absent configuration keys mean, where leaving them out is common.
    pub defaults: &'static [(&'static str, f64)],
}

/// What most families have in common.
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

/// What families with Gated DeltaNet layers have in common.
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

/// Which family a GGUF architecture is of is decided by the first row that has it.
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
        experts: Some(Renormalise::AsSaid(true)),
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
        experts: Some(Renormalise::AsSaid(false)),
        ..PLAIN
    },
    Family {
        model_type: "qwen3_moe",
        gguf: "qwen3moe",
        qk_norm: true,
        window: Window::FromMaxWindowLayers,
        experts: Some(Renormalise::AsSaid(false)),
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

    /// The family of a GGUF `general.architecture`. `windowed`: the file has a sliding window.
    pub fn of_gguf(name: &str, windowed: bool) -> Option<&'static Family> {
        let mut rows = FAMILIES.iter().filter(|family| !name.is_empty() && family.gguf == name);
        let first = rows.next();
        // Mistral's files are called llama; only the window tells them apart.
        match first {
            Some(family) if windowed && family.window == Window::Never => rows.next().or(first),
            _ => first,
        }
    }

    /// What an absent key means.
    pub fn default(&self, key: &str) -> Option<f64> {
        self.defaults
            .iter()
            .find(|(name, _)| *name == key)
            .map(|&(_, value)| value)
    }

    /// The architectures of GGUF files for a message that refuses another one.
    pub fn gguf_names() -> String {
        let mut names: Vec<&str> = FAMILIES
            .iter()
            .map(|family| family.gguf)
            .filter(|name| !name.is_empty())
            .collect();
        names.dedup();
        names.join(", ")
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
    /// Query heads × head_dim, and as much for their gates.
    TwoQuery,
    /// Key-value heads × head_dim.
    KeyValue,
    Head,
    /// Query heads and twice the key-value heads, × head_dim.
    Fused,
    /// Gate and up, twice the FFN's width.
    TwoInter,
    TwoHidden,
    /// Channels of a Gated DeltaNet's convolution: q, k and v.
    DeltaChannels,
    /// Value heads × their width.
    DeltaValues,
    /// q, k, v and z.
    DeltaAll,
    DeltaHeads,
    TwoDeltaHeads,
    DeltaHead,
    One,
    Taps,
    /// Experts of a layer.
    Experts,
    /// Width of an expert.
    ExpertInter,
    /// Width of the shared expert.
    SharedInter,
}

/// Which families have a tensor, and whether it must be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    Always,
    /// Carried over when present.
    Optional,
    /// In families with `qk_norm`.
    QkNorm,
    /// In families whose queries have no gate and a matrix of their own; the second says whether it must be there.
    PlainQuery(bool),
    /// In families whose queries have a gate; the second says whether it must be there.
    GatedQuery(bool),
    /// In families with Gated DeltaNet layers.
    Delta,
    /// In those whose inputs are stored like this.
    DeltaOf(Delta),
    /// In families with four norms a layer.
    Sandwich,
    /// In families with two norms a layer.
    TwoNorms,
    /// In those that also have Gated DeltaNet layers.
    DeltaNorms,
    /// In families whose projections are separate; the second says whether it must be there.
    Split(bool),
    /// In families whose projections are fused; the second says whether it must be there.
    Fused(bool),
    /// In mixtures of experts.
    Experts,
    /// In mixtures with a shared expert.
    Shared,
}

impl Need {
    /// Whether `family` must have the tensor; `None` when it never has it.
    pub fn of(self, family: &Family) -> Option<bool> {
        let (has, required) = match self {
            Need::Always => (true, true),
            Need::Optional => (true, false),
            Need::QkNorm => (family.qk_norm, true),
            Need::PlainQuery(required) => (!family.fused && family.delta.is_none(), required),
            Need::GatedQuery(required) => (family.delta.is_some(), required),
            Need::Delta => (family.delta.is_some(), true),
            Need::DeltaOf(delta) => (family.delta == Some(delta), true),
            Need::Sandwich => (family.sandwich, true),
            Need::TwoNorms => (!family.sandwich && family.delta.is_none(), true),
            Need::DeltaNorms => (!family.sandwich && family.delta.is_some(), true),
            Need::Split(required) => (!family.fused, required),
            Need::Fused(required) => (family.fused, required),
            Need::Experts => (family.experts.is_some(), true),
            // Whether there is one is in the dimensions.
            Need::Shared => (family.experts.is_some(), true),
        };
        has.then_some(required)
    }
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

use Dim::{
    DeltaAll, DeltaChannels, DeltaHead, DeltaHeads, DeltaValues, ExpertInter, Experts, Fused, Head, Hidden, Inter,
    KeyValue, One, Query, SharedInter, Taps, TwoDeltaHeads, TwoHidden, TwoInter, TwoQuery, Vocab,
};

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

/// What the names of softmax attention and of a Gated DeltaNet start with, after the layer's prefix.
const ATTENTION: &str = "self_attn.";
const DELTA_NET: &str = "linear_attn.";

/// Each layer, in the order in which it is written.
pub(super) const LAYER: &[Role] = &[
    role("input_layernorm.weight", "attn_norm.weight", &[Hidden], Need::Always),
    role(
        "self_attn.qkv_proj.weight",
        "attn_qkv.weight",
        &[Fused, Hidden],
        Need::Fused(true),
    ),
    role("self_attn.qkv_proj.bias", "attn_qkv.bias", &[Fused], Need::Fused(false)),
    rotating(
        "self_attn.q_proj.weight",
        "attn_q.weight",
        &[Query, Hidden],
        Need::PlainQuery(true),
    ),
    rotating(
        "self_attn.q_proj.bias",
        "attn_q.bias",
        &[Query],
        Need::PlainQuery(false),
    ),
    role(
        "self_attn.q_proj.weight",
        "attn_q.weight",
        &[TwoQuery, Hidden],
        Need::GatedQuery(true),
    ),
    role(
        "self_attn.q_proj.bias",
        "attn_q.bias",
        &[TwoQuery],
        Need::GatedQuery(false),
    ),
    rotating(
        "self_attn.k_proj.weight",
        "attn_k.weight",
        &[KeyValue, Hidden],
        Need::Split(true),
    ),
    rotating("self_attn.k_proj.bias", "attn_k.bias", &[KeyValue], Need::Split(false)),
    role(
        "self_attn.v_proj.weight",
        "attn_v.weight",
        &[KeyValue, Hidden],
        Need::Split(true),
    ),
    role("self_attn.v_proj.bias", "attn_v.bias", &[KeyValue], Need::Split(false)),
    role(
        "self_attn.o_proj.weight",
        "attn_output.weight",
        &[Hidden, Query],
        Need::Always,
    ),
    role("self_attn.o_proj.bias", "attn_output.bias", &[Hidden], Need::Optional),
    role("self_attn.q_norm.weight", "attn_q_norm.weight", &[Head], Need::QkNorm),
    role("self_attn.k_norm.weight", "attn_k_norm.weight", &[Head], Need::QkNorm),
    role("linear_attn.A_log", "ssm_a", &[DeltaHeads], Need::Delta),
    role(
        "linear_attn.conv1d.weight",
        "ssm_conv1d.weight",
        &[DeltaChannels, One, Taps],
        Need::Delta,
    ),
    role("linear_attn.dt_bias", "ssm_dt.bias", &[DeltaHeads], Need::Delta),
    role(
        "linear_attn.in_proj_qkv.weight",
        "attn_qkv.weight",
        &[DeltaChannels, Hidden],
        Need::DeltaOf(Delta::Split),
    ),
    role(
        "linear_attn.in_proj_z.weight",
        "attn_gate.weight",
        &[DeltaValues, Hidden],
        Need::DeltaOf(Delta::Split),
    ),
    role(
        "linear_attn.in_proj_b.weight",
        "ssm_beta.weight",
        &[DeltaHeads, Hidden],
        Need::DeltaOf(Delta::Split),
    ),
    role(
        "linear_attn.in_proj_a.weight",
        "ssm_alpha.weight",
        &[DeltaHeads, Hidden],
        Need::DeltaOf(Delta::Split),
    ),
    role(
        "linear_attn.in_proj_qkvz.weight",
        "ssm_in.weight",
        &[DeltaAll, Hidden],
        Need::DeltaOf(Delta::Fused),
    ),
    role(
        "linear_attn.in_proj_ba.weight",
        "ssm_ba.weight",
        &[TwoDeltaHeads, Hidden],
        Need::DeltaOf(Delta::Fused),
    ),
    role("linear_attn.norm.weight", "ssm_norm.weight", &[DeltaHead], Need::Delta),
    role(
        "linear_attn.out_proj.weight",
        "ssm_out.weight",
        &[Hidden, DeltaValues],
        Need::Delta,
    ),
    role(
        "post_attention_layernorm.weight",
        "ffn_norm.weight",
        &[Hidden],
        Need::TwoNorms,
    ),
    role(
        "post_attention_layernorm.weight",
        "post_attention_norm.weight",
        &[Hidden],
        Need::DeltaNorms,
    ),
    role(
        "post_attention_layernorm.weight",
        "post_attention_norm.weight",
        &[Hidden],
        Need::Sandwich,
    ),
    role(
        "pre_feedforward_layernorm.weight",
        "ffn_norm.weight",
        &[Hidden],
        Need::Sandwich,
    ),
    role(
        "mlp.gate_up_proj.weight",
        "ffn_up.weight",
        &[TwoInter, Hidden],
        Need::Fused(true),
    ),
    role("mlp.gate_up_proj.bias", "ffn_up.bias", &[TwoInter], Need::Fused(false)),
    role(
        "mlp.gate_proj.weight",
        "ffn_gate.weight",
        &[Inter, Hidden],
        Need::Split(true),
    ),
    role("mlp.gate_proj.bias", "ffn_gate.bias", &[Inter], Need::Split(false)),
    role(
        "mlp.up_proj.weight",
        "ffn_up.weight",
        &[Inter, Hidden],
        Need::Split(true),
    ),
    role("mlp.up_proj.bias", "ffn_up.bias", &[Inter], Need::Split(false)),
    role(
        "mlp.down_proj.weight",
        "ffn_down.weight",
        &[Hidden, Inter],
        Need::Always,
    ),
    role("mlp.down_proj.bias", "ffn_down.bias", &[Hidden], Need::Optional),
    role(
        "post_feedforward_layernorm.weight",
        "post_ffw_norm.weight",
        &[Hidden],
        Need::Sandwich,
    ),
];

/// The roles of a layer of this type.
pub(super) fn layer_roles(kind: LayerType) -> impl Iterator<Item = &'static Role> {
    let other = match kind {
        LayerType::LinearAttention => ATTENTION,
        LayerType::FullAttention | LayerType::SlidingAttention => DELTA_NET,
    };
    LAYER.iter().filter(move |role| !role.name.starts_with(other))
}

/// Whether a tensor steers the recurrence, and is small for how much it does.
pub(super) fn steers(name: &str) -> bool {
    const GATES: [&str; 3] = ["in_proj_a.weight", "in_proj_b.weight", "in_proj_ba.weight"];
    GATES.iter().any(|gate| name.ends_with(gate))
}

/// The parts of a dense feed-forward network, which a mixture has none of, begin with this.
pub(super) const DENSE_PREFIX: &str = "mlp.";
/// What a layer that is a mixture has, after the layer's prefix.
pub(super) const ROUTER: &str = "mlp.gate.weight";

/// A mixture of experts before its experts.
pub(super) const MIXTURE: &[Role] = &[role(ROUTER, "ffn_gate_inp.weight", &[Experts, Hidden], Need::Experts)];

/// Each expert. They are written role by role: a projection of every expert, then the next one. The GGUF name is that of all
/// experts in one tensor.
pub(super) const EXPERT: &[Role] = &[
    role(
        "gate_proj.weight",
        "ffn_gate_exps.weight",
        &[ExpertInter, Hidden],
        Need::Experts,
    ),
    role(
        "up_proj.weight",
        "ffn_up_exps.weight",
        &[ExpertInter, Hidden],
        Need::Experts,
    ),
    role(
        "down_proj.weight",
        "ffn_down_exps.weight",
        &[Hidden, ExpertInter],
        Need::Experts,
    ),
];

/// The expert that every token takes.
pub(super) const SHARED_EXPERT: &[Role] = &[
    role(
        "mlp.shared_expert.gate_proj.weight",
        "ffn_gate_shexp.weight",
        &[SharedInter, Hidden],
        Need::Shared,
    ),
    role(
        "mlp.shared_expert.up_proj.weight",
        "ffn_up_shexp.weight",
        &[SharedInter, Hidden],
        Need::Shared,
    ),
    role(
        "mlp.shared_expert.down_proj.weight",
        "ffn_down_shexp.weight",
        &[Hidden, SharedInter],
        Need::Shared,
    ),
    role(
        "mlp.shared_expert_gate.weight",
        "ffn_gate_inp_shexp.weight",
        &[One, Hidden],
        Need::Shared,
    ),
];

/// After the layers. The output projection is optional here; a tied model does without it.
pub(super) const TAIL: &[Role] = &[
    role("model.norm.weight", "output_norm.weight", &[Hidden], Need::Always),
    role(LM_HEAD, "output.weight", &[Vocab, Hidden], Need::Optional),
];

/// What the names of a multi-token head start with. Its layers are called as those of the network.
pub(super) const MTP_PREFIX: &str = "model.mtp.";

/// How published models call the parts of a multi-token head, and what the container calls them.
pub(super) const MTP_NAMES: [(&str, &str); 4] = [
    ("mtp.fc.", "model.mtp.eh_proj."),
    ("mtp.pre_fc_norm_embedding.", "model.mtp.enorm."),
    ("mtp.pre_fc_norm_hidden.", "model.mtp.hnorm."),
    ("mtp.", MTP_PREFIX),
];

/// A multi-token head before its layers. GGUF files of these families have none.
pub(super) const MTP: &[Role] = &[
    role("enorm.weight", "", &[Hidden], Need::Always),
    role("hnorm.weight", "", &[Hidden], Need::Always),
    role("eh_proj.weight", "", &[Hidden, TwoHidden], Need::Always),
];

/// A multi-token head after its layers.
pub(super) const MTP_TAIL: &[Role] = &[role("norm.weight", "", &[Hidden], Need::Always)];

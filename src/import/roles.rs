//! The tensors of the networks that can be imported, one row each: name in the container and in GGUF files, shape, and the
//! families that have it.
//!
//! Hugging Face names are the container's names. Knows no file format.

use super::family::{Delta, Family};
use crate::format::LayerType;

/// A length that follows from the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dim {
    Hidden,
    Inter,
    Vocab,
    /// Query heads × head_dim.
    Query,
    /// Twice [`Dim::Query`]: the query heads and their gates.
    TwoQuery,
    /// Key-value heads × head_dim.
    KeyValue,
    Head,
    /// (Query heads + 2 · key-value heads) × head_dim.
    Fused,
    /// Gate and up: twice the width of the feed-forward network.
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

/// Which families have a tensor, and whether it is required.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    Always,
    /// In any family, not required.
    Optional,
    /// In families with `qk_norm`.
    QkNorm,
    /// In families with a separate query projection without gates; whether it is required.
    PlainQuery(bool),
    /// In families whose queries have gates; whether it is required.
    GatedQuery(bool),
    /// In families with Gated DeltaNet layers.
    Delta,
    /// In families with Gated DeltaNet layers whose inputs are stored like this.
    DeltaOf(Delta),
    /// In families with Gated DeltaNet layers: the projections to q, k, v and z, stored like this. Files of families whose
    /// inputs are fused may have them split; then a layer has only these.
    DeltaInputs(Delta),
    /// In families with four norms a layer.
    Sandwich,
    /// In families with two norms a layer and without Gated DeltaNet layers.
    TwoNorms,
    /// In families with two norms a layer and with Gated DeltaNet layers.
    DeltaNorms,
    /// In families with separate projections; whether it is required.
    Split(bool),
    /// In families with fused projections; whether it is required.
    Fused(bool),
    /// In mixtures of experts.
    Experts,
    /// In mixtures with a shared expert.
    Shared,
}

impl Need {
    /// Whether the tensor is required in `family`; `None` if the family never has it.
    pub fn of(self, family: &Family) -> Option<bool> {
        let (has, required) = match self {
            Need::Always => (true, true),
            Need::Optional => (true, false),
            Need::QkNorm => (family.qk_norm, true),
            Need::PlainQuery(required) => (!family.fused && family.delta.is_none(), required),
            Need::GatedQuery(required) => (family.delta.is_some(), required),
            Need::Delta => (family.delta.is_some(), true),
            Need::DeltaOf(delta) => (family.delta == Some(delta), true),
            Need::DeltaInputs(Delta::Split) => (family.delta.is_some(), true),
            Need::DeltaInputs(Delta::Fused) => (family.delta == Some(Delta::Fused), true),
            Need::Sandwich => (family.sandwich, true),
            Need::TwoNorms => (!family.sandwich && family.delta.is_none(), true),
            Need::DeltaNorms => (!family.sandwich && family.delta.is_some(), true),
            Need::Split(required) => (!family.fused, required),
            Need::Fused(required) => (family.fused, required),
            Need::Experts => (family.experts.is_some(), true),
            // The dimensions say whether there is a shared expert.
            Need::Shared => (family.experts.is_some(), true),
        };
        has.then_some(required)
    }
}

/// One tensor of the network.
#[derive(Debug)]
pub(super) struct Role {
    /// The name in the container, after the layer's prefix.
    pub name: &'static str,
    /// The name in a GGUF file, after the layer's prefix.
    pub gguf: &'static str,
    /// Row-major shape.
    pub shape: &'static [Dim],
    /// Which families have it.
    pub need: Need,
    /// Whether its rows are heads that are rotated.
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
pub const EMBED: &str = "model.embed_tokens.weight";
/// Name of the output projection.
pub const LM_HEAD: &str = "lm_head.weight";
/// Prefix of the layers' tensors in the container, before the layer's number.
pub const LAYER_PREFIX: &str = "model.layers.";
/// Prefix of the layers' tensors in a GGUF file, before the layer's number.
pub(super) const GGUF_LAYER_PREFIX: &str = "blk.";

/// The tensors before the layers.
pub(super) const HEAD: &[Role] = &[role(EMBED, "token_embd.weight", &[Vocab, Hidden], Need::Always)];

/// Prefixes of softmax attention and of Gated DeltaNet, after the layer's prefix.
const ATTENTION: &str = "self_attn.";
const DELTA_NET: &str = "linear_attn.";
/// The projection to q, k and v of a layer whose inputs are split, after the layer's prefix.
pub(super) const DELTA_INPUT: &str = "linear_attn.in_proj_qkv.weight";

/// The tensors of a layer, in the order in which they are written.
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
        DELTA_INPUT,
        "attn_qkv.weight",
        &[DeltaChannels, Hidden],
        Need::DeltaInputs(Delta::Split),
    ),
    role(
        "linear_attn.in_proj_z.weight",
        "attn_gate.weight",
        &[DeltaValues, Hidden],
        Need::DeltaInputs(Delta::Split),
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
        Need::DeltaInputs(Delta::Fused),
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

/// Whether a tensor is a gate of a recurrence. Gates are small and errors in them are amplified.
#[cfg(feature = "tools")]
pub fn is_recurrent_gate(name: &str) -> bool {
    const GATES: [&str; 3] = ["in_proj_a.weight", "in_proj_b.weight", "in_proj_ba.weight"];
    GATES.iter().any(|gate| name.ends_with(gate))
}

/// Whether a tensor routes tokens to experts, or weights the shared expert.
pub fn is_router(name: &str) -> bool {
    name.ends_with(ROUTER) || name.ends_with("mlp.shared_expert_gate.weight")
}

/// Prefix of the tensors of a dense feed-forward network, after the layer's prefix.
pub(super) const DENSE_PREFIX: &str = "mlp.";
/// The router of a mixture of experts, after the layer's prefix.
pub(super) const ROUTER: &str = "mlp.gate.weight";

/// The tensors of a mixture of experts before those of its experts.
pub(super) const MIXTURE: &[Role] = &[role(ROUTER, "ffn_gate_inp.weight", &[Experts, Hidden], Need::Experts)];

/// The tensors of an expert. They are written projection by projection: the first one of every expert, then the second. The
/// GGUF name is that of one tensor with all experts.
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

/// The tensors of the shared expert, which every token uses.
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

/// The tensors after the layers. Tied models have no output projection.
pub(super) const TAIL: &[Role] = &[
    role("model.norm.weight", "output_norm.weight", &[Hidden], Need::Always),
    role(LM_HEAD, "output.weight", &[Vocab, Hidden], Need::Optional),
];

/// Prefix of the draft head (multi-token prediction). The names in its layers are those of the network's layers.
pub(super) const MTP_PREFIX: &str = "model.mtp.";

/// Prefixes of the draft head's tensors in published models, and in the container.
pub(super) const MTP_NAMES: [(&str, &str); 4] = [
    ("mtp.fc.", "model.mtp.eh_proj."),
    ("mtp.pre_fc_norm_embedding.", "model.mtp.enorm."),
    ("mtp.pre_fc_norm_hidden.", "model.mtp.hnorm."),
    ("mtp.", MTP_PREFIX),
];

/// The tensors of a draft head before its layers. GGUF files of these families have none.
pub(super) const MTP: &[Role] = &[
    role("enorm.weight", "", &[Hidden], Need::Always),
    role("hnorm.weight", "", &[Hidden], Need::Always),
    role("eh_proj.weight", "", &[Hidden, TwoHidden], Need::Always),
];

/// The tensors of a draft head after its layers.
pub(super) const MTP_TAIL: &[Role] = &[role("norm.weight", "", &[Hidden], Need::Always)];

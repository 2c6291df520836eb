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
    /// In mixtures of experts. The dimensions say whether there is a shared expert.
    Experts,
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

/// A table of tensors, one row each. `rotates` at the end of a row sets that field.
macro_rules! rows {
    ($($name:tt, $gguf:literal, [$($dim:ident),*], $need:ident $(($which:expr))? $(, $rotates:ident)?;)*) => {
        &[$(Role {
            name: $name,
            gguf: $gguf,
            shape: &[$(Dim::$dim),*],
            need: Need::$need $(($which))?,
            rotates: false,
        } $(.$rotates())?),*]
    };
}

impl Role {
    const fn rotates(mut self) -> Role {
        self.rotates = true;
        self
    }
}

/// Name of the token embedding.
pub const EMBED: &str = "model.embed_tokens.weight";
/// Name of the output projection.
pub const LM_HEAD: &str = "lm_head.weight";
/// Prefix of the layers' tensors in the container, before the layer's number.
pub const LAYER_PREFIX: &str = "model.layers.";
/// Prefix of the layers' tensors in a GGUF file, before the layer's number.
pub(super) const GGUF_LAYER_PREFIX: &str = "blk.";

/// The projection to q, k and v of a layer whose inputs are split, after the layer's prefix.
pub(super) const DELTA_INPUT: &str = "linear_attn.in_proj_qkv.weight";

/// The convolution of a recurrence, after the layer's prefix.
pub(super) const CONVOLUTION: &str = "linear_attn.conv1d.weight";

/// The tensors before the layers.
pub(super) const HEAD: &[Role] = rows! {
    EMBED, "token_embd.weight", [Vocab, Hidden], Always;
};

/// The tensors of a layer, in the order in which they are written.
pub(super) const LAYER: &[Role] = rows! {
    "input_layernorm.weight", "attn_norm.weight", [Hidden], Always;
    "self_attn.qkv_proj.weight", "attn_qkv.weight", [Fused, Hidden], Fused(true);
    "self_attn.qkv_proj.bias", "attn_qkv.bias", [Fused], Fused(false);
    "self_attn.q_proj.weight", "attn_q.weight", [Query, Hidden], PlainQuery(true), rotates;
    "self_attn.q_proj.bias", "attn_q.bias", [Query], PlainQuery(false), rotates;
    "self_attn.q_proj.weight", "attn_q.weight", [TwoQuery, Hidden], GatedQuery(true);
    "self_attn.q_proj.bias", "attn_q.bias", [TwoQuery], GatedQuery(false);
    "self_attn.k_proj.weight", "attn_k.weight", [KeyValue, Hidden], Split(true), rotates;
    "self_attn.k_proj.bias", "attn_k.bias", [KeyValue], Split(false), rotates;
    "self_attn.v_proj.weight", "attn_v.weight", [KeyValue, Hidden], Split(true);
    "self_attn.v_proj.bias", "attn_v.bias", [KeyValue], Split(false);
    "self_attn.o_proj.weight", "attn_output.weight", [Hidden, Query], Always;
    "self_attn.o_proj.bias", "attn_output.bias", [Hidden], Optional;
    "self_attn.q_norm.weight", "attn_q_norm.weight", [Head], QkNorm;
    "self_attn.k_norm.weight", "attn_k_norm.weight", [Head], QkNorm;
    "linear_attn.A_log", "ssm_a", [DeltaHeads], Delta;
    CONVOLUTION, "ssm_conv1d.weight", [DeltaChannels, One, Taps], Delta;
    "linear_attn.dt_bias", "ssm_dt.bias", [DeltaHeads], Delta;
    DELTA_INPUT, "attn_qkv.weight", [DeltaChannels, Hidden], DeltaInputs(Delta::Split);
    "linear_attn.in_proj_z.weight", "attn_gate.weight", [DeltaValues, Hidden], DeltaInputs(Delta::Split);
    "linear_attn.in_proj_b.weight", "ssm_beta.weight", [DeltaHeads, Hidden], DeltaOf(Delta::Split);
    "linear_attn.in_proj_a.weight", "ssm_alpha.weight", [DeltaHeads, Hidden], DeltaOf(Delta::Split);
    "linear_attn.in_proj_qkvz.weight", "ssm_in.weight", [DeltaAll, Hidden], DeltaInputs(Delta::Fused);
    "linear_attn.in_proj_ba.weight", "ssm_ba.weight", [TwoDeltaHeads, Hidden], DeltaOf(Delta::Fused);
    "linear_attn.norm.weight", "ssm_norm.weight", [DeltaHead], Delta;
    "linear_attn.out_proj.weight", "ssm_out.weight", [Hidden, DeltaValues], Delta;
    "post_attention_layernorm.weight", "ffn_norm.weight", [Hidden], TwoNorms;
    "post_attention_layernorm.weight", "post_attention_norm.weight", [Hidden], DeltaNorms;
    "post_attention_layernorm.weight", "post_attention_norm.weight", [Hidden], Sandwich;
    "pre_feedforward_layernorm.weight", "ffn_norm.weight", [Hidden], Sandwich;
    "mlp.gate_up_proj.weight", "ffn_up.weight", [TwoInter, Hidden], Fused(true);
    "mlp.gate_up_proj.bias", "ffn_up.bias", [TwoInter], Fused(false);
    "mlp.gate_proj.weight", "ffn_gate.weight", [Inter, Hidden], Split(true);
    "mlp.gate_proj.bias", "ffn_gate.bias", [Inter], Split(false);
    "mlp.up_proj.weight", "ffn_up.weight", [Inter, Hidden], Split(true);
    "mlp.up_proj.bias", "ffn_up.bias", [Inter], Split(false);
    "mlp.down_proj.weight", "ffn_down.weight", [Hidden, Inter], Always;
    "mlp.down_proj.bias", "ffn_down.bias", [Hidden], Optional;
    "post_feedforward_layernorm.weight", "post_ffw_norm.weight", [Hidden], Sandwich;
};

/// The roles of a layer of this type.
pub(super) fn layer_roles(kind: LayerType) -> impl Iterator<Item = &'static Role> {
    let other = match kind {
        LayerType::LinearAttention => "self_attn.",
        LayerType::FullAttention | LayerType::SlidingAttention => "linear_attn.",
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
pub(super) const MIXTURE: &[Role] = rows! {
    ROUTER, "ffn_gate_inp.weight", [Experts, Hidden], Experts;
};

/// The tensors of an expert. They are written projection by projection: the first one of every expert, then the second. The
/// GGUF name is that of one tensor with all experts.
pub(super) const EXPERT: &[Role] = rows! {
    "gate_proj.weight", "ffn_gate_exps.weight", [ExpertInter, Hidden], Experts;
    "up_proj.weight", "ffn_up_exps.weight", [ExpertInter, Hidden], Experts;
    "down_proj.weight", "ffn_down_exps.weight", [Hidden, ExpertInter], Experts;
};

/// The tensors of the shared expert, which every token uses.
pub(super) const SHARED_EXPERT: &[Role] = rows! {
    "mlp.shared_expert.gate_proj.weight", "ffn_gate_shexp.weight", [SharedInter, Hidden], Experts;
    "mlp.shared_expert.up_proj.weight", "ffn_up_shexp.weight", [SharedInter, Hidden], Experts;
    "mlp.shared_expert.down_proj.weight", "ffn_down_shexp.weight", [Hidden, SharedInter], Experts;
    "mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight", [One, Hidden], Experts;
};

/// The tensors after the layers. Tied models have no output projection.
pub(super) const TAIL: &[Role] = rows! {
    "model.norm.weight", "output_norm.weight", [Hidden], Always;
    LM_HEAD, "output.weight", [Vocab, Hidden], Optional;
};

/// Prefix of the draft head (multi-token prediction). The names in its layers are those of the network's layers.
pub const MTP_PREFIX: &str = "model.mtp.";

/// Prefixes of the draft head's tensors in published models, and in the container.
pub(super) const MTP_NAMES: [(&str, &str); 4] = [
    ("mtp.fc.", "model.mtp.eh_proj."),
    ("mtp.pre_fc_norm_embedding.", "model.mtp.enorm."),
    ("mtp.pre_fc_norm_hidden.", "model.mtp.hnorm."),
    ("mtp.", MTP_PREFIX),
];

/// The tensors of a draft head before its layers. In GGUF files the head is a block after the layers.
pub(super) const MTP: &[Role] = rows! {
    "enorm.weight", "nextn.enorm.weight", [Hidden], Always;
    "hnorm.weight", "nextn.hnorm.weight", [Hidden], Always;
    "eh_proj.weight", "nextn.eh_proj.weight", [Hidden, TwoHidden], Always;
};

/// The tensors of a draft head after its layers.
pub(super) const MTP_TAIL: &[Role] = rows! {
    "norm.weight", "nextn.shared_head_norm.weight", [Hidden], Always;
};

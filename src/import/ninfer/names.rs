//! Names of objects, and the tensors that have their rows.
//!
//! An object of a layer may hold several projections, one below the other: the last part of its name is a list of roles, as in
//! `gate_up`, whose rows follow in this order. Tensors of the network are made of the rows of such roles.

use crate::format::Arch;
use crate::import::arch::length;
use crate::import::family::Family;
use crate::import::roles::{CONVOLUTION, Dim, EMBED, LM_HEAD};

/// Prefix of the objects of the language model.
pub const TEXT: &str = "text/";
pub const LAYERS: &str = "text/layers/";
/// Prefix of the resources that the frontend reads.
pub const FRONTEND: &str = "frontend/";
/// The signs of rotated weights, and the width of each vector of signs.
pub const SIGNS: &str = "text/hadamard_signs";
pub const WIDTHS: &str = "text/hadamard_widths";
/// A shorter output projection that proposes tokens, with a list of its tokens. It is not needed.
pub const DRAFT_HEAD: &str = "text/draft_head";

/// Objects outside of the layers.
pub const OUTSIDE: [(&str, &str); 3] = [
    ("text/token_embedding", EMBED),
    ("text/final_norm", "model.norm.weight"),
    ("text/output_head", LM_HEAD),
];

/// Objects of a layer that are one tensor.
pub const WHOLE: [(&str, &str); 11] = [
    ("input_norm", "input_layernorm.weight"),
    ("post_attention_norm", "post_attention_layernorm.weight"),
    ("attention/output", "self_attn.o_proj.weight"),
    ("attention/query_norm", "self_attn.q_norm.weight"),
    ("attention/key_norm", "self_attn.k_norm.weight"),
    ("gdn/output", "linear_attn.out_proj.weight"),
    ("gdn/convolution", CONVOLUTION),
    ("gdn/a_log", "linear_attn.A_log"),
    ("gdn/dt_bias", "linear_attn.dt_bias"),
    ("gdn/norm", "linear_attn.norm.weight"),
    ("mlp/down", "mlp.down_proj.weight"),
];

/// Roles of projections, with the part of the layer to which they belong, and their rows.
pub const ROLES: [(&str, &str, Dim); 12] = [
    ("attention", "query", Dim::Query),
    ("attention", "key", Dim::KeyValue),
    ("attention", "gate", Dim::Query),
    ("attention", "value", Dim::KeyValue),
    ("gdn", "query", KEYS),
    ("gdn", "key", KEYS),
    ("gdn", "value", Dim::DeltaValues),
    ("gdn", "z", Dim::DeltaValues),
    ("gdn", "a", Dim::DeltaHeads),
    ("gdn", "b", Dim::DeltaHeads),
    ("mlp", "gate", Dim::Inter),
    ("mlp", "up", Dim::Inter),
];

/// Keys of a recurrence: half of the channels that are no values.
const KEYS: Dim = Dim::DeltaChannels;

/// Tensors of a layer, and the roles whose rows they have, one below the other.
pub const FROM_ROLES: [(&str, &str, &[&str]); 9] = [
    (QUERY, "attention", &["query"]),
    ("self_attn.k_proj.weight", "attention", &["key"]),
    ("self_attn.v_proj.weight", "attention", &["value"]),
    ("linear_attn.in_proj_qkv.weight", "gdn", &["query", "key", "value"]),
    ("linear_attn.in_proj_z.weight", "gdn", &["z"]),
    ("linear_attn.in_proj_a.weight", "gdn", &["a"]),
    ("linear_attn.in_proj_b.weight", "gdn", &["b"]),
    ("mlp.gate_proj.weight", "mlp", &["gate"]),
    ("mlp.up_proj.weight", "mlp", &["up"]),
];

/// In families whose queries have gates: the rows of a head, then those of its gate, head by head.
const QUERY: &str = "self_attn.q_proj.weight";

/// The number of a layer, in its usual spelling, and the rest of the name.
pub fn numbered(name: &str) -> Option<(u64, &str)> {
    let (number, rest) = name.split_once('/')?;
    let layer = number.parse::<u64>().ok().filter(|layer| layer.to_string() == number)?;
    Some((layer, rest))
}

/// The part of the layer, and the roles in the last part of a name with their rows; `None` if one is unknown.
pub fn roles(name: &str) -> Option<(&'static str, Vec<(&'static str, Dim)>)> {
    let (group, list) = name.split_once('/')?;
    let list = list.strip_suffix("_projection").unwrap_or(list);
    let mut known = None;
    let roles = list.split('_').map(|role| {
        let &(group, role, rows) = ROLES.iter().find(|row| row.0 == group && row.1 == role)?;
        known = Some(group);
        Some((role, rows))
    });
    let roles = roles.collect::<Option<Vec<_>>>()?;
    Some((known?, roles))
}

/// The rows of a role.
pub fn rows_of(arch: &Arch, dim: Dim) -> u64 {
    match dim {
        KEYS => (length(arch, KEYS) - length(arch, Dim::DeltaValues)) / 2,
        dim => length(arch, dim),
    }
}

/// Whether a tensor has the rows of a head, then those of its gate, head by head.
pub fn is_gated(name: &str, family: &Family) -> bool {
    name == QUERY && family.delta.is_some()
}

/// The roles of a tensor that [`is_gated`].
pub const GATED: &[&str] = &["query", "gate"];

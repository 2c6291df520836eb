//! Names of tensors in GGUF files, and the forms in which they are stored.
//!
//! As llama.cpp's converter writes them: norms that multiply by 1+w are stored as 1+w; the rows of rotated heads may be
//! interleaved. Of Gated DeltaNet layers, decay rates are stored as -exp(A_log), the convolution without its middle dimension. If
//! their inputs are split (`qwen35`), value heads are in tiled order: the first value head of every key head, then the second of
//! every key head, and so on. If inputs are fused (`qwen3next`), value heads keep their order, and the fused tensor is split in
//! two: q of all heads, k of all heads and v of all heads; z of all heads. Older files have the fused tensor. Both forms are
//! presented as they are.

use crate::dtype::{Order, RowOrder, TiledHeads};
use crate::format::{Arch, NormStyle};
use crate::import::family::{Delta, Family};
use crate::import::form::{Applied, Form};
use crate::import::roles::{
    CONVOLUTION, EXPERT, GGUF_LAYER_PREFIX, HEAD, LAYER, LAYER_PREFIX, MIXTURE, MTP, MTP_PREFIX, MTP_TAIL, Role,
    SHARED_EXPERT, TAIL,
};

/// The gate projections of all experts of a layer, and the tensor with gate and up projections that some files have instead.
const EXPERT_GATES: &str = "ffn_gate_exps.weight";
const EXPERT_GATES_AND_UPS: &str = "ffn_gate_up_exps.weight";

/// The container's name of a GGUF tensor, and its role; `None` for unknown names.
pub fn container_name(family: &Family, name: &str) -> Option<(String, &'static Role)> {
    let of = |roles: &'static [Role], name: &str| {
        let mut own = roles.iter().filter(|role| role.need.of(family).is_some());
        own.find(|role| role.gguf == name)
    };
    if let Some((layer, rest)) = name
        .strip_prefix(GGUF_LAYER_PREFIX)
        .and_then(|rest| rest.split_once('.'))
    {
        // Only the canonical spelling of a number, so that a tensor cannot have two names.
        let number = layer.parse::<u64>().ok().filter(|number| number.to_string() == layer)?;
        // All experts of the layer in one tensor, which is split later.
        if let Some(role) = of(EXPERT, rest) {
            return Some((format!("{LAYER_PREFIX}{number}.mlp.experts.{}", role.name), role));
        }
        // Gate and up projections in one tensor, one after the other for each expert.
        if let Some(role) = of(EXPERT, EXPERT_GATES).filter(|_| rest == EXPERT_GATES_AND_UPS) {
            return Some((format!("{LAYER_PREFIX}{number}.mlp.experts.gate_up_proj.weight"), role));
        }
        let role = of(LAYER, rest)
            .or_else(|| of(MIXTURE, rest))
            .or_else(|| of(SHARED_EXPERT, rest))?;
        return Some((format!("{LAYER_PREFIX}{number}.{}", role.name), role));
    }
    let role = of(HEAD, name).or_else(|| of(TAIL, name))?;
    Some((role.name.to_owned(), role))
}

/// The number of a layer or of a block after the layers; `None` for another tensor.
pub fn block(name: &str) -> Option<usize> {
    let block = name.strip_prefix(GGUF_LAYER_PREFIX)?.split_once('.');
    block.and_then(|(number, _)| number.parse().ok())
}

/// As [`container_name`], for a tensor of the draft head, which is block number `first`.
pub fn draft_head_name(family: &Family, name: &str, first: usize) -> Option<(String, &'static Role)> {
    let rest = name.strip_prefix(&format!("{GGUF_LAYER_PREFIX}{first}."))?;
    if let Some(role) = MTP.iter().chain(MTP_TAIL).find(|role| role.gguf == rest) {
        return Some((format!("{MTP_PREFIX}{}", role.name), role));
    }
    let (name, role) = container_name(family, name)?;
    let own = name.strip_prefix(&format!("{LAYER_PREFIX}{first}."))?;
    Some((format!("{MTP_PREFIX}layers.0.{own}"), role))
}

/// Whether files have a draft head after `layers` layers. `has`: whether there is a tensor of this name.
pub fn has_draft_head(layers: usize, has: impl Fn(&str) -> bool) -> bool {
    let mut roles = MTP.iter().chain(MTP_TAIL);
    roles.all(|role| has(&format!("{GGUF_LAYER_PREFIX}{layers}.{}", role.gguf)))
}

/// Where and how a GGUF file holds a tensor.
#[cfg(feature = "tools")]
pub struct Place {
    /// The name.
    pub name: String,
    /// The form of its payload. Rotated matrices have value heads along their columns in the container's order.
    pub form: Form,
    /// Whether its middle dimension, which is 1, is left out.
    pub lacks_middle: bool,
}

/// Where files hold the tensor called `name`, outside of experts; `None` if files have none of this name.
#[cfg(feature = "tools")]
pub fn place(arch: &Arch, name: &str) -> Option<Place> {
    let family = Family::of_model_type(&arch.arch_name)?;
    let of = |roles: &'static [Role], name: &str| {
        let mut own = roles.iter().filter(|role| role.need.of(family).is_some());
        own.find(|role| role.name == name)
    };
    let (prefix, role) = match name.strip_prefix(LAYER_PREFIX).and_then(|rest| rest.split_once('.')) {
        Some((layer, rest)) => {
            let role = of(LAYER, rest)
                .or_else(|| of(MIXTURE, rest))
                .or_else(|| of(SHARED_EXPERT, rest))?;
            (format!("{GGUF_LAYER_PREFIX}{layer}."), role)
        }
        None => (String::new(), of(HEAD, name).or_else(|| of(TAIL, name))?),
    };
    let rotation = arch.prism_hadamard.as_ref();
    let rotated = rotation.is_some_and(|rotation| rotation.forward.contains(name));
    Some(Place {
        name: prefix + role.gguf,
        form: form(role, family, arch, rotated),
        lacks_middle: lacks_middle(role),
    })
}

/// The name of a network's architecture in GGUF files.
#[cfg(feature = "tools")]
pub fn architecture(arch: &Arch) -> Option<&'static str> {
    Family::of_model_type(&arch.arch_name).map(|family| family.gguf)
}

/// Whether files store a tensor without its middle dimension, which is 1.
pub fn lacks_middle(role: &Role) -> bool {
    role.name == CONVOLUTION
}

/// The form in which files hold a tensor. `grouped`: the value heads along its columns are in the container's order.
pub fn form(role: &Role, family: &Family, arch: &Arch, grouped: bool) -> Form {
    let mut form = Form::default();
    if family.gguf_interleaves_qk && role.rotates {
        form.order.rows = RowOrder::Interleaved(arch.head_dim);
    }
    // Read as w, not as 1+w with the other norm style: f16 keeps more bits of a small w than of 1+w.
    if family.norm_style == NormStyle::Gemma && has_family_style(role.name) {
        form.applied = Applied::Plus(1.0);
    }
    if role.name == "linear_attn.A_log" {
        form.applied = Applied::NegativeExponential;
    }
    if family.delta == Some(Delta::Split) {
        form.order = tiled(role, arch, grouped);
    }
    form
}

/// Whether a norm has the family's style. The norm of a recurrence is plain in all families.
fn has_family_style(name: &str) -> bool {
    name.ends_with("norm.weight") && name != "linear_attn.norm.weight"
}

/// The order of value heads in a tensor of a recurrence.
fn tiled(role: &Role, arch: &Arch, grouped: bool) -> Order {
    let of = |dim: Option<usize>| dim.unwrap_or(0);
    let (key_heads, heads) = (of(arch.linear_num_key_heads), of(arch.linear_num_value_heads));
    let keys = key_heads.saturating_mul(of(arch.linear_key_head_dim)).saturating_mul(2);
    let value = of(arch.linear_value_head_dim);
    let tiles = |first: usize, width: usize| TiledHeads {
        first,
        key_heads,
        heads,
        width,
    };
    let rows = |heads: TiledHeads| Order {
        rows: RowOrder::Tiled(heads),
        cols: None,
    };
    match role.name.strip_prefix("linear_attn.") {
        Some("in_proj_qkv.weight" | "conv1d.weight") => rows(tiles(keys, value)),
        Some("in_proj_z.weight") => rows(tiles(0, value)),
        Some("in_proj_a.weight" | "in_proj_b.weight" | "dt_bias" | "A_log") => rows(tiles(0, 1)),
        Some("out_proj.weight") if !grouped => Order {
            rows: RowOrder::Same,
            cols: Some(tiles(0, value)),
        },
        _ => Order::default(),
    }
}

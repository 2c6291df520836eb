//! [`Arch`]: the dimensions and constants of a network, and the check that their values make sense.
//!
//! Fields have the JSON names of a CMF header's `arch` object (section 2 of the format). Importers of other formats fill
//! in the same type. Whether the network can run and whether the tensors fit is checked elsewhere.

use super::json::without_nulls;
use crate::error::{Error, Kind, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::fmt::Display;

/// The most layers of a stack; also the most layers times loops.
const MAX_LAYERS: usize = 1 << 16;
/// The most experts of a layer.
const MAX_EXPERTS: usize = 1 << 16;
/// Largest dimension: the directory stores dimensions as u32.
const MAX_DIM: usize = u32::MAX as usize;

/// Keys that every description must have. Only [`Arch::default`] may hold zero for them.
const REQUIRED: [&str; 8] = [
    "hidden_size",
    "num_layers",
    "num_attention_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "layer_types",
    "rms_norm_eps",
];

/// How a layer mixes positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum LayerType {
    /// Softmax attention over all positions up to the current one.
    FullAttention,
    /// A recurrence with a fixed-size state.
    LinearAttention,
    /// Softmax attention over the last `sliding_window` positions.
    SlidingAttention,
}

/// How a norm's weight is applied to the normalised x̂.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NormStyle {
    /// x̂·w
    Qwen,
    /// x̂·(1+w)
    Gemma,
}

/// The activation between the projections of an FFN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HiddenAct {
    /// x·sigmoid(x)
    Silu,
    /// The tanh approximation of GELU.
    GeluTanh,
}

/// YaRN scaling of the rotary frequencies.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Yarn {
    /// The factor by which the context was extended.
    pub factor: f64,
    /// The context before the extension, in tokens.
    pub original_max_position_embeddings: usize,
    /// Rotations over the original context above which a frequency is kept.
    #[serde(default = "beta_fast")]
    pub beta_fast: f64,
    /// Rotations over the original context below which a frequency is divided by `factor`.
    #[serde(default = "beta_slow")]
    pub beta_slow: f64,
    /// Factor of cos and sin; absent: computed from `factor`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention_factor: Option<f64>,
}

fn beta_fast() -> f64 {
    32.0
}

fn beta_slow() -> f64 {
    1.0
}

/// A multi-token-prediction head, which drafts the tokens after the next one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mtp {
    /// Blocks of the head; 0: no head.
    pub num_layers: usize,
    /// The head uses the model's `lm_head`.
    #[serde(default = "yes")]
    pub share_lm_head: bool,
    /// The head uses the model's embedding.
    #[serde(default = "yes")]
    pub share_embed: bool,
    /// The hidden state that the head reads; absent: unspecified.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hidden: Option<MtpHidden>,
}

/// The hidden state that a multi-token-prediction head reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MtpHidden {
    /// The residual stream before the final norm.
    PreNorm,
    /// The output of the final norm.
    PostNorm,
}

fn yes() -> bool {
    true
}

/// Mixture-of-experts FFNs. A layer is a mixture if the file has a router for it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Moe {
    /// Nominal number of experts; each layer's actual number follows from its tensors.
    pub num_experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Intermediate size of an expert.
    pub moe_intermediate_size: usize,
    /// Whether the weights of the chosen experts are rescaled to sum to 1.
    pub norm_topk_prob: bool,
    /// Intermediate size of the shared expert; absent: no shared expert.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_expert_intermediate_size: Option<usize>,
    /// Router scores are sigmoids instead of a softmax.
    #[serde(default)]
    pub router_sigmoid: bool,
    /// Factor applied to the experts' weights.
    #[serde(default = "unscaled")]
    pub routed_scaling_factor: f64,
}

fn unscaled() -> f64 {
    1.0
}

/// The network's dimensions and constants. Absent keys have the format's defaults.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Arch {
    /// The family's name, for display only.
    pub arch_name: String,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Intermediate size of a dense FFN; the largest one if layers differ. 0 only if every FFN is a mixture.
    pub intermediate_size: usize,
    /// Layers of the stack, counted once however often it is applied.
    pub num_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// One entry per layer.
    pub layer_types: Vec<LayerType>,
    /// The epsilon of RMS norms, added to the mean square.
    pub rms_norm_eps: f64,
    /// Required for running; files that are only inspected may omit it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub norm_style: Option<NormStyle>,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// The output projection is the embedding.
    pub tie_word_embeddings: bool,
    /// The fraction of a head that is rotated.
    pub partial_rotary_factor: f64,
    /// The context the model was trained for, in tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_position_embeddings: Option<usize>,
    /// YaRN scaling.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub yarn: Option<Yarn>,
    /// Divisors of the rotary frequencies, one per frequency.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope_freq_factors: Option<Vec<f64>>,
    /// Query heads of each layer, if layers differ.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention_heads_per_layer: Option<Vec<usize>>,
    /// Key and value heads of each layer, if layers differ.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_heads_per_layer: Option<Vec<usize>>,
    /// Activation of the FFN; absent: SiLU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hidden_act: Option<HiddenAct>,
    /// Factor applied to the embedding's output.
    pub embed_multiplier: f64,
    /// Attention scores are scaled by 1/√q for this value q; absent: by 1/√head_dim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub query_pre_attn_scalar: Option<f64>,
    /// Positions that a sliding layer attends to, the current one included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sliding_window: Option<usize>,
    /// One layer in every `sliding_window_pattern` attends to all positions; the others slide.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sliding_window_pattern: Option<usize>,
    /// Base of the rotary frequencies of sliding layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope_local_base_freq: Option<f64>,
    /// The fraction of a head that sliding layers rotate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local_partial_rotary_factor: Option<f64>,
    /// Logits become cap·tanh(x/cap).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub final_logit_softcapping: Option<f64>,
    /// Attention scores become cap·tanh(x/cap).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attn_logit_softcapping: Option<f64>,
    /// Factor applied to the logits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logit_multiplier: Option<f64>,
    /// Values are normalised.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attn_v_norm: Option<bool>,
    /// Query and key norms are applied after the rotation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qk_norm_after_rope: Option<bool>,
    /// Attention has a sink. Not supported; read because existing files contain the key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention_sink: Option<bool>,
    /// Taps of the causal convolution of linear-attention layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub linear_conv_kernel_dim: Option<usize>,
    /// Key heads of linear-attention layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub linear_num_key_heads: Option<usize>,
    /// Value heads of linear-attention layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub linear_num_value_heads: Option<usize>,
    /// Elements of a key head of linear-attention layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub linear_key_head_dim: Option<usize>,
    /// Elements of a value head of linear-attention layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub linear_value_head_dim: Option<usize>,
    /// The recurrence of linear-attention layers, as existing files state it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub linear_core: Option<Value>,
    /// How many times the stack is applied.
    pub num_loops: usize,
    /// The final norm is also applied between the loops.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loop_final_norm: Option<bool>,
    /// The multi-token-prediction head.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtp: Option<Mtp>,
    /// The mixture of experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moe: Option<Moe>,
}

impl Default for Arch {
    /// The format's defaults; dimensions are zero and there are no layers.
    fn default() -> Self {
        Arch {
            arch_name: String::new(),
            hidden_size: 0,
            intermediate_size: 0,
            num_layers: 0,
            num_attention_heads: 0,
            num_kv_heads: 0,
            head_dim: 0,
            vocab_size: 0,
            layer_types: Vec::new(),
            rms_norm_eps: 0.0,
            norm_style: None,
            rope_theta: 10_000.0,
            tie_word_embeddings: false,
            partial_rotary_factor: 1.0,
            max_position_embeddings: None,
            yarn: None,
            rope_freq_factors: None,
            attention_heads_per_layer: None,
            kv_heads_per_layer: None,
            hidden_act: None,
            embed_multiplier: 1.0,
            query_pre_attn_scalar: None,
            sliding_window: None,
            sliding_window_pattern: None,
            rope_local_base_freq: None,
            local_partial_rotary_factor: None,
            final_logit_softcapping: None,
            attn_logit_softcapping: None,
            logit_multiplier: None,
            attn_v_norm: None,
            qk_norm_after_rope: None,
            attention_sink: None,
            linear_conv_kernel_dim: None,
            linear_num_key_heads: None,
            linear_num_value_heads: None,
            linear_key_head_dim: None,
            linear_value_head_dim: None,
            linear_core: None,
            num_loops: 1,
            loop_final_norm: None,
            mtp: None,
            moe: None,
        }
    }
}

impl Arch {
    /// Parses and validates a JSON `arch` object. Unknown keys are ignored; `null` means absent.
    ///
    /// Errors: `Parse`, with the key and its value.
    pub fn from_json(arch: &Map<String, Value>) -> Result<Arch> {
        for key in REQUIRED {
            if arch.get(key).is_none_or(Value::is_null) {
                bail!(Parse, "arch.{key} is missing");
            }
        }
        let arch = without_nulls(&Value::Object(arch.clone()));
        let typed = Arch::deserialize(&arch).map_err(|err| culprit(&arch, &err))?;
        typed.validate()?;
        Ok(typed)
    }

    /// Refuses values that no network can have. Errors: `Parse`, with the key and its value.
    pub fn validate(&self) -> Result<()> {
        self.validate_dimensions()?;
        self.validate_layers()?;
        self.validate_constants()?;
        self.validate_rotation()?;
        if let Some(moe) = &self.moe {
            within("moe.num_experts", moe.num_experts, MAX_EXPERTS)?;
            within("moe.top_k", moe.top_k, moe.num_experts)?;
            within("moe.moe_intermediate_size", moe.moe_intermediate_size, MAX_DIM)?;
            optional(
                moe.shared_expert_intermediate_size,
                "moe.shared_expert_intermediate_size",
                |name, v| within(name, v, MAX_DIM),
            )?;
            positive("moe.routed_scaling_factor", moe.routed_scaling_factor)?;
        }
        if let Some(mtp) = &self.mtp
            && mtp.num_layers != 0
        {
            within("mtp.num_layers", mtp.num_layers, MAX_LAYERS)?;
        }
        Ok(())
    }

    fn validate_dimensions(&self) -> Result<()> {
        within("hidden_size", self.hidden_size, MAX_DIM)?;
        if self.moe.is_none() || self.intermediate_size != 0 {
            within("intermediate_size", self.intermediate_size, MAX_DIM)?;
        }
        within("num_attention_heads", self.num_attention_heads, MAX_DIM)?;
        within("num_kv_heads", self.num_kv_heads, self.num_attention_heads)?;
        whole(
            "num_attention_heads",
            self.num_attention_heads,
            "num_kv_heads",
            self.num_kv_heads,
        )?;
        within("head_dim", self.head_dim, MAX_DIM)?;
        if !self.head_dim.is_multiple_of(2) {
            return wrong("head_dim", self.head_dim, "an even number");
        }
        within("vocab_size", self.vocab_size, MAX_DIM)?;
        let dims = [
            ("max_position_embeddings", self.max_position_embeddings),
            ("sliding_window", self.sliding_window),
            ("sliding_window_pattern", self.sliding_window_pattern),
            ("linear_conv_kernel_dim", self.linear_conv_kernel_dim),
            ("linear_num_key_heads", self.linear_num_key_heads),
            ("linear_num_value_heads", self.linear_num_value_heads),
            ("linear_key_head_dim", self.linear_key_head_dim),
            ("linear_value_head_dim", self.linear_value_head_dim),
        ];
        for (name, value) in dims {
            optional(value, name, |name, v| within(name, v, MAX_DIM))?;
        }
        if let (Some(keys), Some(values)) = (self.linear_num_key_heads, self.linear_num_value_heads) {
            whole("linear_num_value_heads", values, "linear_num_key_heads", keys)?;
        }
        Ok(())
    }

    fn validate_layers(&self) -> Result<()> {
        within("num_layers", self.num_layers, MAX_LAYERS)?;
        within("num_loops", self.num_loops, MAX_LAYERS / self.num_layers)?;
        per_layer("layer_types", self.layer_types.len(), self.num_layers)?;
        for (name, heads) in [
            ("attention_heads_per_layer", &self.attention_heads_per_layer),
            ("kv_heads_per_layer", &self.kv_heads_per_layer),
        ] {
            let Some(heads) = heads else { continue };
            per_layer(name, heads.len(), self.num_layers)?;
            for (layer, &count) in heads.iter().enumerate() {
                within(format_args!("{name}[{layer}]"), count, MAX_DIM)?;
            }
        }
        for layer in 0..self.num_layers {
            let of = |per_layer: &Option<Vec<usize>>, all| match per_layer {
                Some(heads) => heads.get(layer).copied().unwrap_or(all),
                None => all,
            };
            let heads = of(&self.attention_heads_per_layer, self.num_attention_heads);
            let kv_heads = of(&self.kv_heads_per_layer, self.num_kv_heads);
            whole(
                format_args!("heads of layer {layer}"),
                heads,
                format_args!("key and value heads of layer {layer}"),
                kv_heads,
            )?;
        }
        Ok(())
    }

    fn validate_constants(&self) -> Result<()> {
        positive("rms_norm_eps", self.rms_norm_eps)?;
        positive("embed_multiplier", self.embed_multiplier)?;
        for (name, value) in [
            ("query_pre_attn_scalar", self.query_pre_attn_scalar),
            ("final_logit_softcapping", self.final_logit_softcapping),
            ("attn_logit_softcapping", self.attn_logit_softcapping),
            ("logit_multiplier", self.logit_multiplier),
        ] {
            optional(value, name, positive)?;
        }
        Ok(())
    }

    fn validate_rotation(&self) -> Result<()> {
        positive("rope_theta", self.rope_theta)?;
        optional(self.rope_local_base_freq, "rope_local_base_freq", positive)?;
        share("partial_rotary_factor", self.partial_rotary_factor)?;
        optional(self.local_partial_rotary_factor, "local_partial_rotary_factor", share)?;
        for (i, &factor) in self.rope_freq_factors.iter().flatten().enumerate() {
            positive(format_args!("rope_freq_factors[{i}]"), factor)?;
        }
        if let Some(yarn) = &self.yarn {
            positive("yarn.factor", yarn.factor)?;
            within(
                "yarn.original_max_position_embeddings",
                yarn.original_max_position_embeddings,
                MAX_DIM,
            )?;
            positive("yarn.beta_slow", yarn.beta_slow)?;
            positive("yarn.beta_fast", yarn.beta_fast)?;
            if yarn.beta_fast < yarn.beta_slow {
                return wrong(
                    "yarn.beta_fast",
                    yarn.beta_fast,
                    format_args!("at least beta_slow, {}", yarn.beta_slow),
                );
            }
            optional(yarn.attention_factor, "yarn.attention_factor", positive)?;
        }
        Ok(())
    }
}

/// The error with the key that caused it. serde does not report the key, so each key is tried alone.
fn culprit(arch: &Value, err: &serde_json::Error) -> Error {
    let members = arch.as_object().into_iter().flatten();
    for (key, value) in members {
        let alone = Value::Object(Map::from_iter([(key.clone(), value.clone())]));
        if let Err(err) = Arch::deserialize(&alone) {
            return Error::new(Kind::Parse, format!("arch.{key}: {err}"));
        }
    }
    Error::new(Kind::Parse, format!("arch: {err}"))
}

fn wrong<T>(name: impl Display, found: impl Display, wanted: impl Display) -> Result<T> {
    bail!(Parse, "arch.{name} is {found}, expected {wanted}")
}

fn within(name: impl Display, value: usize, most: usize) -> Result<()> {
    if value == 0 || value > most {
        return wrong(name, value, format_args!("1 to {most}"));
    }
    Ok(())
}

fn positive(name: impl Display, value: f64) -> Result<()> {
    // Kernels use the value as f32, and devices may flush subnormal numbers to zero.
    if !(value > 0.0 && (value as f32).is_normal()) {
        return wrong(
            name,
            value,
            "a finite number above 0, neither too large nor too small for f32",
        );
    }
    Ok(())
}

fn share(name: impl Display, value: f64) -> Result<()> {
    if !(0.0..=1.0).contains(&value) {
        return wrong(name, value, "0 to 1");
    }
    Ok(())
}

fn whole(name: impl Display, value: usize, divisor_name: impl Display, divisor: usize) -> Result<()> {
    if divisor == 0 || !value.is_multiple_of(divisor) {
        return wrong(name, value, format_args!("a multiple of {divisor_name}, {divisor}"));
    }
    Ok(())
}

fn per_layer(name: impl Display, found: usize, layers: usize) -> Result<()> {
    if found != layers {
        bail!(
            Parse,
            "arch.{name} has {found} entries, expected one for each of {layers} layers"
        );
    }
    Ok(())
}

fn optional<T>(value: Option<T>, name: &'static str, check: impl Fn(&'static str, T) -> Result<()>) -> Result<()> {
    value.map_or(Ok(()), |value| check(name, value))
}

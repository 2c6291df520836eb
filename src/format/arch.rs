//! [`Arch`]: the dimensions and constants of a network, and the check that their values make sense.
//!
//! Fields have the JSON names of a CMF header's `arch` object (section 2 of the format). Importers of other formats fill
//! in the same type. Whether the network can run and whether the tensors fit is checked elsewhere.

use super::hadamard::Hadamard;
use super::json::without_nulls;
use super::pipeline;
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
    #[serde(default = "one")]
    pub beta_slow: f64,
    /// Factor of cos and sin; absent: computed from `factor`.
    pub attention_factor: Option<f64>,
}

fn beta_fast() -> f64 {
    32.0
}

fn rope_theta() -> f64 {
    10_000.0
}

fn one<T: From<u8>>() -> T {
    T::from(1)
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
    pub shared_expert_intermediate_size: Option<usize>,
    /// Router scores are sigmoids instead of a softmax.
    #[serde(default)]
    pub router_sigmoid: bool,
    /// Factor applied to the experts' weights.
    #[serde(default = "one")]
    pub routed_scaling_factor: f64,
}

/// The network's dimensions and constants. Keys that are absent in JSON have the format's defaults; the default of this type
/// is no network, because its numbers are zero.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
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
    pub norm_style: Option<NormStyle>,
    /// Base of the rotary frequencies.
    #[serde(default = "rope_theta")]
    pub rope_theta: f64,
    /// The output projection is the embedding.
    pub tie_word_embeddings: bool,
    /// The fraction of a head that is rotated.
    #[serde(default = "one")]
    pub partial_rotary_factor: f64,
    /// The context the model was trained for, in tokens.
    pub max_position_embeddings: Option<usize>,
    /// YaRN scaling.
    pub yarn: Option<Yarn>,
    /// Divisors of the rotary frequencies, one per frequency.
    pub rope_freq_factors: Option<Vec<f64>>,
    /// Query heads of each layer, if layers differ.
    pub attention_heads_per_layer: Option<Vec<usize>>,
    /// Key and value heads of each layer, if layers differ.
    pub kv_heads_per_layer: Option<Vec<usize>>,
    /// Activation of the FFN; absent: SiLU.
    pub hidden_act: Option<HiddenAct>,
    /// Factor applied to the embedding's output.
    #[serde(default = "one")]
    pub embed_multiplier: f64,
    /// Attention scores are scaled by 1/√q for this value q; absent: by 1/√head_dim.
    pub query_pre_attn_scalar: Option<f64>,
    /// Positions that a sliding layer attends to, the current one included.
    pub sliding_window: Option<usize>,
    /// One layer in every `sliding_window_pattern` attends to all positions; the others slide.
    pub sliding_window_pattern: Option<usize>,
    /// Base of the rotary frequencies of sliding layers.
    pub rope_local_base_freq: Option<f64>,
    /// The fraction of a head that sliding layers rotate.
    pub local_partial_rotary_factor: Option<f64>,
    /// Logits become cap·tanh(x/cap).
    pub final_logit_softcapping: Option<f64>,
    /// Attention scores become cap·tanh(x/cap).
    pub attn_logit_softcapping: Option<f64>,
    /// Factor applied to the logits.
    pub logit_multiplier: Option<f64>,
    /// Values are normalised.
    pub attn_v_norm: Option<bool>,
    /// Query and key norms are applied after the rotation.
    pub qk_norm_after_rope: Option<bool>,
    /// Attention has a sink. Not supported; read because existing files contain the key.
    pub attention_sink: Option<bool>,
    /// Taps of the causal convolution of linear-attention layers.
    pub linear_conv_kernel_dim: Option<usize>,
    /// Key heads of linear-attention layers.
    pub linear_num_key_heads: Option<usize>,
    /// Value heads of linear-attention layers.
    pub linear_num_value_heads: Option<usize>,
    /// Elements of a key head of linear-attention layers.
    pub linear_key_head_dim: Option<usize>,
    /// Elements of a value head of linear-attention layers.
    pub linear_value_head_dim: Option<usize>,
    /// The recurrence of linear-attention layers, as existing files state it.
    pub linear_core: Option<Value>,
    /// How many times the stack is applied.
    #[serde(default = "one")]
    pub num_loops: usize,
    /// The final norm is also applied between the loops.
    pub loop_final_norm: Option<bool>,
    /// The multi-token-prediction head.
    pub mtp: Option<Mtp>,
    /// The mixture of experts.
    pub moe: Option<Moe>,
    /// The matrices that are stored in a rotated basis.
    pub prism_hadamard: Option<Hadamard>,
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
        let mut arch = without_nulls(&Value::Object(arch.clone()));
        let name = arch.get("arch_name").and_then(Value::as_str);
        if let (true, Some(members)) = (name.is_some_and(pipeline::is_known), arch.as_object_mut()) {
            // Writers of pipelines fill in 0 for what the text encoder does not have.
            members.retain(|key, value| REQUIRED.contains(&key.as_str()) || value.as_f64() != Some(0.0));
        }
        let typed = Arch::deserialize(&arch).map_err(|err| culprit(&arch, &err))?;
        typed.validate()?;
        Ok(typed)
    }

    /// The JSON `arch` object, without absent keys. Errors: `Parse` for a number that JSON does not have.
    pub fn to_json(&self) -> Result<Value> {
        let json = serde_json::to_value(self);
        let json = json.map_err(|err| Error::new(Kind::Parse, format!("arch cannot be written as JSON: {err}")))?;
        Ok(without_nulls(&json))
    }

    /// Refuses values that no network can have. Errors: `Parse`, with the key and its value.
    pub fn validate(&self) -> Result<()> {
        self.validate_dimensions()?;
        self.validate_layers()?;
        self.validate_constants()?;
        if let Some(moe) = &self.moe {
            within("moe.num_experts", moe.num_experts, MAX_EXPERTS)?;
            within("moe.top_k", moe.top_k, moe.num_experts)?;
        }
        match &self.mtp {
            Some(mtp) if mtp.num_layers != 0 => within("mtp.num_layers", mtp.num_layers, MAX_LAYERS),
            _ => Ok(()),
        }
    }

    fn validate_dimensions(&self) -> Result<()> {
        let (moe, yarn) = (self.moe.as_ref(), self.yarn.as_ref());
        let (heads, kv_heads) = (self.num_attention_heads, self.num_kv_heads);
        let has_dense = moe.is_none() || self.intermediate_size != 0;
        let shared_expert = moe.and_then(|moe| moe.shared_expert_intermediate_size);
        let dims = [
            ("hidden_size", Some(self.hidden_size)),
            ("intermediate_size", Some(self.intermediate_size).filter(|_| has_dense)),
            ("num_attention_heads", Some(heads)),
            ("head_dim", Some(self.head_dim)),
            ("vocab_size", Some(self.vocab_size)),
            ("max_position_embeddings", self.max_position_embeddings),
            ("sliding_window", self.sliding_window),
            ("sliding_window_pattern", self.sliding_window_pattern),
            ("linear_conv_kernel_dim", self.linear_conv_kernel_dim),
            ("linear_num_key_heads", self.linear_num_key_heads),
            ("linear_num_value_heads", self.linear_num_value_heads),
            ("linear_key_head_dim", self.linear_key_head_dim),
            ("linear_value_head_dim", self.linear_value_head_dim),
            ("moe.moe_intermediate_size", moe.map(|moe| moe.moe_intermediate_size)),
            ("moe.shared_expert_intermediate_size", shared_expert),
            (
                "yarn.original_max_position_embeddings",
                yarn.map(|yarn| yarn.original_max_position_embeddings),
            ),
        ];
        for (name, dim) in dims {
            dim.map_or(Ok(()), |dim| within(name, dim, MAX_DIM))?;
        }
        within("num_kv_heads", kv_heads, heads)?;
        whole("num_attention_heads", heads, "num_kv_heads", kv_heads)?;
        if !self.head_dim.is_multiple_of(2) {
            return wrong("head_dim", self.head_dim, "an even number");
        }
        match (self.linear_num_key_heads, self.linear_num_value_heads) {
            (Some(keys), Some(values)) => whole("linear_num_value_heads", values, "linear_num_key_heads", keys),
            _ => Ok(()),
        }
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
            let of = |per_layer: &Option<Vec<usize>>, all| per_layer.as_ref().map_or(all, |heads| heads[layer]);
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
        let (moe, yarn) = (self.moe.as_ref(), self.yarn.as_ref());
        let constants = [
            ("rms_norm_eps", Some(self.rms_norm_eps)),
            ("embed_multiplier", Some(self.embed_multiplier)),
            ("query_pre_attn_scalar", self.query_pre_attn_scalar),
            ("final_logit_softcapping", self.final_logit_softcapping),
            ("attn_logit_softcapping", self.attn_logit_softcapping),
            ("logit_multiplier", self.logit_multiplier),
            ("rope_theta", Some(self.rope_theta)),
            ("rope_local_base_freq", self.rope_local_base_freq),
            ("yarn.factor", yarn.map(|yarn| yarn.factor)),
            ("yarn.beta_slow", yarn.map(|yarn| yarn.beta_slow)),
            ("yarn.beta_fast", yarn.map(|yarn| yarn.beta_fast)),
            ("yarn.attention_factor", yarn.and_then(|yarn| yarn.attention_factor)),
            ("moe.routed_scaling_factor", moe.map(|moe| moe.routed_scaling_factor)),
        ];
        for (name, constant) in constants {
            constant.map_or(Ok(()), |constant| positive(name, constant))?;
        }
        for (i, &factor) in self.rope_freq_factors.iter().flatten().enumerate() {
            positive(format_args!("rope_freq_factors[{i}]"), factor)?;
        }
        for (name, share) in [
            ("partial_rotary_factor", Some(self.partial_rotary_factor)),
            ("local_partial_rotary_factor", self.local_partial_rotary_factor),
        ] {
            if let Some(share) = share.filter(|share| !(0.0..=1.0).contains(share)) {
                return wrong(name, share, "0 to 1");
            }
        }
        match yarn {
            Some(yarn) if yarn.beta_fast < yarn.beta_slow => wrong(
                "yarn.beta_fast",
                yarn.beta_fast,
                format_args!("at least beta_slow, {}", yarn.beta_slow),
            ),
            _ => Ok(()),
        }
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

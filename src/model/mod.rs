//! The typed network: dimensions, constants and which tensor plays which part. No bytes, kernels or devices here.
//!
//! [`bind`] decides what a layer is made of from the tensors that are present, never from a family's name.

mod bind;
mod delta_net;
mod experts;
mod rope;

pub use bind::bind;

use crate::container::{Masks, TensorId};

/// A linear map `[rows, cols]`, with an optional bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Linear {
    /// The matrix.
    pub weight: TensorId,
    /// The bias, one element a row.
    pub bias: Option<TensorId>,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
}

/// Rotary positions: pair `i` of a head turns by `position * inv_freq[i]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Radians a position; as many as there are rotated pairs.
    pub inv_freq: Vec<f32>,
    /// Factor of cos and sin (YaRN, LongRoPE).
    pub factor: f32,
}

/// The activation between a gated unit's halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// v / (1 + exp(-v))
    Silu,
    /// The tanh approximation of GELU.
    GeluTanh,
}

/// Softmax attention with grouped heads.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// Query, key and value projections, or one that holds all three: `[(heads + 2 * kv_heads) * head_dim, hidden]` in all;
    /// with a gate each query head is followed by as many rows of its gate.
    pub projections: Vec<Linear>,
    /// Whether each query head has a gate: what it reads is multiplied by sigmoid(gate) before the output projection.
    pub gated: bool,
    /// Output projection, `[hidden, heads * head_dim]`.
    pub o: Linear,
    /// RMSNorm weight over query heads.
    pub q_norm: Option<TensorId>,
    /// RMSNorm weight over key heads.
    pub k_norm: Option<TensorId>,
    /// Whether these two norms come after the rotation.
    pub norm_after_rope: bool,
    /// Whether value heads are divided by their root mean square.
    pub v_norm: bool,
    /// Query heads.
    pub heads: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Positions a query sees, itself included; `None` = all.
    pub window: Option<usize>,
    /// Index into [`Model::ropes`].
    pub rope: usize,
}

/// A Gated DeltaNet: a recurrence with one matrix of state per value head (Yang et al., "Gated Delta Networks").
///
/// q, k and v pass a causal depthwise convolution and silu, q and k are divided by their length; then per value head, with
/// beta = sigmoid(b) and decay = exp(-exp(a_log) * softplus(a + dt_bias)), S = decay * S + k (beta * (v - decay * S^T k))^T and
/// o = S^T q / sqrt(key_dim), and the output projection reads RMSNorm(o) * silu(z).
#[derive(Clone, Debug, PartialEq)]
pub struct DeltaNet {
    /// The maps that make q, k, v, z, b and a.
    pub projections: DeltaProjections,
    /// Convolution weights, `[2 * key_heads * key_dim + value_heads * value_dim, 1, taps]` over the channels q, k, v.
    pub conv: TensorId,
    /// Logarithm of each value head's decay rate.
    pub a_log: TensorId,
    /// Added to `a`, one each value head.
    pub dt_bias: TensorId,
    /// RMSNorm weight over a value head, taken as it is in every norm style.
    pub norm: TensorId,
    /// Output projection, `[hidden, value_heads * value_dim]`.
    pub o: Linear,
    /// Heads of q and k, each shared by `value_heads / key_heads` neighbouring value heads.
    pub key_heads: usize,
    /// Heads of v and z, and of the state.
    pub value_heads: usize,
    /// Elements of a key head.
    pub key_dim: usize,
    /// Elements of a value head.
    pub value_dim: usize,
    /// Positions under the convolution, the newest included.
    pub taps: usize,
}

impl DeltaNet {
    /// Channels of the convolution: q, k and v.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }
}

/// How the inputs of a DeltaNet are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeltaProjections {
    /// q, k and v below each other; z; b; a.
    Split {
        /// q, k, v: `[channels, hidden]`.
        qkv: Linear,
        /// z: `[value_heads * value_dim, hidden]`.
        z: Linear,
        /// b: `[value_heads, hidden]`.
        b: Linear,
        /// a: `[value_heads, hidden]`.
        a: Linear,
    },
    /// For each key head its q, k, v and z rows in one tensor, its b and a rows in the other.
    Fused {
        /// q, k, v, z of each key head.
        qkvz: Linear,
        /// b, a of each key head.
        ba: Linear,
    },
}

/// What mixes positions in a layer.
#[derive(Clone, Debug, PartialEq)]
pub enum Mixer {
    /// Softmax attention.
    Attention(Attention),
    /// A recurrence.
    DeltaNet(DeltaNet),
}

impl Mixer {
    /// The name in reports.
    pub fn name(&self) -> &'static str {
        match self {
            Mixer::Attention(Attention { window: Some(_), .. }) => "sliding attention",
            Mixer::Attention(_) => "attention",
            Mixer::DeltaNet(_) => "gated deltanet",
        }
    }
}

/// The first maps of a gated unit, each `[width, hidden]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GateUp {
    /// Gate and up.
    Split(Linear, Linear),
    /// One tensor with the gate's rows first.
    Fused(Linear),
}

/// A gated feed-forward network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ffn {
    /// Gate and up projections.
    pub gate_up: GateUp,
    /// Down projection, `[hidden, width]`.
    pub down: Linear,
}

/// A mixture of feed-forward networks: Σ weight · expert(x) over the `top_k` experts that the router ranks highest, plus the
/// shared expert.
#[derive(Clone, Debug, PartialEq)]
pub struct Moe {
    /// Logits of the experts, `[experts, hidden]`.
    pub router: Linear,
    /// Added to an expert's score for ranking only, one element an expert.
    pub expert_bias: Option<TensorId>,
    /// The experts, all of one width; their weights may differ in type.
    pub experts: Vec<Ffn>,
    /// The expert that every token takes.
    pub shared: Option<Ffn>,
    /// Logit of the shared expert's weight, `[1, hidden]`; the weight is 1 without it.
    pub shared_gate: Option<Linear>,
    /// Experts a token takes, at most as many as there are.
    pub top_k: usize,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub renormalise: bool,
    /// Scores are a sigmoid of each logit instead of one softmax.
    pub sigmoid: bool,
    /// Factor of the chosen experts' weights.
    pub scale: f32,
}

/// What follows the mixer in a layer.
#[derive(Clone, Debug, PartialEq)]
pub enum FeedForward {
    /// One network.
    Dense(Ffn),
    /// A router and its experts.
    Moe(Moe),
}

/// One decoder layer: h += mixer(norm(h)); h += ffn(norm(h)); some networks normalise what is added, too.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// RMSNorm weight before the mixer.
    pub attn_norm: TensorId,
    /// What mixes positions.
    pub mixer: Mixer,
    /// RMSNorm weight of what the mixer adds.
    pub attn_post_norm: Option<TensorId>,
    /// RMSNorm weight before the feed-forward network.
    pub ffn_norm: TensorId,
    /// The feed-forward network or networks.
    pub ffn: FeedForward,
    /// RMSNorm weight of what the feed-forward network adds.
    pub ffn_post_norm: Option<TensorId>,
}

/// Which hidden state of the network a draft head reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadInput {
    /// The residual stream after the last layer.
    Stream,
    /// That after the network's final norm.
    Normed,
    /// The file does not say.
    Unsaid,
}

/// A draft head (multi-token prediction): from the hidden state of a position and the token after it to the one after that.
#[derive(Clone, Debug, PartialEq)]
pub struct Mtp {
    /// RMSNorm weight of the embedding.
    pub enorm: TensorId,
    /// RMSNorm weight of the hidden state.
    pub hnorm: TensorId,
    /// `[hidden, 2 * hidden]`, over the embedding followed by the hidden state.
    pub eh_proj: Linear,
    /// The block.
    pub layers: Vec<Layer>,
    /// RMSNorm weight before the shared head.
    pub norm: TensorId,
    /// What `hnorm` is applied to.
    pub input: HeadInput,
}

/// The whole network.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// Elements of the residual stream.
    pub hidden: usize,
    /// Tokens of the vocabulary: rows of the embedding.
    pub vocab: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// The embedding table, `[vocab, hidden]`.
    pub embed: TensorId,
    /// Factor of embeddings.
    pub embed_multiplier: f32,
    /// The layers.
    pub layers: Vec<Layer>,
    /// How often the layers are applied, one pass after the other; keys, values and states are kept for each pass.
    pub loops: usize,
    /// Whether the final norm also stands between two passes.
    pub loop_norm: bool,
    /// RMSNorm weight before the head.
    pub final_norm: TensorId,
    /// The head, `[vocab, hidden]`; the embedding when tied.
    pub lm_head: Linear,
    /// The draft head.
    pub mtp: Option<Mtp>,
    /// Added to norm weights: 1 for norms that multiply by 1 + w.
    pub norm_add: f32,
    /// Added to the mean of squares in norms.
    pub eps: f32,
    /// Factor of attention scores.
    pub attn_scale: f32,
    /// Soft cap of attention scores; 0 = none.
    pub attn_softcap: f32,
    /// Factor of the logits.
    pub logit_multiplier: f32,
    /// Soft cap of the logits; 0 = none.
    pub logit_softcap: f32,
    /// Activation of the feed-forward networks.
    pub activation: Activation,
    /// Rotary tables in use.
    pub ropes: Vec<Rope>,
    /// Positions the model was trained for.
    pub max_positions: Option<usize>,
    /// Longest context that the rotary tables are right for, `None` = any.
    pub rope_ends: Option<usize>,
    /// Task masks over the layers; their units are asked for by visit: pass · layers + layer.
    pub masks: Masks,
    /// Tensors that nothing uses.
    pub unused: Vec<TensorId>,
}

impl Model {
    /// Whether any layer, those of the draft head included, is a mixture of experts.
    pub fn has_experts(&self) -> bool {
        let drafting = self.mtp.iter().flat_map(|mtp| &mtp.layers);
        let mut layers = self.layers.iter().chain(drafting);
        layers.any(|layer| matches!(layer.ffn, FeedForward::Moe(_)))
    }

    /// Weights of the network: elements of the tensors it uses.
    pub fn parameters(&self, tensors: &dyn crate::container::Tensors) -> u64 {
        let infos = tensors.infos().iter().enumerate();
        let used = infos.filter(|(id, _)| !self.unused.contains(id));
        used.map(|(_, info)| info.shape.iter().product::<u64>()).sum()
    }
}

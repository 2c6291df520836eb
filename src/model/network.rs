//! The data types of a network.

use crate::source::{Masks, TensorId, Tensors};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

/// Matrices that are stored in a rotated basis, see [`crate::format::hadamard`].
#[derive(Clone, Debug, PartialEq)]
pub struct Rotation {
    /// Elements of a block of the transform.
    pub block: usize,
    /// Signs, 1 or -1, for every width of rotated matrices.
    pub signs: BTreeMap<usize, Arc<[f32]>>,
    /// The projections that read rotated inputs.
    pub forward: HashSet<TensorId>,
    /// Whether the rows of the embedding are rotated.
    pub inverse: bool,
}

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

/// Rotary positions: pair `i` of a head is rotated by `position * inv_freq[i]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Radians per position, one for each rotated pair.
    pub inv_freq: Vec<f32>,
    /// Factor of cos and sin (YaRN, LongRoPE).
    pub factor: f32,
}

/// The activation of a gated feed-forward network: act(gate) * up.
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
    /// Query, key and value projections, or one that holds all three: `[(heads + 2 * kv_heads) * head_dim, hidden]` in total.
    /// With gates, the rows of each query head are followed by as many rows of its gate.
    pub projections: Vec<Linear>,
    /// Whether each query head has a gate: its output is multiplied by sigmoid(gate) before the output projection.
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
    /// Elements of a head.
    pub head_dim: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// Soft cap of the scores; 0 = none.
    pub softcap: f32,
    /// Positions a query attends to, its own included; `None` = all before it.
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
    /// The projections to q, k, v and z.
    pub inputs: DeltaInputs,
    /// The projections to b and a.
    pub gates: DeltaGates,
    /// Convolution weights, `[2 * key_heads * key_dim + value_heads * value_dim, 1, taps]` over the channels q, k, v.
    pub conv: TensorId,
    /// Logarithm of each value head's decay rate.
    pub a_log: TensorId,
    /// Added to `a`, one each value head.
    pub dt_bias: TensorId,
    /// RMSNorm weight over a value head, applied as x·w in every norm style.
    pub norm: TensorId,
    /// Output projection, `[hidden, value_heads * value_dim]`.
    pub o: Linear,
    /// Whether the columns of `o` are in tiled order: those of the first value head of every key head first.
    pub o_tiled: bool,
    /// Heads of q and k, each shared by `value_heads / key_heads` neighbouring value heads.
    pub key_heads: usize,
    /// Heads of v and z, and of the state.
    pub value_heads: usize,
    /// Elements of a key head.
    pub key_dim: usize,
    /// Elements of a value head.
    pub value_dim: usize,
    /// Positions that the convolution covers, the newest included.
    pub taps: usize,
}

impl DeltaNet {
    /// Channels of the convolution: q, k and v.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// The input projections, in the order of their outputs.
    pub fn linears(&self) -> Vec<&Linear> {
        let mut all = match &self.inputs {
            DeltaInputs::Split { qkv, z } => vec![qkv, z],
            DeltaInputs::Fused(qkvz) => vec![qkvz],
        };
        match &self.gates {
            DeltaGates::Split([b, a]) => all.extend([b, a]),
            DeltaGates::Fused(ba) => all.push(ba),
        }
        all
    }
}

/// How the projections to q, k, v and z of a DeltaNet are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeltaInputs {
    /// q, k and v of all heads in one tensor, one after the other; z.
    Split {
        /// q, k, v: `[channels, hidden]`.
        qkv: Linear,
        /// z: `[value_heads * value_dim, hidden]`.
        z: Linear,
    },
    /// The q, k, v and z rows of each key head.
    Fused(Linear),
}

/// How the projections to b and a of a DeltaNet are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeltaGates {
    /// b; a: `[value_heads, hidden]` each.
    Split([Linear; 2]),
    /// The b and a rows of each key head.
    Fused(Linear),
}

/// The part of a layer that mixes positions.
#[derive(Clone, Debug, PartialEq)]
pub enum Mixer {
    /// Softmax attention.
    Attention(Attention),
    /// Gated DeltaNet.
    DeltaNet(DeltaNet),
}

impl Mixer {
    /// The name in messages.
    pub fn name(&self) -> &'static str {
        match self {
            Mixer::Attention(Attention { window: Some(_), .. }) => "sliding attention",
            Mixer::Attention(_) => "attention",
            Mixer::DeltaNet(_) => "gated deltanet",
        }
    }
}

/// The input projections of a gated feed-forward network, each `[width, hidden]`.
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
    /// Projection to the experts' logits, `[experts, hidden]`.
    pub router: Linear,
    /// Added to the experts' scores for ranking only, one element per expert.
    pub expert_bias: Option<TensorId>,
    /// The experts, all of one width; their weights may differ in type.
    pub experts: Vec<Ffn>,
    /// The shared expert, which every token uses.
    pub shared: Option<Ffn>,
    /// Projection to the logit of the shared expert's weight, `[1, hidden]`; without it the weight is 1.
    pub shared_gate: Option<Linear>,
    /// Experts used per token, at most as many as there are.
    pub top_k: usize,
    /// Whether the weights of the experts used are divided by their sum.
    pub renormalise: bool,
    /// Scores are a sigmoid of each logit instead of one softmax.
    pub sigmoid: bool,
    /// Factor of the experts' weights.
    pub scale: f32,
}

/// The feed-forward part of a layer.
#[derive(Clone, Debug, PartialEq)]
pub enum FeedForward {
    /// One network.
    Dense(Ffn),
    /// A router and its experts.
    Moe(Moe),
}

/// One decoder layer: h += mixer(norm(h)); h += ffn(norm(h)). With post-norms, what is added is normalised too.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// RMSNorm weight before the mixer.
    pub attn_norm: TensorId,
    /// The part that mixes positions.
    pub mixer: Mixer,
    /// RMSNorm weight of the mixer's output.
    pub attn_post_norm: Option<TensorId>,
    /// RMSNorm weight before the feed-forward network.
    pub ffn_norm: TensorId,
    /// The feed-forward part.
    pub ffn: FeedForward,
    /// RMSNorm weight of the feed-forward network's output.
    pub ffn_post_norm: Option<TensorId>,
}

/// The hidden state of the network that a draft head reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HeadInput {
    /// The residual stream after the last layer.
    #[default]
    Stream,
    /// The residual stream after the network's final norm.
    Normed,
}

/// A draft head (multi-token prediction): from the hidden state of a position and the next token it predicts the token after
/// that.
#[derive(Clone, Debug, PartialEq)]
pub struct Mtp {
    /// RMSNorm weight of the embedding.
    pub enorm: TensorId,
    /// RMSNorm weight of the hidden state.
    pub hnorm: TensorId,
    /// `[hidden, 2 * hidden]`, over the embedding followed by the hidden state.
    pub eh_proj: Linear,
    /// The layers.
    pub layers: Vec<Layer>,
    /// RMSNorm weight before the output projection.
    pub norm: TensorId,
    /// The hidden state that `hnorm` is applied to; `None` if the file does not say.
    pub input: Option<HeadInput>,
}

/// The whole network.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// Elements of the residual stream.
    pub hidden: usize,
    /// Tokens of the vocabulary: rows of the embedding.
    pub vocab: usize,
    /// The embedding table, `[vocab, hidden]`.
    pub embed: TensorId,
    /// Factor of the embeddings.
    pub embed_multiplier: f32,
    /// The layers.
    pub layers: Vec<Layer>,
    /// How often all layers are applied in sequence; keys, values and states are kept for each iteration.
    pub loops: usize,
    /// Whether the final norm is also applied between two iterations.
    pub loop_norm: bool,
    /// RMSNorm weight before the output projection.
    pub final_norm: TensorId,
    /// The output projection, `[vocab, hidden]`; if tied, the embedding.
    pub lm_head: Linear,
    /// The draft head.
    pub mtp: Option<Mtp>,
    /// Added to norm weights: 1 for norms that multiply by 1 + w.
    pub norm_add: f32,
    /// Added to the mean of squares in norms.
    pub eps: f32,
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
    /// Longest context for which the rotary tables are correct, `None` = any.
    pub rope_ends: Option<usize>,
    /// The matrices that are stored in a rotated basis.
    pub rotation: Option<Rotation>,
    /// Task masks over the layers, indexed by iteration · layers + layer.
    pub masks: Masks,
    /// Tensors that the network does not use.
    pub unused: Vec<TensorId>,
}

impl Model {
    /// Whether any layer, those of the draft head included, is a mixture of experts.
    pub fn has_experts(&self) -> bool {
        let drafting = self.mtp.iter().flat_map(|mtp| &mtp.layers);
        let mut layers = self.layers.iter().chain(drafting);
        layers.any(|layer| matches!(layer.ffn, FeedForward::Moe(_)))
    }

    /// The number of weights: elements of the tensors that the network uses.
    pub fn parameters(&self, tensors: &dyn Tensors) -> u64 {
        let infos = tensors.infos().iter().enumerate();
        let used = infos.filter(|(id, _)| !self.unused.contains(id));
        used.map(|(_, info)| info.shape.iter().product::<u64>()).sum()
    }
}

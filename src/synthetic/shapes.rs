//! The shapes of known networks: dimensions, and which tensors they have. No weights here.

use crate::dtype::Dtype;
use crate::error::{Result, bail};
use crate::source::{Arch, Hadamard};
use serde_json::{Value, json};

const EMBED: &str = "model.embed_tokens.weight";

/// A network's dimensions.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Its name.
    pub name: &'static str,
    /// Elements of the residual stream.
    pub hidden: usize,
    /// Layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Width of the dense feed-forward networks; 0 if all layers are mixtures of experts.
    pub width: usize,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Positions it was trained for.
    pub positions: usize,
    /// Whether the output projection shares the embedding's weights.
    pub tied: bool,
    /// Whether query and key heads are normalised.
    pub qk_norm: bool,
    /// Whether query heads have gates.
    pub gated: bool,
    /// Share of a head that is rotated.
    pub rotary: f64,
    /// The mixtures of experts, if the layers have them.
    pub experts: Option<ExpertShape>,
    /// The recurrent layers, if there are any.
    pub delta: Option<DeltaShape>,
    /// Elements of a block of the Hadamard transform, if the matrices are stored in a rotated basis.
    pub hadamard: Option<u64>,
}

/// A mixture of experts in every layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertShape {
    /// Experts of a layer.
    pub count: usize,
    /// Experts used per token.
    pub top_k: usize,
    /// Width of an expert.
    pub width: usize,
    /// Width of the shared expert; 0 = none.
    pub shared: usize,
}

/// Gated DeltaNet layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values and states.
    pub value_heads: usize,
    /// Elements of a key head and of a value head.
    pub head_dim: usize,
    /// Positions under the convolution.
    pub taps: usize,
    /// Every layer whose number, from 1, is a multiple of this is softmax attention; the others are recurrent.
    pub attends_every: usize,
}

/// A dense network without gates and norms of heads, as most shapes begin.
const fn dense(name: &'static str, [hidden, layers, heads, kv_heads, head_dim, width, vocab]: [usize; 7]) -> Shape {
    Shape {
        name,
        hidden,
        layers,
        heads,
        kv_heads,
        head_dim,
        width,
        vocab,
        positions: 32768,
        tied: false,
        qk_norm: false,
        gated: false,
        rotary: 1.0,
        experts: None,
        delta: None,
        hadamard: None,
    }
}

/// A network of the Qwen3.5 family: three recurrent layers before each layer of attention.
const fn qwen35(name: &'static str, dims: [usize; 7], value_heads: usize) -> Shape {
    Shape {
        positions: 262144,
        qk_norm: true,
        gated: true,
        rotary: 0.25,
        delta: Some(DeltaShape {
            key_heads: 16,
            value_heads,
            head_dim: 128,
            taps: 4,
            attends_every: 4,
        }),
        ..dense(name, dims)
    }
}

/// Dimensions are those of each model's published `config.json` on the Hugging Face hub: HuggingFaceTB/SmolLM2-135M,
/// meta-llama/Llama-3.1-8B, Qwen/Qwen3-8B, Qwen/Qwen3-30B-A3B, Qwen/Qwen3.5-27B and Qwen/Qwen3.5-35B-A3B (the last two
/// without vision and draft head). bonsai-27b is Qwen3.5-27B with ternary weights in a rotated basis, as published in files of
/// type PQ2_0.
const SHAPES: [Shape; 7] = [
    Shape {
        tied: true,
        ..dense("smollm2-135m", [576, 30, 9, 3, 64, 1536, 49152])
    },
    dense("llama-8b", [4096, 32, 32, 8, 128, 14336, 128256]),
    Shape {
        qk_norm: true,
        ..dense("qwen3-8b", [4096, 36, 32, 8, 128, 12288, 151936])
    },
    Shape {
        positions: 40960,
        qk_norm: true,
        experts: Some(ExpertShape {
            count: 128,
            top_k: 8,
            width: 768,
            shared: 0,
        }),
        ..dense("qwen3-30b-a3b", [2048, 48, 32, 4, 128, 0, 151936])
    },
    qwen35("qwen3.5-27b", [5120, 64, 24, 4, 256, 17408, 248320], 48),
    Shape {
        hadamard: Some(1024),
        ..qwen35("bonsai-27b", [5120, 64, 24, 4, 256, 17408, 248320], 48)
    },
    Shape {
        experts: Some(ExpertShape {
            count: 256,
            top_k: 8,
            width: 512,
            shared: 512,
        }),
        ..qwen35("qwen3.5-35b-a3b", [2048, 40, 16, 2, 256, 0, 248320], 32)
    },
];

/// The role of a tensor, by which its type is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// The embedding or the output projection.
    Table,
    /// A small matrix of a router, a gate or a recurrence, kept in f16.
    Gate,
    /// Any other tensor.
    Matrix,
}

impl Shape {
    /// The names of known shapes.
    pub fn names() -> impl Iterator<Item = &'static str> {
        SHAPES.iter().map(|shape| shape.name)
    }

    /// A known shape. Errors: `Usage` for an unknown name.
    pub fn named(name: &str) -> Result<Shape> {
        match SHAPES.iter().find(|shape| shape.name == name) {
            Some(shape) => Ok(shape.clone()),
            None => bail!(
                Usage,
                "there is no synthetic model '{name}'; known are {}",
                Shape::names().collect::<Vec<_>>().join(", ")
            ),
        }
    }

    /// The same with the first `layers` layers only. Errors: `Usage` for none, or for more than there are.
    pub fn with_layers(self, layers: usize) -> Result<Shape> {
        if !(1..=self.layers).contains(&layers) {
            bail!(Usage, "{layers} layers of {}, expected 1 to {}", self.name, self.layers);
        }
        Ok(Shape { layers, ..self })
    }

    /// The type in which such a network is used most.
    pub fn usual_type(&self) -> Dtype {
        match self.hadamard {
            Some(_) => Dtype::PQ2_0,
            None => Dtype::Q4tp,
        }
    }

    fn recurs(&self, layer: usize) -> bool {
        self.delta
            .is_some_and(|delta| !(layer + 1).is_multiple_of(delta.attends_every))
    }

    /// The description of the network. Errors: `Parse` for dimensions that no network has.
    pub(super) fn arch(&self) -> Result<Arch> {
        let kind = |layer| match self.recurs(layer) {
            true => "LinearAttention",
            false => "FullAttention",
        };
        let mut arch = json!({
            "arch_name": self.name,
            "hidden_size": self.hidden,
            "intermediate_size": self.width,
            "num_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "layer_types": (0..self.layers).map(kind).collect::<Vec<_>>(),
            "rms_norm_eps": 1e-5,
            "norm_style": "qwen",
            "partial_rotary_factor": self.rotary,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": self.positions,
        });
        if let Some(delta) = self.delta {
            arch["linear_num_key_heads"] = delta.key_heads.into();
            arch["linear_num_value_heads"] = delta.value_heads.into();
            arch["linear_key_head_dim"] = delta.head_dim.into();
            arch["linear_value_head_dim"] = delta.head_dim.into();
            arch["linear_conv_kernel_dim"] = delta.taps.into();
        }
        if let Some(experts) = self.experts {
            arch["moe"] = json!({
                "num_experts": experts.count,
                "top_k": experts.top_k,
                "moe_intermediate_size": experts.width,
                "norm_topk_prob": true,
                "shared_expert_intermediate_size": (experts.shared != 0).then_some(experts.shared),
            });
        }
        let Value::Object(arch) = arch else {
            bail!(Parse, "arch is not an object");
        };
        let mut arch = Arch::from_json(&arch)?;
        arch.prism_hadamard = self.hadamard.map(|block| self.rotation(block)).transpose()?;
        Ok(arch)
    }

    /// The rotation of all matrices but gates, with signs that are all 1.
    fn rotation(&self, block: u64) -> Result<Hadamard> {
        let tensors = self.tensors().into_iter();
        let matrices = tensors.filter(|(_, role, dims)| *role != Role::Gate && dims.len() == 2);
        let mut rotation = Hadamard::new(block, None)?;
        rotation.forward = matrices.map(|(name, ..)| name).filter(|name| name != EMBED).collect();
        rotation.inverse = [EMBED.to_owned()].into();
        Ok(rotation)
    }

    /// Every tensor with its dimensions.
    pub(super) fn tensors(&self) -> Vec<(String, Role, Vec<usize>)> {
        let mut all = vec![(EMBED.to_string(), Role::Table, vec![self.vocab, self.hidden])];
        for layer in 0..self.layers {
            let mut add = |name: &str, role, dims: &[usize]| {
                all.push((format!("model.layers.{layer}.{name}"), role, dims.to_vec()));
            };
            add("input_layernorm.weight", Role::Matrix, &[self.hidden]);
            match self.delta.filter(|_| self.recurs(layer)) {
                Some(delta) => self.delta_net(&delta, &mut add),
                None => self.attention(&mut add),
            }
            add("post_attention_layernorm.weight", Role::Matrix, &[self.hidden]);
            match self.experts {
                Some(experts) => self.mixture(&experts, &mut add),
                None => self.ffn("mlp", self.width, &mut add),
            }
        }
        all.push(("model.norm.weight".into(), Role::Matrix, vec![self.hidden]));
        if !self.tied {
            all.push(("lm_head.weight".into(), Role::Table, vec![self.vocab, self.hidden]));
        }
        all
    }

    fn attention(&self, add: &mut dyn FnMut(&str, Role, &[usize])) {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let queries = if self.gated { 2 * q } else { q };
        add("self_attn.q_proj.weight", Role::Matrix, &[queries, self.hidden]);
        add("self_attn.k_proj.weight", Role::Matrix, &[kv, self.hidden]);
        add("self_attn.v_proj.weight", Role::Matrix, &[kv, self.hidden]);
        add("self_attn.o_proj.weight", Role::Matrix, &[self.hidden, q]);
        if self.qk_norm {
            add("self_attn.q_norm.weight", Role::Matrix, &[self.head_dim]);
            add("self_attn.k_norm.weight", Role::Matrix, &[self.head_dim]);
        }
    }

    fn delta_net(&self, delta: &DeltaShape, add: &mut dyn FnMut(&str, Role, &[usize])) {
        let values = delta.value_heads * delta.head_dim;
        let channels = 2 * delta.key_heads * delta.head_dim + values;
        add("linear_attn.in_proj_qkv.weight", Role::Matrix, &[channels, self.hidden]);
        add("linear_attn.in_proj_z.weight", Role::Matrix, &[values, self.hidden]);
        for gate in ["linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"] {
            add(gate, Role::Gate, &[delta.value_heads, self.hidden]);
        }
        add("linear_attn.conv1d.weight", Role::Gate, &[channels, 1, delta.taps]);
        add("linear_attn.A_log", Role::Matrix, &[delta.value_heads]);
        add("linear_attn.dt_bias", Role::Matrix, &[delta.value_heads]);
        add("linear_attn.norm.weight", Role::Matrix, &[delta.head_dim]);
        add("linear_attn.out_proj.weight", Role::Matrix, &[self.hidden, values]);
    }

    fn mixture(&self, experts: &ExpertShape, add: &mut dyn FnMut(&str, Role, &[usize])) {
        add("mlp.gate.weight", Role::Gate, &[experts.count, self.hidden]);
        for expert in 0..experts.count {
            self.ffn(&format!("mlp.experts.{expert}"), experts.width, add);
        }
        if experts.shared != 0 {
            self.ffn("mlp.shared_expert", experts.shared, add);
            add("mlp.shared_expert_gate.weight", Role::Gate, &[1, self.hidden]);
        }
    }

    fn ffn(&self, at: &str, width: usize, add: &mut dyn FnMut(&str, Role, &[usize])) {
        add(&format!("{at}.gate_proj.weight"), Role::Matrix, &[width, self.hidden]);
        add(&format!("{at}.up_proj.weight"), Role::Matrix, &[width, self.hidden]);
        add(&format!("{at}.down_proj.weight"), Role::Matrix, &[self.hidden, width]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_as_many_as_the_names_say() {
        // 10⁹ elements, embedding and output projection included; the last two without vision and draft head.
        for (name, billions) in [
            ("smollm2-135m", 0.1345),
            ("llama-8b", 8.03),
            ("qwen3-8b", 8.19),
            ("qwen3-30b-a3b", 30.53),
            ("qwen3.5-27b", 26.9),
            ("qwen3.5-35b-a3b", 34.66),
        ] {
            let tensors = Shape::named(name).unwrap().tensors();
            let elements: usize = tensors.iter().map(|(_, _, dims)| dims.iter().product::<usize>()).sum();
            let off = elements as f64 / 1e9 / billions - 1.0;
            assert!(off.abs() < 0.005, "{name}: {elements}");
        }
    }

    #[test]
    fn layers_are_cut_at_the_end() {
        let whole = Shape::named("qwen3.5-27b").unwrap();
        let cut = whole.clone().with_layers(4).unwrap();
        assert_eq!(cut.tensors()[..50], whole.tensors()[..50]);
        assert!(cut.arch().unwrap().layer_types.len() == 4);
        assert!(whole.clone().with_layers(0).is_err() && whole.with_layers(65).is_err());
        assert!(Shape::named("qwen").is_err());
    }
}

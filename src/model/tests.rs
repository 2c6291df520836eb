//! Binding small networks of tensors in memory.

use super::*;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::source::{Arch, Stored, TensorId, TensorInfo, Tensors};
use serde_json::{Value, json};

/// Tensors of these names and shapes, without payloads.
struct Shapes(Vec<TensorInfo>);

impl Tensors for Shapes {
    fn infos(&self) -> &[TensorInfo] {
        &self.0
    }

    fn find(&self, name: &str) -> Option<TensorId> {
        self.0.iter().position(|info| info.name == name)
    }

    fn stored(&self, id: TensorId) -> Result<Stored<'_>> {
        unreachable!("tensor {id} is read")
    }

    fn release(&self, _: TensorId) {}
}

/// A network of two layers under construction.
struct Network {
    arch: Value,
    tensors: Vec<(String, Vec<u64>)>,
}

impl Network {
    /// Softmax attention with 2 query heads of 8 elements on 1 key-value head, and dense feed-forward networks of width 12.
    fn dense() -> Network {
        let arch = json!({
            "arch_name": "test", "hidden_size": 16, "intermediate_size": 12, "num_layers": 2, "num_attention_heads": 2,
            "num_kv_heads": 1, "head_dim": 8, "vocab_size": 20, "layer_types": ["FullAttention", "FullAttention"],
            "rms_norm_eps": 1e-5, "norm_style": "qwen", "tie_word_embeddings": true,
        });
        let mut network = Network {
            arch,
            tensors: Vec::new(),
        };
        network.add("model.embed_tokens.weight", &[20, 16]);
        for layer in 0..2 {
            for (name, shape) in [
                ("input_layernorm.weight", &[16][..]),
                ("self_attn.q_proj.weight", &[16, 16]),
                ("self_attn.k_proj.weight", &[8, 16]),
                ("self_attn.v_proj.weight", &[8, 16]),
                ("self_attn.o_proj.weight", &[16, 16]),
                ("post_attention_layernorm.weight", &[16]),
                ("mlp.gate_proj.weight", &[12, 16]),
                ("mlp.up_proj.weight", &[12, 16]),
                ("mlp.down_proj.weight", &[16, 12]),
            ] {
                network.add(&format!("model.layers.{layer}.{name}"), shape);
            }
        }
        network.add("model.norm.weight", &[16]);
        network
    }

    /// Adds a tensor, or replaces its shape.
    fn add(&mut self, name: &str, shape: &[u64]) -> &mut Network {
        self.remove(name).tensors.push((name.to_owned(), shape.to_vec()));
        self
    }

    fn remove(&mut self, name: &str) -> &mut Network {
        self.tensors.retain(|(found, _)| found != name);
        self
    }

    fn set(&mut self, key: &str, value: Value) -> &mut Network {
        self.arch[key] = value;
        self
    }

    /// Replaces the feed-forward network of layer 1 by 3 experts of width 4, of which a token uses 2.
    fn with_experts(&mut self) -> &mut Network {
        self.set(
            "moe",
            json!({"num_experts": 3, "top_k": 2, "moe_intermediate_size": 4, "norm_topk_prob": true}),
        );
        for projection in ["gate", "up", "down"] {
            self.remove(&format!("model.layers.1.mlp.{projection}_proj.weight"));
        }
        self.add("model.layers.1.mlp.gate.weight", &[3, 16]);
        for expert in 0..3 {
            let name = |projection: &str| format!("model.layers.1.mlp.experts.{expert}.{projection}_proj.weight");
            self.add(&name("gate"), &[4, 16])
                .add(&name("up"), &[4, 16])
                .add(&name("down"), &[16, 4]);
        }
        self
    }

    /// Replaces attention in layer 0 by a Gated DeltaNet with 1 key head and 2 value heads.
    fn with_delta_net(&mut self) -> &mut Network {
        self.set("layer_types", json!(["LinearAttention", "FullAttention"]));
        for (key, value) in [
            ("linear_num_key_heads", 1),
            ("linear_num_value_heads", 2),
            ("linear_key_head_dim", 4),
            ("linear_value_head_dim", 8),
            ("linear_conv_kernel_dim", 4),
        ] {
            self.set(key, value.into());
        }
        for projection in ["q", "k", "v", "o"] {
            self.remove(&format!("model.layers.0.self_attn.{projection}_proj.weight"));
        }
        for (name, shape) in [
            ("in_proj_qkv.weight", &[24, 16][..]),
            ("in_proj_z.weight", &[16, 16]),
            ("in_proj_b.weight", &[2, 16]),
            ("in_proj_a.weight", &[2, 16]),
            ("conv1d.weight", &[24, 1, 4]),
            ("A_log", &[2]),
            ("dt_bias", &[2]),
            ("norm.weight", &[8]),
            ("out_proj.weight", &[16, 16]),
        ] {
            self.add(&format!("model.layers.0.linear_attn.{name}"), shape);
        }
        self
    }

    fn arch(&self) -> Result<Arch> {
        let Value::Object(arch) = &self.arch else {
            unreachable!()
        };
        Arch::from_json(arch)
    }

    fn shapes(&self) -> Shapes {
        let info = |(name, shape): &(String, Vec<u64>)| TensorInfo {
            name: name.clone(),
            dtype: Dtype::F32,
            shape: shape.clone(),
            nbytes: 0,
        };
        Shapes(self.tensors.iter().map(info).collect())
    }

    fn bind(&self) -> Result<Model> {
        bind(&self.arch()?, &self.shapes())
    }

    fn refusal(&self) -> Error {
        self.bind().expect_err("must be refused")
    }
}

fn attention(model: &Model, layer: usize) -> &Attention {
    match &model.layers[layer].mixer {
        Mixer::Attention(attention) => attention,
        other => panic!("layer {layer} is {}", other.name()),
    }
}

#[test]
fn a_dense_network_has_its_dimensions_and_tensors() {
    let mut network = Network::dense();
    network
        .add("model.layers.1.self_attn.q_proj.bias", &[16])
        .add("other.weight", &[3])
        .set("query_pre_attn_scalar", json!(64))
        .set("attn_logit_softcapping", json!(50.0));
    let model = network.bind().unwrap();
    let id = |name: &str| network.shapes().find(name).unwrap();
    assert_eq!((model.hidden, model.vocab, model.layers.len()), (16, 20, 2));
    assert_eq!(
        (model.lm_head.weight, model.lm_head.rows, model.lm_head.cols),
        (model.embed, 20, 16)
    );
    assert_eq!((model.norm_add, model.activation), (0.0, Activation::Silu));
    assert_eq!(model.unused, [id("other.weight")]);
    let attention = attention(&model, 1);
    assert_eq!((attention.heads, attention.kv_heads, attention.head_dim), (2, 1, 8));
    assert_eq!((attention.scale, attention.softcap), (0.125, 50.0));
    assert_eq!((attention.gated, attention.window, attention.rope), (false, None, 0));
    let query = attention.projections[0];
    assert_eq!(query.weight, id("model.layers.1.self_attn.q_proj.weight"));
    assert_eq!(query.bias, Some(id("model.layers.1.self_attn.q_proj.bias")));
    let FeedForward::Dense(ffn) = &model.layers[0].ffn else {
        panic!("layer 0 has experts")
    };
    assert_eq!((ffn.down.rows, ffn.down.cols), (16, 12));
    assert!(!model.has_experts() && model.mtp.is_none());
    assert_eq!(model.parameters(&network.shapes()), 20 * 16 + 2 * 1376 + 16 + 16);
}

#[test]
fn tensors_decide_what_a_layer_consists_of() {
    let mut network = Network::dense();
    // Gated queries, norms of heads, post-norms, fused gate and up, an output projection of its own.
    network.add("model.layers.0.self_attn.q_proj.weight", &[32, 16]);
    for norm in ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] {
        network.add(&format!("model.layers.0.{norm}"), &[8]);
    }
    for norm in ["pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"] {
        network.add(&format!("model.layers.0.{norm}"), &[16]);
    }
    network
        .remove("model.layers.1.mlp.gate_proj.weight")
        .remove("model.layers.1.mlp.up_proj.weight")
        .add("model.layers.1.mlp.gate_up_proj.weight", &[24, 16])
        .add("lm_head.weight", &[20, 16])
        .set("tie_word_embeddings", false.into());
    let model = network.bind().unwrap();
    assert!(attention(&model, 0).gated && !attention(&model, 1).gated);
    assert!(attention(&model, 0).q_norm.is_some() && attention(&model, 1).q_norm.is_none());
    assert!(model.layers[0].attn_post_norm.is_some() && model.layers[0].ffn_post_norm.is_some());
    assert!(model.layers[1].attn_post_norm.is_none() && model.layers[1].ffn_post_norm.is_none());
    let FeedForward::Dense(ffn) = &model.layers[1].ffn else {
        panic!("layer 1 has experts")
    };
    assert!(matches!(ffn.gate_up, GateUp::Fused(both) if both.rows == 24));
    assert_ne!(model.lm_head.weight, model.embed);
    assert!(model.unused.is_empty());
}

#[test]
fn layers_of_a_pruned_model_differ_in_width() {
    let mut network = Network::dense();
    network
        .add("model.layers.1.mlp.gate_proj.weight", &[5, 16])
        .add("model.layers.1.mlp.up_proj.weight", &[5, 16])
        .add("model.layers.1.mlp.down_proj.weight", &[16, 5]);
    let model = network.bind().unwrap();
    let widths = model.layers.iter().map(|layer| match &layer.ffn {
        FeedForward::Dense(ffn) => ffn.down.cols,
        FeedForward::Moe(_) => 0,
    });
    assert_eq!(widths.collect::<Vec<_>>(), [12, 5]);
}

#[test]
fn windows_follow_the_layer_types_or_the_pattern() {
    let mut network = Network::dense();
    network
        .set("sliding_window", json!(7))
        .set("rope_local_base_freq", json!(100.0))
        .set("layer_types", json!(["SlidingAttention", "FullAttention"]));
    let model = network.bind().unwrap();
    let of = |model: &Model| [0, 1].map(|layer| (attention(model, layer).window, attention(model, layer).rope));
    assert_eq!(of(&model), [(Some(7), 1), (None, 0)]);
    network
        .set("layer_types", json!(["FullAttention", "FullAttention"]))
        .set("sliding_window_pattern", json!(2));
    assert_eq!(of(&network.bind().unwrap()), [(Some(7), 1), (None, 0)]);
}

#[test]
fn experts_and_recurrences_are_bound() {
    let mut network = Network::dense();
    network.with_experts().with_delta_net();
    network.add("model.layers.1.mlp.shared_expert.gate_proj.weight", &[6, 16]);
    network.add("model.layers.1.mlp.shared_expert.up_proj.weight", &[6, 16]);
    network.add("model.layers.1.mlp.shared_expert.down_proj.weight", &[16, 6]);
    network.add("model.layers.1.mlp.shared_expert_gate.weight", &[1, 16]);
    let model = network.bind().unwrap();
    let FeedForward::Moe(moe) = &model.layers[1].ffn else {
        panic!("layer 1 has no experts")
    };
    assert_eq!((moe.experts.len(), moe.top_k, moe.renormalise), (3, 2, true));
    assert!(moe.experts.iter().all(|expert| expert.down.cols == 4));
    assert!(moe.shared.as_ref().is_some_and(|shared| shared.down.cols == 6) && moe.shared_gate.is_some());
    let Mixer::DeltaNet(net) = &model.layers[0].mixer else {
        panic!("layer 0 is not recurrent")
    };
    assert_eq!(
        (net.key_heads, net.value_heads, net.channels(), net.taps),
        (1, 2, 24, 4)
    );
    assert!(matches!(net.inputs, DeltaInputs::Split { z, .. } if z.rows == 16));
    assert!(model.has_experts() && model.unused.is_empty());
}

#[test]
fn a_draft_head_is_bound_under_both_spellings() {
    for (at, [enorm, hnorm, proj]) in [
        ("model.mtp", ["enorm", "hnorm", "eh_proj"]),
        ("mtp", ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc"]),
    ] {
        let mut network = Network::dense();
        let layer = network.tensors.clone().into_iter().filter_map(|(name, shape)| {
            let rest = name.strip_prefix("model.layers.0.")?.to_owned();
            Some((rest, shape))
        });
        for (name, shape) in layer.collect::<Vec<_>>() {
            network.add(&format!("{at}.layers.0.{name}"), &shape);
        }
        network
            .add(&format!("{at}.{enorm}.weight"), &[16])
            .add(&format!("{at}.{hnorm}.weight"), &[16])
            .add(&format!("{at}.{proj}.weight"), &[16, 32])
            .add(&format!("{at}.norm.weight"), &[16]);
        let model = network.bind().unwrap();
        let mtp = model.mtp.as_ref().unwrap();
        assert_eq!((mtp.layers.len(), mtp.eh_proj.cols), (1, 32), "{at}");
        assert!(model.unused.is_empty(), "{at}");
        let missing = network.remove(&format!("{at}.norm.weight")).refusal();
        assert_eq!(missing.kind, Kind::MissingTensor, "{missing}");
    }
}

#[test]
fn missing_tensors_are_named() {
    let mut all = Network::dense();
    all.with_experts().with_delta_net();
    for (name, _) in &all.tensors {
        // Without its router a layer is dense, without its first projection it is attention.
        let needed = match name.as_str() {
            "model.layers.1.mlp.gate.weight" => "model.layers.1.mlp.gate_proj.weight",
            name => name,
        };
        let mut network = Network::dense();
        network.with_experts().with_delta_net().remove(name);
        let err = network.refusal();
        assert_eq!(err.kind, Kind::MissingTensor, "{name}: {err}");
        assert!(err.message.contains(&format!("'{needed}'")), "{name}: {err}");
    }
}

#[test]
fn wrong_shapes_are_refused_with_both_shapes() {
    let all = Network::dense();
    for (name, shape) in &all.tensors {
        // The width of a feed-forward network is that of its gate.
        let at = match name.contains("mlp.gate_proj") {
            true => shape.len() - 1,
            false => 0,
        };
        let mut wrong = shape.clone();
        wrong[at] += 4;
        let mut network = Network::dense();
        let err = network.add(name, &wrong).refusal();
        assert_eq!(err.kind, Kind::Parse, "{name}: {err}");
        let said = format!("'{name}' has shape {wrong:?}, the header wants {shape:?}");
        assert!(err.message.contains(&said), "{said}: {err}");
    }
    // A matrix where a vector is needed.
    let err = Network::dense().add("model.norm.weight", &[1, 16]).refusal();
    assert_eq!(err.kind, Kind::Parse, "{err}");
}

#[test]
fn unknown_layer_types_and_unsupported_constants_are_refused() {
    let refusal = |key: &str, value: Value| Network::dense().set(key, value).refusal();
    let err = refusal("layer_types", json!(["FullAttention", "Mamba"]));
    assert!(err.kind == Kind::Parse && err.message.contains("Mamba"), "{err}");
    // By the header the layer is recurrent, and it has no tensors of a recurrence.
    let mut network = Network::dense();
    network
        .with_delta_net()
        .set("layer_types", json!(["LinearAttention", "LinearAttention"]));
    assert!(network.bind().is_ok(), "tensors decide");
    network.remove("model.layers.1.self_attn.q_proj.weight");
    let err = network.refusal();
    assert!(
        err.kind == Kind::MissingTensor && err.message.contains("layer 1 is linear attention"),
        "{err}"
    );
    for (key, value, kind, wanted) in [
        ("norm_style", Value::Null, Kind::UnsupportedModel, "arch.norm_style"),
        ("attention_sink", json!(true), Kind::UnsupportedModel, "attention_sink"),
        ("hidden_size", json!(18), Kind::UnsupportedModel, "multiple of 4"),
        ("partial_rotary_factor", json!(0.5), Kind::UnsupportedModel, "rotated"),
        (
            "rope_freq_factors",
            json!([1.0]),
            Kind::Parse,
            "expected 4 rotated pairs",
        ),
    ] {
        let err = refusal(key, value);
        assert!(err.kind == kind && err.message.contains(wanted), "{key}: {err}");
    }
}

#[test]
fn experts_that_do_not_fit_are_refused() {
    let network = || {
        let mut network = Network::dense();
        network.with_experts();
        network
    };
    let expert = |part: &str| format!("model.layers.1.mlp.experts.{part}");
    let mut wide = network();
    wide.add(&expert("1.gate_proj.weight"), &[8, 16])
        .add(&expert("1.up_proj.weight"), &[8, 16])
        .add(&expert("1.down_proj.weight"), &[16, 8]);
    let mut extra = network();
    extra.add(&expert("3.gate_proj.weight"), &[4, 16]);
    let mut biased = network();
    biased.add(&expert("0.up_proj.bias"), &[4]);
    let mut unannounced = network();
    unannounced.set("moe", Value::Null);
    for (network, kind, wanted) in [
        (wide, Kind::UnsupportedModel, "expert 1 is 8 wide, expert 0 is 4"),
        (extra, Kind::Parse, "experts.3.gate_proj.weight"),
        (biased, Kind::UnsupportedModel, "has biases"),
        (unannounced, Kind::Parse, "the header has no arch.moe"),
    ] {
        let err = network.refusal();
        assert!(err.kind == kind && err.message.contains(wanted), "{wanted}: {err}");
    }
}

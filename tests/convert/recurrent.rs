//! Families with Gated DeltaNet layers: what of them reaches the container, and what is refused.

use crate::build::{Copy, converted, fixture, run, source_values, values};
use cmf_gpu::Kind;
use cmf_gpu::container::{Container, LayerType, MemoryTensors, NormStyle, Tensors};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::model::{Mixer, bind};
use serde_json::{Map, Value, json};

#[test]
fn headers_say_which_layers_recur_and_how() {
    let (linear, full) = (LayerType::LinearAttention, LayerType::FullAttention);
    let (_dir, report, container) = converted(&fixture("qwen3_5"), Dtype::F16);
    assert!(report.dropped.is_empty(), "{:?}", report.dropped);
    let arch = container.header().arch.clone();
    assert_eq!(arch.layer_types, [linear, linear, linear, full]);
    assert_eq!(
        (arch.norm_style, arch.tie_word_embeddings),
        (Some(NormStyle::Gemma), false)
    );
    assert_eq!(
        (arch.rope_theta, arch.partial_rotary_factor, arch.head_dim),
        (1e7, 0.25, 64)
    );
    let heads = (arch.linear_num_key_heads, arch.linear_num_value_heads);
    let dims = (arch.linear_key_head_dim, arch.linear_value_head_dim);
    assert_eq!(
        (heads, dims, arch.linear_conv_kernel_dim),
        ((Some(2), Some(4)), (Some(32), Some(32)), Some(4))
    );
    assert!(values(&container) == source_values("qwen3_5"));

    let copy = Copy::of("qwen3_5");
    std::fs::copy(
        fixture("qwen3_5").join("config.v5.json"),
        copy.path().join("config.json"),
    )
    .unwrap();
    let (_dir, _, other) = converted(copy.path(), Dtype::F16);
    assert_eq!(other.header_json()["arch"], container.header_json()["arch"]);
    // A list of layers overrides the rule.
    let list = json!([
        "full_attention",
        "linear_attention",
        "linear_attention",
        "linear_attention"
    ]);
    copy.edit("config.json", |config| drop(config.insert("layer_types".into(), list)));
    let err = run(copy.path(), &copy.path().join("o.cmf"), Dtype::F16).unwrap_err();
    assert_eq!(err.kind, Kind::MissingTensor);
    assert!(err.message.contains("model.layers.0.self_attn.q_proj.weight"), "{err}");
}

#[test]
fn the_published_layout_gives_the_same_network_and_its_multi_token_head() {
    let (_dir, _, plain) = converted(&fixture("qwen3_5"), Dtype::F16);
    let (_dir, report, published) = converted(&fixture("qwen3_5_hub"), Dtype::F16);
    assert!(report.dropped.is_empty(), "{:?}", report.dropped);
    let mut arch = published.header().arch.clone();
    assert_eq!(arch.mtp.take().map(|mtp| mtp.num_layers), Some(1));
    assert_eq!(arch, plain.header().arch);
    let mut all = values(&published);
    let head: Vec<String> = all
        .keys()
        .filter(|name| name.starts_with("model.mtp."))
        .cloned()
        .collect();
    let source = source_values("qwen3_5_hub");
    for (name, old) in [
        ("enorm.weight", "pre_fc_norm_embedding.weight"),
        ("hnorm.weight", "pre_fc_norm_hidden.weight"),
        ("eh_proj.weight", "fc.weight"),
        ("norm.weight", "norm.weight"),
        ("layers.0.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight"),
    ] {
        assert!(
            all[&format!("model.mtp.{name}")] == source[&format!("mtp.{old}")],
            "{name}"
        );
    }
    assert_eq!(head.len(), 15);
    head.iter().for_each(|name| drop(all.remove(name)));
    assert!(all == values(&plain));
}

#[test]
fn what_steers_the_recurrence_is_not_quantised() {
    for quant in [Dtype::Q4tp, Dtype::Q82f, Dtype::Q8Row] {
        let (_dir, _, container) = converted(&fixture("qwen3_5"), quant);
        let dtype = |part: &str| {
            let id = container.find(&format!("model.layers.1.linear_attn.{part}")).unwrap();
            container.infos()[id].dtype
        };
        for part in [
            "A_log",
            "dt_bias",
            "conv1d.weight",
            "norm.weight",
            "in_proj_a.weight",
            "in_proj_b.weight",
        ] {
            assert_eq!(dtype(part), Dtype::F16, "{part}");
        }
        for part in ["in_proj_qkv.weight", "in_proj_z.weight", "out_proj.weight"] {
            assert_eq!(dtype(part), quant, "{part}");
        }
        assert!(bind(&container.header().arch, &container).unwrap().unused.is_empty());
    }
}

#[test]
fn what_these_families_cannot_have_is_refused() {
    type Edit = fn(&mut Map<String, Value>);
    let cases: [(&str, Edit, &str); 6] = [
        (
            "qwen3_5",
            |c| drop(c.insert("attn_output_gate".into(), false.into())),
            "'attn_output_gate' is false",
        ),
        (
            "qwen3_5",
            |c| drop(c.insert("full_attention_interval".into(), 0.into())),
            "'full_attention_interval' is 0",
        ),
        (
            "qwen3_5",
            |c| {
                c.insert("num_experts".into(), 8.into());
                c.insert("mlp_only_layers".into(), json!([0, 1, 3]));
            },
            "layer 2 of this qwen3_5_text model is a mixture of experts",
        ),
        (
            "qwen3_5_hub",
            |c| c["text_config"]["mtp_use_dedicated_embeddings"] = true.into(),
            "'mtp_use_dedicated_embeddings' is true",
        ),
        (
            "qwen3_5",
            |c| drop(c.insert("layer_types".into(), json!(["full_attention"]))),
            "1 entries for 4 layers",
        ),
        (
            "qwen3",
            |c| drop(c.insert("layer_types".into(), json!(["linear_attention"; 3]))),
            "\"linear_attention\"",
        ),
    ];
    for (model, edit, wanted) in cases {
        let copy = Copy::of(model);
        copy.edit("config.json", edit);
        let err = run(copy.path(), &copy.path().join("o.cmf"), Dtype::F16).unwrap_err();
        assert!(
            err.kind == Kind::UnsupportedModel && err.message.contains(wanted),
            "{wanted}: {err}"
        );
    }
}

/// The tensors of a container but for those that `keep` says no to.
fn without(container: &Container, keep: impl Fn(&str) -> bool) -> MemoryTensors {
    let infos = container
        .infos()
        .iter()
        .enumerate()
        .filter(|(_, info)| keep(&info.name));
    let all = infos.map(|(id, info)| {
        let bytes = container.bytes(id).unwrap().to_vec();
        (info.name.clone(), info.dtype, info.shape.clone(), bytes)
    });
    MemoryTensors::new(all).unwrap()
}

#[test]
fn tensors_decide_what_a_layer_is() {
    let (_dir, _, container) = converted(&fixture("qwen3_5"), Dtype::F16);
    let arch = container.header().arch.clone();
    // Whatever the header calls the layers.
    let mut renamed = arch.clone();
    renamed.arch_name = "something".into();
    renamed.layer_types = vec![LayerType::FullAttention; 4];
    let model = bind(&renamed, &container).unwrap();
    let recurs: Vec<bool> = model
        .layers
        .iter()
        .map(|layer| matches!(layer.mixer, Mixer::DeltaNet(_)))
        .collect();
    assert_eq!(recurs, [true, true, true, false]);
    assert!(matches!(&model.layers[3].mixer, Mixer::Attention(attention) if attention.gated));

    for part in [
        "A_log",
        "conv1d.weight",
        "in_proj_a.weight",
        "norm.weight",
        "out_proj.weight",
    ] {
        let name = format!("model.layers.2.linear_attn.{part}");
        let err = bind(&arch, &without(&container, |tensor| tensor != name)).unwrap_err();
        assert_eq!(err.kind, Kind::MissingTensor);
        assert!(err.message.contains(&name), "{err}");
    }
    let err = bind(
        &arch,
        &without(&container, |tensor| !tensor.starts_with("model.layers.1.linear_attn.")),
    )
    .unwrap_err();
    assert_eq!(err.kind, Kind::MissingTensor);
    assert!(
        err.message.contains("model.layers.1.linear_attn.in_proj_qkv.weight"),
        "{err}"
    );

    let mut bad = arch.clone();
    bad.linear_key_head_dim = None;
    let err = bind(&bad, &container).unwrap_err();
    assert!(
        err.kind == Kind::Parse && err.message.contains("arch.linear_key_head_dim is missing"),
        "{err}"
    );
    for (key_dim, kind) in [
        (30, Kind::UnsupportedModel),
        (260, Kind::UnsupportedModel),
        (64, Kind::Parse),
    ] {
        let mut bad = arch.clone();
        bad.linear_key_head_dim = Some(key_dim);
        let err = bind(&bad, &container).unwrap_err();
        assert_eq!(err.kind, kind, "{err}");
    }
    // A size no tensor has, that would wrap around.
    let mut bad = arch.clone();
    bad.linear_num_value_heads = Some(1 << 62);
    let err = bind(&bad, &container).unwrap_err();
    assert_eq!(err.kind, Kind::Parse, "{err}");
}

//! Differences between families in Hugging Face directories: windows, norms, caps, rotations and draft heads in the header.

use crate::build::{Copy, converted, fixture, run, source_values, values};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::source::{HiddenAct, LayerType, NormStyle};
use serde_json::{Value, json};
use std::collections::BTreeMap;

fn arch_of(copy: &Copy) -> cmf_gpu::source::Arch {
    converted(copy.path(), Dtype::F16).2.header().arch.clone()
}

#[test]
fn windows_follow_the_family() {
    let (sliding, full) = (LayerType::SlidingAttention, LayerType::FullAttention);
    let arch = arch_of(&Copy::of("mistral_swa"));
    assert_eq!(arch.layer_types, [sliding; 3]);
    assert_eq!((arch.sliding_window, arch.sliding_window_pattern), (Some(8), None));
    // Without the key the family's default window, with null none.
    let copy = Copy::of("mistral_swa");
    copy.edit("config.json", |config| drop(config.remove("sliding_window")));
    assert_eq!(arch_of(&copy).sliding_window, Some(4096));
    copy.edit("config.json", |config| {
        drop(config.insert("sliding_window".into(), Value::Null))
    });
    let arch = arch_of(&copy);
    assert_eq!((arch.sliding_window, arch.layer_types), (None, vec![full; 3]));

    let arch = arch_of(&Copy::of("gemma2"));
    assert_eq!(arch.layer_types, [sliding, full, sliding, full]);
    assert_eq!((arch.sliding_window, arch.sliding_window_pattern), (Some(16), Some(2)));

    let copy = Copy::of("gemma3");
    let arch = arch_of(&copy);
    assert_eq!(arch.layer_types, [sliding, sliding, full, sliding, sliding, full]);
    assert_eq!((arch.sliding_window, arch.sliding_window_pattern), (Some(8), Some(3)));
    // A list that follows no pattern.
    let list = json!([
        "full_attention",
        "sliding_attention",
        "full_attention",
        "full_attention",
        "full_attention",
        "full_attention"
    ]);
    copy.edit("config.json", |config| drop(config.insert("layer_types".into(), list)));
    let arch = arch_of(&copy);
    assert_eq!(arch.layer_types, [full, sliding, full, full, full, full]);
    assert_eq!((arch.sliding_window, arch.sliding_window_pattern), (Some(8), None));

    let copy = Copy::of("phi3");
    copy.edit("config.json", |config| {
        drop(config.insert("sliding_window".into(), 2047.into()))
    });
    assert_eq!(arch_of(&copy).layer_types, [sliding; 3]);
}

#[test]
fn gemma_headers() {
    let arch = arch_of(&Copy::of("gemma2"));
    assert_eq!(
        (arch.norm_style, arch.hidden_act),
        (Some(NormStyle::Gemma), Some(HiddenAct::GeluTanh))
    );
    assert_eq!(
        (arch.embed_multiplier as f32, arch.query_pre_attn_scalar),
        (128f32.sqrt(), Some(24.0))
    );
    assert_eq!(
        (arch.attn_logit_softcapping, arch.final_logit_softcapping),
        (Some(5.0), Some(8.0))
    );
    assert!(arch.tie_word_embeddings && arch.rope_local_base_freq.is_none());
    // Without the keys the family's default caps, with null none.
    let copy = Copy::of("gemma2");
    copy.edit("config.json", |config| {
        config.remove("attn_logit_softcapping");
        config.insert("final_logit_softcapping".into(), Value::Null);
    });
    let arch = arch_of(&copy);
    assert_eq!(
        (arch.attn_logit_softcapping, arch.final_logit_softcapping),
        (Some(50.0), None)
    );

    let arch = arch_of(&Copy::of("gemma3"));
    assert_eq!((arch.embed_multiplier, arch.query_pre_attn_scalar), (8.0, Some(32.0)));
    assert_eq!((arch.rope_theta, arch.rope_local_base_freq), (1e6, Some(1e4)));
    assert_eq!(arch.rope_freq_factors, Some(vec![8.0; 16]));
    assert!(arch.tie_word_embeddings);
    assert_eq!(
        (arch.attn_logit_softcapping, arch.final_logit_softcapping),
        (None, None)
    );
}

/// A larger model of the family as published: the language model inside another model, most keys left out.
#[test]
fn a_sparse_nested_gemma_has_the_defaults_of_its_family() {
    let copy = Copy::of("gemma3");
    copy.edit("config.json", |config| {
        let mut inner = std::mem::take(config);
        for key in [
            "rope_theta",
            "rope_local_base_freq",
            "query_pre_attn_scalar",
            "max_position_embeddings",
            "hidden_act",
            "hidden_activation",
            "rms_norm_eps",
            "sliding_window_pattern",
        ] {
            inner.remove(key);
        }
        config.insert("text_config".into(), inner.into());
        config.insert("model_type".into(), "gemma3".into());
        config.insert("eos_token_id".into(), json!([1, 261]));
    });
    let mut tensors: BTreeMap<_, _> = source_values("gemma3")
        .into_iter()
        .map(|(name, v)| (format!("language_model.{name}"), v))
        .collect();
    tensors.insert("vision_tower.patch.weight".into(), (vec![2, 2], vec![0.0; 4]));
    let (_dir, report, container) = converted(copy.tensors(&tensors).path(), Dtype::F16);
    assert!(values(&container) == source_values("gemma3"));
    assert_eq!(
        report.dropped,
        ["vision_tower.patch.weight: not part of the language model"]
    );
    let arch = &container.header().arch;
    assert_eq!((arch.rope_theta, arch.rope_local_base_freq), (1e6, Some(1e4)));
    assert_eq!((arch.query_pre_attn_scalar, arch.rms_norm_eps), (Some(256.0), 1e-6));
    assert_eq!(
        (arch.max_position_embeddings, arch.sliding_window_pattern),
        (Some(131_072), Some(6))
    );
    assert_eq!(arch.hidden_act, Some(HiddenAct::GeluTanh));
}

#[test]
fn longrope_ends_where_its_first_list_does() {
    let (_dir, report, container) = converted(&fixture("phi3_longrope"), Dtype::F16);
    let arch = &container.header().arch;
    let factors = arch.rope_freq_factors.clone().unwrap();
    assert_eq!((factors.len(), factors[0], factors[1]), (16, 1.0, 1.05));
    assert_eq!(arch.max_position_embeddings, Some(256));
    let yarn = arch.yarn.clone().unwrap();
    assert_eq!((yarn.factor, yarn.original_max_position_embeddings), (1.0, 256));
    assert_eq!(yarn.attention_factor, Some((1.0 + 4f64.ln() / 256f64.ln()).sqrt()));
    assert_eq!(report.notes.len(), 1);
    assert!(report.notes[0].contains("ends at 256 of 1024"), "{:?}", report.notes);
    // Other names for the same scheme, and an explicit factor.
    for name in ["su", "yarn"] {
        let copy = Copy::of("phi3_longrope");
        copy.edit("config.json", |config| config["rope_scaling"]["type"] = name.into());
        assert_eq!(&arch_of(&copy), arch);
    }
    let copy = Copy::of("phi3_longrope");
    copy.edit("config.json", |config| {
        config["rope_scaling"]["attention_factor"] = 1.5.into()
    });
    assert_eq!(arch_of(&copy).yarn.unwrap().attention_factor, Some(1.5));
    assert_eq!(arch_of(&Copy::of("phi3")).yarn, None);
}

#[test]
fn a_multi_token_head_comes_along() {
    let (_dir, report, container) = converted(&fixture("qwen3_mtp"), Dtype::F16);
    let head = container.header().arch.mtp.clone().unwrap();
    assert_eq!((head.num_layers, head.share_lm_head, head.share_embed), (1, true, true));
    assert!(report.dropped.is_empty());
    let names: Vec<&str> = container.infos().iter().map(|info| info.name.as_str()).collect();
    let start = names.iter().position(|name| name.starts_with("model.mtp.")).unwrap();
    assert_eq!(names[start - 1], "lm_head.weight");
    assert_eq!(
        names[start..start + 4],
        [
            "model.mtp.enorm.weight",
            "model.mtp.hnorm.weight",
            "model.mtp.eh_proj.weight",
            "model.mtp.layers.0.input_layernorm.weight"
        ]
    );
    assert_eq!(*names.last().unwrap(), "model.mtp.norm.weight");
    let trunk = |mut tensors: BTreeMap<String, (Vec<u64>, Vec<f32>)>| {
        tensors.retain(|name, _| !name.starts_with("model.mtp."));
        tensors
    };
    // A draft head that is announced and missing; one that is not announced, complete and incomplete.
    let copy = Copy::of("qwen3_mtp");
    let (_dir, report, container) = converted(copy.tensors(&trunk(source_values("qwen3_mtp"))).path(), Dtype::F16);
    assert_eq!(container.header().arch.mtp, None);
    assert!(
        report.notes.iter().any(|note| note.contains("draft head")),
        "{:?}",
        report.notes
    );
    let copy = Copy::of("qwen3_mtp");
    copy.edit("config.json", |config| drop(config.remove("num_nextn_predict_layers")));
    let (_dir, report, container) = converted(copy.path(), Dtype::F16);
    assert_eq!(container.header().arch.mtp, Some(head));
    assert!(report.dropped.is_empty() && values(&container) == source_values("qwen3_mtp"));
    let mut tensors = source_values("qwen3_mtp");
    tensors.remove("model.mtp.hnorm.weight");
    let (_dir, report, container) = converted(copy.tensors(&tensors).path(), Dtype::F16);
    assert_eq!(container.header().arch.mtp, None);
    assert_eq!(
        report.dropped.len(),
        tensors.len() - trunk(source_values("qwen3_mtp")).len()
    );
    assert!(values(&container) == trunk(source_values("qwen3_mtp")));
    // An announced draft head that is incomplete.
    let copy = Copy::of("qwen3_mtp");
    copy.tensors(&tensors);
    let err = run(copy.path(), &copy.path().join("o.cmf"), Dtype::F16).unwrap_err();
    assert!(err.message.contains("model.mtp.hnorm.weight"), "{err}");
}

#[test]
fn unsupported_configurations_are_refused() {
    type Edit = fn(&mut serde_json::Map<String, Value>);
    let cases: [(&str, Edit, &str); 6] = [
        (
            "gemma3",
            |c| drop(c.insert("use_bidirectional_attention".into(), true.into())),
            "use_bidirectional_attention",
        ),
        (
            "gemma3",
            |c| {
                drop(c.insert(
                    "rope_parameters".into(),
                    json!({"sliding_attention": {"rope_type": "linear", "factor": 2.0}}),
                ))
            },
            "sliding_attention",
        ),
        (
            "gemma3",
            |c| drop(c.insert("rope_parameters".into(), json!({"chunked_attention": {}}))),
            "chunked_attention",
        ),
        (
            "qwen3",
            |c| drop(c.insert("rope_parameters".into(), json!({"full_attention": {}}))),
            "full_attention",
        ),
        (
            "phi3_longrope",
            |c| c["rope_scaling"]["short_factor"] = json!([1.0]),
            "expected 16 numbers",
        ),
        (
            "phi3_longrope",
            |c| drop(c["rope_scaling"].as_object_mut().unwrap().remove("short_factor")),
            "'short_factor'",
        ),
    ];
    for (model, edit, wanted) in cases {
        let copy = Copy::of(model);
        copy.edit("config.json", edit);
        let err = run(copy.path(), &copy.path().join("o.cmf"), Dtype::F16).unwrap_err();
        assert!(
            err.kind == cmf_gpu::Kind::UnsupportedModel && err.message.contains(wanted),
            "{wanted}: {err}"
        );
    }
}

//! Hugging Face directories: all tensors are kept, old and new configurations agree, shards equal one file.

use crate::build::{Copy, MODELS, converted, fixture, json, run, safetensors_f32, source_values, values};
use cmf_gpu::Kind;
use cmf_gpu::convert::{Event, Options, convert};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::source::{HiddenAct, LayerType, NormStyle};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::ControlFlow;

#[test]
fn f16_keeps_every_value() {
    for model in MODELS {
        let (_dir, report, container) = converted(&fixture(model), Dtype::F16);
        let source = source_values(model);
        assert_eq!(report.tensors, source.len());
        assert!(report.dropped.is_empty(), "{model}: {:?}", report.dropped);
        assert!(values(&container) == source, "{model}: values differ");
    }
}

#[test]
fn tensors_lie_in_the_order_of_their_use() {
    let (_dir, _, container) = converted(&fixture("llama_untied"), Dtype::F16);
    let names: Vec<&str> = container.infos().iter().map(|info| info.name.as_str()).collect();
    let layer = |layer: usize| {
        let parts = [
            "input_layernorm",
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "post_attention_layernorm",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        ];
        parts.map(|part| format!("model.layers.{layer}.{part}.weight"))
    };
    let mut wanted = vec!["model.embed_tokens.weight".to_owned()];
    wanted.extend(layer(0));
    wanted.extend(layer(1));
    wanted.extend(["model.norm.weight".to_owned(), "lm_head.weight".to_owned()]);
    assert_eq!(names, wanted);
}

#[test]
fn both_spellings_of_a_configuration_give_one_header() {
    for model in MODELS {
        let (_dir, _, old) = converted(&fixture(model), Dtype::F16);
        let copy = Copy::of(model);
        std::fs::copy(fixture(model).join("config.v5.json"), copy.path().join("config.json")).unwrap();
        let (_dir, _, new) = converted(copy.path(), Dtype::F16);
        assert_eq!(old.header_json()["arch"], new.header_json()["arch"], "{model}");
        assert_eq!(old.header().tokenizer_config, new.header().tokenizer_config, "{model}");
    }
}

#[test]
fn the_header_says_what_the_configuration_says() {
    let (_dir, _, container) = converted(&fixture("qwen2"), Dtype::F16);
    let arch = &container.header().arch;
    assert_eq!(arch.arch_name, "qwen2");
    assert_eq!(
        (arch.hidden_size, arch.intermediate_size, arch.num_layers),
        (96, 160, 3)
    );
    assert_eq!(
        (
            arch.num_attention_heads,
            arch.num_kv_heads,
            arch.head_dim,
            arch.vocab_size
        ),
        (3, 1, 32, 544)
    );
    assert_eq!((arch.rope_theta, arch.rms_norm_eps), (1e6, 1e-6));
    assert_eq!(
        (arch.norm_style, arch.hidden_act),
        (Some(NormStyle::Qwen), Some(HiddenAct::Silu))
    );
    assert_eq!((arch.max_position_embeddings, arch.sliding_window), (Some(2048), None));
    assert_eq!(arch.layer_types, [LayerType::FullAttention; 3]);
    assert!(arch.tie_word_embeddings && arch.rope_freq_factors.is_none() && arch.yarn.is_none());
    let tokens = &container.header().tokenizer_config;
    assert_eq!(
        (
            tokens.eos_token_ids.as_slice(),
            tokens.bos_token_id,
            tokens.pad_token_id
        ),
        ([507, 505].as_slice(), None, Some(505))
    );
    let template = json(&fixture("qwen2").join("tokenizer_config.json"))["chat_template"].clone();
    assert_eq!(tokens.chat_template.as_deref(), template.as_str());
    let tokenizer = std::fs::read(fixture("qwen2").join("tokenizer.json")).unwrap();
    assert_eq!(container.tokenizer_json(), Some(tokenizer.as_slice()));
    assert_eq!(
        container.header_json()["provenance"]["generation_config"],
        json!({"do_sample": false})
    );
}

#[test]
fn rotation_is_scaled_by_divisors() {
    let factors = |model: &str| {
        converted(&fixture(model), Dtype::F16)
            .2
            .header()
            .arch
            .rope_freq_factors
            .clone()
    };
    assert_eq!(factors("llama_bias"), Some(vec![2.0; 16]));
    assert_eq!(factors("llama_tied"), None);
    let llama3 = factors("llama3_rope").unwrap();
    // From the published formula, computed elsewhere in single precision: factor 8, low 1, high 4, original length 32.
    let wanted = LLAMA3;
    assert_eq!(llama3.len(), wanted.len());
    for (found, wanted) in llama3.iter().zip(wanted) {
        assert!((found - wanted).abs() < 1e-5 * wanted, "{found} {wanted}");
    }
}

/// inv_freq / scaled inv_freq of `llama3_rope`.
const LLAMA3: [f64; 16] = [
    1.0, 1.4955258, 3.2995393, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0,
];

#[test]
fn yarn_and_windows_reach_the_header() {
    let copy = Copy::of("qwen3");
    copy.edit("config.json", |config| {
        config.insert(
            "rope_scaling".into(),
            json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}),
        );
        config.insert("use_sliding_window".into(), true.into());
        config.insert("sliding_window".into(), 64.into());
        config.insert("max_window_layers".into(), 2.into());
    });
    let (_dir, _, container) = converted(copy.path(), Dtype::F16);
    let arch = &container.header().arch;
    let yarn = arch.yarn.clone().unwrap();
    assert_eq!((yarn.factor, yarn.original_max_position_embeddings), (4.0, 512));
    assert_eq!((yarn.beta_fast, yarn.beta_slow), (32.0, 1.0));
    assert_eq!(yarn.attention_factor, Some(0.1 * 4f64.ln() + 1.0));
    assert_eq!(arch.sliding_window, Some(64));
    let (full, sliding) = (LayerType::FullAttention, LayerType::SlidingAttention);
    assert_eq!(arch.layer_types, [full, full, sliding]);
}

#[test]
fn shards_equal_one_file() {
    let (_dir, _, whole) = converted(&fixture("llama_untied"), Dtype::Q8Row);
    let copy = Copy::of("llama_untied");
    std::fs::remove_file(copy.path().join("model.safetensors")).unwrap();
    let all = source_values("llama_untied");
    let mut map = serde_json::Map::new();
    for part in 0..2 {
        let name = format!("model-{:05}-of-00002.safetensors", part + 1);
        let tensors: BTreeMap<_, _> = all
            .iter()
            .enumerate()
            .filter(|(i, _)| i % 2 == part)
            .map(|(_, (k, v))| (k.clone(), v.clone()))
            .collect();
        map.extend(tensors.keys().map(|tensor| (tensor.clone(), name.clone().into())));
        std::fs::write(copy.path().join(name), safetensors_f32(&tensors)).unwrap();
    }
    let index = json!({"metadata": {"total_size": 0}, "weight_map": map});
    std::fs::write(copy.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    let (_dir, _, sharded) = converted(copy.path(), Dtype::Q8Row);
    assert_eq!(whole.infos(), sharded.infos());
    assert_eq!(whole.header_json()["arch"], sharded.header_json()["arch"]);
}

#[test]
fn a_single_file_is_enough() {
    let (_dir, _, folder) = converted(&fixture("llama_bias"), Dtype::F16);
    let (_dir, _, file) = converted(&fixture("llama_bias").join("model.safetensors"), Dtype::F16);
    assert_eq!(folder.infos(), file.infos());
    assert_eq!(folder.header().arch, file.header().arch);
}

#[test]
fn a_nested_text_model_is_found() {
    let copy = Copy::of("qwen3");
    copy.edit("config.json", |config| {
        let tie = config.remove("tie_word_embeddings").unwrap();
        let inner = Value::Object(std::mem::take(config));
        config.insert("text_config".into(), inner);
        config.insert("model_type".into(), "some_vision_model".into());
        config.insert("tie_word_embeddings".into(), tie);
    });
    let mut tensors: BTreeMap<_, _> = source_values("qwen3")
        .into_iter()
        .map(|(name, v)| (name.replacen("model.", "model.language_model.", 1), v))
        .collect();
    tensors.insert("model.visual.patch.weight".into(), (vec![2, 2], vec![0.0; 4]));
    let (_dir, report, container) = converted(copy.tensors(&tensors).path(), Dtype::F16);
    assert!(values(&container) == source_values("qwen3"));
    assert_eq!(
        report.dropped,
        ["model.visual.patch.weight: not part of the language model"]
    );
    assert!(container.header().arch.tie_word_embeddings);
}

#[test]
fn a_tied_head_is_dropped_only_when_it_is_a_copy() {
    let copy = Copy::of("llama_tied");
    let mut tensors = source_values("llama_tied");
    let mut head = tensors["model.embed_tokens.weight"].clone();
    tensors.insert("lm_head.weight".into(), head.clone());
    tensors.insert(
        "model.layers.0.self_attn.rotary_emb.inv_freq".into(),
        (vec![16], vec![1.0; 16]),
    );
    let (_dir, report, container) = converted(copy.tensors(&tensors).path(), Dtype::F16);
    assert_eq!(
        report.dropped,
        [
            "lm_head.weight: equal to the tied model.embed_tokens.weight",
            "model.layers.0.self_attn.rotary_emb.inv_freq: follows from rope_theta"
        ]
    );
    assert!(container.header().arch.tie_word_embeddings);
    assert!(values(&container) == source_values("llama_tied"));

    *head.1.last_mut().unwrap() = 0.5;
    tensors.insert("lm_head.weight".into(), head.clone());
    let (_dir, report, container) = converted(copy.tensors(&tensors).path(), Dtype::F16);
    assert!(!container.header().arch.tie_word_embeddings);
    assert_eq!(report.notes.len(), 1);
    assert!(values(&container)["lm_head.weight"] == head);
}

#[test]
fn templates_come_from_their_own_file_first() {
    let template = |copy: &Copy| {
        converted(copy.path(), Dtype::F16)
            .2
            .header()
            .tokenizer_config
            .chat_template
            .clone()
    };
    let copy = Copy::of("llama_bias");
    let named = json!([{"name": "rag", "template": "r"}, {"name": "default", "template": "list"}]);
    copy.edit("tokenizer_config.json", |config| {
        drop(config.insert("chat_template".into(), named))
    });
    assert_eq!(template(&copy).as_deref(), Some("list"));
    std::fs::write(copy.path().join("chat_template.json"), r#"{"chat_template": "json"}"#).unwrap();
    assert_eq!(template(&copy).as_deref(), Some("json"));
    std::fs::write(copy.path().join("chat_template.jinja"), "jinja\n").unwrap();
    assert_eq!(template(&copy).as_deref(), Some("jinja\n"));
}

#[test]
fn ends_of_text_are_united() {
    let copy = Copy::of("llama_bias");
    copy.edit("generation_config.json", |config| {
        config.insert("eos_token_id".into(), json!([7, 9]));
        config.insert("temperature".into(), json!(0.6));
    });
    copy.edit("config.json", |config| {
        drop(config.insert("eos_token_id".into(), 9.into()))
    });
    copy.edit("tokenizer_config.json", |config| {
        drop(config.insert("eos_token".into(), json!({"content": "</s>"})))
    });
    let (_dir, _, container) = converted(copy.path(), Dtype::F16);
    assert_eq!(container.header().tokenizer_config.eos_token_ids, [7, 9, 2]);
    assert_eq!(
        container.header_json()["provenance"]["generation_config"]["temperature"],
        json!(0.6)
    );
}

#[test]
fn types_follow_the_rules() {
    let of = |quant: Dtype| {
        let (_dir, report, container) = converted(&fixture("llama_bias"), quant);
        let dtype = |name: &str| container.infos()[container.find(name).unwrap()].dtype;
        let names = [
            "model.embed_tokens.weight",
            "lm_head.weight",
            "model.layers.1.mlp.up_proj.weight",
            "model.norm.weight",
            "model.layers.0.self_attn.q_proj.bias",
        ];
        (names.map(dtype), report.notes)
    };
    for quant in [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::Q8Row, Dtype::Q82f] {
        assert_eq!(of(quant), ([quant, quant, quant, Dtype::F16, Dtype::F16], vec![]));
    }
    for quant in [Dtype::Q4Block, Dtype::Q4Tiled, Dtype::Q4tp] {
        let (found, notes) = of(quant);
        assert_eq!(found, [Dtype::Q82f, Dtype::Q82f, quant, Dtype::F16, Dtype::F16]);
        assert_eq!(notes.len(), 1);
        assert!(notes[0].contains("q8_2f"));
    }
}

#[test]
fn progress_names_every_tensor() {
    let dir = tempfile::TempDir::new().unwrap();
    let mut seen = Vec::new();
    let report = convert(
        &fixture("llama_bias"),
        &dir.path().join("o.cmf"),
        &Options::new(Dtype::F16),
        &mut |Event::Tensor { done, total, name }| {
            seen.push((done, total, name.to_owned()));
            ControlFlow::Continue(())
        },
    );
    let total = report.unwrap().tensors;
    assert_eq!(seen.len(), total);
    assert_eq!(seen[0], (1, total, "model.embed_tokens.weight".to_owned()));
    assert_eq!(seen[total - 1], (total, total, "lm_head.weight".to_owned()));
}

#[test]
fn a_cancelled_conversion_leaves_nothing() {
    let dir = tempfile::TempDir::new().unwrap();
    let mut seen = 0;
    let result = convert(
        &fixture("llama_bias"),
        &dir.path().join("o.cmf"),
        &Options::new(Dtype::F16),
        &mut |_| {
            seen += 1;
            ControlFlow::Break(())
        },
    );
    assert_eq!(result.unwrap_err().kind, Kind::Interrupted);
    assert_eq!(seen, 1);
    assert_eq!(dir.path().read_dir().unwrap().count(), 0);
}

#[test]
fn a_vector_that_f16_cannot_hold_is_an_error_and_leaves_nothing() {
    let copy = Copy::of("llama_untied");
    let mut tensors = source_values("llama_untied");
    tensors.get_mut("model.norm.weight").unwrap().1[3] = 70_000.0;
    copy.tensors(&tensors);
    let dir = tempfile::TempDir::new().unwrap();
    let err = run(copy.path(), &dir.path().join("o.cmf"), Dtype::F32).unwrap_err();
    assert!(
        err.message.contains("model.norm.weight") && err.message.contains("col 3"),
        "{err}"
    );
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

//! Valid sources that are not supported are refused, with a message that names the operand.

use crate::build::{Copy, Gguf, Meta, fixture, gguf_of, run, source_values, with_header};
use cmf_gpu::convert::{Options, convert};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::{Error, Kind};
use serde_json::{Map, Value, json};
use std::ops::ControlFlow;
use std::path::Path;
use tempfile::TempDir;

fn refusal(src: &Path) -> Error {
    let dir = TempDir::new().unwrap();
    let err = run(src, &dir.path().join("o.cmf"), Dtype::F16).expect_err("must be refused");
    assert_eq!(
        std::fs::read_dir(dir.path()).unwrap().count(),
        0,
        "something is left: {err}"
    );
    err
}

#[test]
fn configurations() {
    type Edit = fn(&mut Map<String, Value>);
    let cases: [(Edit, Kind, &str); 19] = [
        (
            |c| drop(c.insert("model_type".into(), "mamba".into())),
            Kind::UnsupportedModel,
            "'mamba'",
        ),
        (
            |c| drop(c.remove("model_type")),
            Kind::UnsupportedModel,
            "'model_type' is missing",
        ),
        (
            |c| drop(c.insert("model_type".into(), 5.into())),
            Kind::Parse,
            "'model_type': expected a string",
        ),
        (
            |c| drop(c.insert("hidden_act".into(), "relu2".into())),
            Kind::UnsupportedModel,
            "'relu2'",
        ),
        (
            |c| drop(c.insert("quantization_config".into(), json!({}))),
            Kind::UnsupportedModel,
            "'quantization_config'",
        ),
        (
            |c| drop(c.insert("rope_scaling".into(), json!({"type": "dynamic", "factor": 2}))),
            Kind::UnsupportedModel,
            "'dynamic'",
        ),
        (
            |c| drop(c.insert("rope_parameters".into(), json!({"rope_type": "new"}))),
            Kind::UnsupportedModel,
            "'new'",
        ),
        (
            |c| drop(c.insert("rope_scaling".into(), json!({"type": "linear"}))),
            Kind::UnsupportedModel,
            "'factor' is missing",
        ),
        (
            |c| drop(c.insert("rope_scaling".into(), json!({"type": "linear", "factor": -1}))),
            Kind::UnsupportedModel,
            "-1",
        ),
        (
            |c| {
                drop(c.insert(
                    "rope_scaling".into(),
                    json!({"type": "yarn", "factor": 2, "truncate": false}),
                ))
            },
            Kind::UnsupportedModel,
            "truncate",
        ),
        (
            |c| drop(c.insert("layer_types".into(), json!(["full_attention"]))),
            Kind::UnsupportedModel,
            "1 entries",
        ),
        (
            |c| drop(c.insert("layer_types".into(), json!(["full_attention", "chunked_attention"]))),
            Kind::UnsupportedModel,
            "chunked_attention",
        ),
        (
            |c| drop(c.insert("num_hidden_layers".into(), 1_000_000_000.into())),
            Kind::UnsupportedModel,
            "1000000000",
        ),
        (
            |c| drop(c.insert("num_attention_heads".into(), 0.into())),
            Kind::UnsupportedModel,
            "attention head count is 0",
        ),
        (
            |c| drop(c.insert("num_key_value_heads".into(), 3.into())),
            Kind::Parse,
            "num_kv_heads",
        ),
        (
            |c| drop(c.insert("hidden_size".into(), u64::MAX.into())),
            Kind::UnsupportedModel,
            "hidden size",
        ),
        (
            |c| drop(c.insert("rms_norm_eps".into(), (-1e-5).into())),
            Kind::Parse,
            "rms_norm_eps",
        ),
        (
            |c| drop(c.insert("partial_rotary_factor".into(), 0.01.into())),
            Kind::UnsupportedModel,
            "rotate",
        ),
        (
            |c| drop(c.insert("vocab_size".into(), 511.into())),
            Kind::Parse,
            "model.embed_tokens.weight",
        ),
    ];
    for (edit, kind, wanted) in cases {
        let copy = Copy::of("llama_bias");
        copy.edit("config.json", edit);
        let err = refusal(copy.path());
        assert!(err.kind == kind && err.message.contains(wanted), "{wanted}: {err}");
    }
}

#[test]
fn tensors_that_are_missing_or_not_used() {
    let copy = Copy::of("qwen3");
    let mut tensors = source_values("qwen3");
    tensors.remove("model.layers.1.self_attn.q_norm.weight").unwrap();
    let err = refusal(copy.tensors(&tensors).path());
    assert_eq!(err.kind, Kind::MissingTensor);
    assert!(err.message.contains("model.layers.1.self_attn.q_norm.weight"), "{err}");

    let copy = Copy::of("llama_tied");
    let mut tensors = source_values("llama_tied");
    tensors.insert(
        "model.layers.0.self_attn.q_norm.weight".into(),
        (vec![32], vec![1.0; 32]),
    );
    let err = refusal(copy.tensors(&tensors).path());
    assert_eq!(err.kind, Kind::UnsupportedModel);
    assert!(err.message.contains("model.layers.0.self_attn.q_norm.weight"), "{err}");

    let copy = Copy::of("llama_untied");
    let mut tensors = source_values("llama_untied");
    tensors.remove("lm_head.weight").unwrap();
    let err = refusal(copy.tensors(&tensors).path());
    assert!(
        err.kind == Kind::MissingTensor && err.message.contains("lm_head.weight"),
        "{err}"
    );
}

#[test]
fn values_that_are_not_finite() {
    let copy = Copy::of("llama_bias");
    let mut tensors = source_values("llama_bias");
    tensors.get_mut("model.layers.0.mlp.up_proj.weight").unwrap().1[5] = f32::NAN;
    let err = refusal(copy.tensors(&tensors).path());
    assert!(
        err.kind == Kind::NonFinite && err.message.contains("model.layers.0.mlp.up_proj.weight"),
        "{err}"
    );
}

#[test]
fn types_by_name() {
    let copy = Copy::of("llama_bias");
    let header = |dtype: &str, bytes: usize| {
        let entry = json!({"dtype": dtype, "shape": [512, 64], "data_offsets": [0, bytes]});
        let small = json!({"dtype": "F32", "shape": [1], "data_offsets": [bytes, bytes + 4]});
        with_header(&json!({"model.embed_tokens.weight": entry, "model.norm.weight": small, "x": {"dtype": "F32", "shape": [0], "data_offsets": [bytes + 4, bytes + 4]}}).to_string(), &vec![0; bytes + 4])
    };
    for (dtype, bytes) in [("F8_E4M3", 32768), ("I64", 8 * 32768), ("U8", 32768), ("I4", 16384)] {
        std::fs::write(copy.path().join("model.safetensors"), header(dtype, bytes)).unwrap();
        let err = refusal(copy.path());
        assert!(
            err.kind == Kind::UnsupportedTensorType && err.message.contains(dtype),
            "{err}"
        );
        assert!(err.message.contains("model.embed_tokens.weight"), "{err}");
    }
}

#[test]
fn files_of_other_formats() {
    let dir = TempDir::new().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    for (name, bytes, wanted) in [
        ("a.bin", b"PK\x03\x04....".as_slice(), "pickled"),
        ("b.pt", b"\x80\x02......", "pickled"),
        ("c.xyz", b"hello world", "found bytes"),
        ("d.gguf", b"", "found bytes"),
    ] {
        let err = refusal(&file(name, bytes));
        assert!(err.kind == Kind::InvalidMagic && err.message.contains(wanted), "{err}");
    }
    assert_eq!(refusal(&dir.path().join("absent")).kind, Kind::Io);
    let empty = TempDir::new().unwrap();
    std::fs::write(empty.path().join("pytorch_model.bin"), b"PK").unwrap();
    let err = refusal(empty.path());
    assert!(err.kind == Kind::Io && err.message.contains("never read"), "{err}");
}

#[test]
fn an_input_is_never_the_output() {
    let copy = Copy::of("llama_bias");
    let weights = copy.path().join("model.safetensors");
    let before = std::fs::read(&weights).unwrap();
    let twisted = copy.path().join(".").join("model.safetensors");
    for src in [copy.path(), weights.as_path()] {
        assert_eq!(run(src, &twisted, Dtype::F16).unwrap_err().kind, Kind::Usage);
    }
    let cmf = copy.path().join("m.cmf");
    run(copy.path(), &cmf, Dtype::F16).unwrap();
    assert_eq!(run(&cmf, &cmf, Dtype::Q8Row).unwrap_err().kind, Kind::Usage);
    assert!(std::fs::read(&weights).unwrap() == before);
}

#[test]
fn outputs_that_cannot_be_written() {
    let dir = TempDir::new().unwrap();
    let src = fixture("llama_bias");
    assert_eq!(
        run(&src, &dir.path().join("no/such/folder/o.cmf"), Dtype::F16)
            .unwrap_err()
            .kind,
        Kind::Io
    );
}

#[test]
fn indexes_that_do_not_fit() {
    let write = |map: Value| {
        let copy = Copy::of("llama_bias");
        std::fs::rename(copy.path().join("model.safetensors"), copy.path().join("a.safetensors")).unwrap();
        let index = json!({"weight_map": map}).to_string();
        std::fs::write(copy.path().join("model.safetensors.index.json"), index).unwrap();
        copy
    };
    for (map, kind, wanted) in [
        (
            json!({"model.norm.weight": "b.safetensors"}),
            Kind::ShardMismatch,
            "b.safetensors",
        ),
        (
            json!({"nothing.weight": "a.safetensors"}),
            Kind::ShardMismatch,
            "nothing.weight",
        ),
        (
            json!({"model.norm.weight": "../a.safetensors"}),
            Kind::Parse,
            "model.norm.weight",
        ),
        (json!({"model.norm.weight": ".."}), Kind::Parse, "model.norm.weight"),
        (json!({"model.norm.weight": 5}), Kind::Parse, "model.norm.weight"),
        (json!([]), Kind::Parse, "weight_map"),
    ] {
        let err = refusal(write(map).path());
        assert!(err.kind == kind && err.message.contains(wanted), "{err}");
    }
    let copy = write(json!({"model.norm.weight": "a.safetensors", "lm_head.weight": "c.safetensors"}));
    std::fs::copy(copy.path().join("a.safetensors"), copy.path().join("c.safetensors")).unwrap();
    let err = refusal(copy.path());
    assert!(err.kind == Kind::Parse && err.message.contains("occurs twice"), "{err}");
}

#[test]
fn keys_of_gguf_files() {
    type Edit = fn(&mut Gguf);
    let cases: [(Edit, Kind, &str); 14] = [
        (
            |f| f.set("general.architecture", Meta::Str("mamba".into())),
            Kind::UnsupportedModel,
            "'mamba'",
        ),
        (
            |f| f.set("general.architecture", Meta::U32(1)),
            Kind::Parse,
            "'general.architecture'",
        ),
        (
            |f| f.set("llama.expert_count", Meta::U32(8)),
            Kind::UnsupportedModel,
            "'llama.expert_count' is 8",
        ),
        (
            |f| f.set("llama.logit_scale", Meta::F32(2.0)),
            Kind::UnsupportedModel,
            "'llama.logit_scale'",
        ),
        (
            |f| f.set("llama.rope.scaling.type", Meta::Str("longrope".into())),
            Kind::UnsupportedModel,
            "'longrope'",
        ),
        (
            |f| f.set("llama.vocab_size", Meta::U32(5)),
            Kind::UnsupportedModel,
            "'llama.vocab_size' is 5",
        ),
        (
            |f| f.set("llama.block_count", Meta::U32(u32::MAX)),
            Kind::UnsupportedModel,
            "layer count",
        ),
        (
            |f| f.set("llama.attention.head_count", Meta::U32(0)),
            Kind::UnsupportedModel,
            "head count is 0",
        ),
        (
            |f| f.set("llama.attention.head_count_kv", Meta::I32s(vec![2, 1])),
            Kind::UnsupportedModel,
            "head_count_kv",
        ),
        (
            |f| f.set("llama.attention.layer_norm_rms_epsilon", Meta::F32(f32::NAN)),
            Kind::Parse,
            "finite",
        ),
        (|f| f.set("split.count", Meta::U32(2)), Kind::Parse, "split.no is None"),
        (
            |f| f.f32("blk.0.attn_sinks.weight", &[2], &[0.0; 2]),
            Kind::UnsupportedModel,
            "'blk.0.attn_sinks.weight'",
        ),
        (
            |f| f.f32("rope_freqs.weight", &[3], &[1.0; 3]),
            Kind::Parse,
            "rope_freqs.weight",
        ),
        (
            |f| f.tensors.retain(|tensor| tensor.name != "blk.1.ffn_up.weight"),
            Kind::MissingTensor,
            "model.layers.1.mlp.up_proj.weight",
        ),
    ];
    for (edit, kind, wanted) in cases {
        let mut file = gguf_of("llama_bias");
        edit(&mut file);
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("model.gguf");
        std::fs::write(&path, file.bytes()).unwrap();
        let err = refusal(&path);
        assert!(err.kind == kind && err.message.contains(wanted), "{wanted}: {err}");
    }
}

/// Messages about thousands of tensors list a few and count the rest.
#[test]
fn messages_name_the_first_of_many_missing_and_unused_tensors() {
    let mut file = gguf_of("qwen2");
    for tensor in &mut file.tensors {
        if tensor.name.starts_with("blk.1.ffn_") || tensor.name.starts_with("blk.0.attn_q") {
            tensor.name = tensor.name.replace("blk.", "block.");
        }
    }
    let renamed = file
        .tensors
        .iter()
        .filter(|tensor| tensor.name.starts_with("block."))
        .count();
    assert_eq!(renamed, 6);
    file.f32("another.weight", &[8], &[0.0; 8]);
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("m.gguf");
    std::fs::write(&path, file.bytes()).unwrap();
    let err = refusal(&path);
    assert_eq!(err.kind, Kind::MissingTensor);
    // The bias of a query may be absent, so five are missing.
    let (missing, unused) = err.message.split_once("; not used: ").unwrap();
    let quoted = |text: &str| text.matches("'").count() / 2;
    assert_eq!((quoted(missing), quoted(unused)), (5, 5), "{err}");
    assert!(missing.contains("model.layers.1.mlp.down_proj.weight"), "{err}");
    assert!(!missing.contains("more") && unused.ends_with("and 2 more"), "{err}");
    file.tensors.retain(|tensor| !tensor.name.starts_with("blk.1."));
    std::fs::write(&path, file.bytes()).unwrap();
    let err = refusal(&path);
    let missing = err.message.split_once("; not used: ").unwrap().0;
    assert!(quoted(missing) == 5 && missing.contains(" more"), "{err}");
}

#[test]
fn tensors_left_out_are_named_and_can_be_forbidden() {
    let strict = |src: &Path| {
        let dir = TempDir::new().unwrap();
        let options = Options {
            strict: true,
            ..Options::new(Dtype::F16)
        };
        let done = convert(src, &dir.path().join("o.cmf"), &options, &mut |_| {
            ControlFlow::Continue(())
        });
        if done.is_err() {
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        }
        done
    };
    assert!(strict(&fixture("qwen3")).is_ok());
    // Two tensors of a draft head that the configuration does not announce.
    let copy = Copy::of("qwen3");
    let mut tensors = source_values("qwen3");
    for name in ["mtp.fc.weight", "mtp.norm.weight"] {
        tensors.insert(name.into(), (vec![4], vec![0.0; 4]));
    }
    copy.tensors(&tensors);
    let dir = TempDir::new().unwrap();
    let report = run(copy.path(), &dir.path().join("o.cmf"), Dtype::F16).unwrap();
    let dropped = report.dropped.join(", ");
    assert_eq!(report.dropped.len(), 2, "{dropped}");
    assert!(
        dropped.contains("model.mtp.eh_proj.weight") && dropped.contains("model.mtp.norm.weight"),
        "{dropped}"
    );
    let err = strict(copy.path()).unwrap_err();
    assert_eq!(err.kind, Kind::UnsupportedModel);
    assert!(
        err.message.contains("2 of the source's tensors") && err.message.contains("model.mtp.eh_proj.weight"),
        "{err}"
    );
}

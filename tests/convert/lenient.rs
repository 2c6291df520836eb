//! What other readers accept is accepted, with the same meaning: GGUF files as llama.cpp loads them, directories as transformers.

use crate::build::{Copy, Gguf, Meta, convert_gguf, converted, gguf_of, run, values};
use crate::tokenizer::with_tokenizer;
use cmf_gpu::dtype::Dtype;
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::{Kind, Result};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokenizers::Tokenizer;

fn without(mut file: Gguf, end: &str) -> Gguf {
    file.metadata.retain(|(key, _)| !key.ends_with(end));
    file
}

fn tokenizer(container: &CmfContainer) -> Tokenizer {
    Tokenizer::from_bytes(container.tokenizer_json().unwrap()).unwrap()
}

fn texts(file: &mut Gguf) -> &mut Vec<String> {
    let (_, value) = file
        .metadata
        .iter_mut()
        .find(|(key, _)| key.ends_with("ggml.tokens"))
        .unwrap();
    match value {
        Meta::Strs(texts) => texts,
        _ => panic!("tokens are strings"),
    }
}

#[test]
fn without_kinds_every_token_is_normal() {
    let file = without(with_tokenizer("llama_tied", ""), "token_type");
    let (_dir, _, container) = convert_gguf(&file, Dtype::F16).unwrap();
    let tokenizer = tokenizer(&container);
    assert!(tokenizer.get_added_vocabulary().is_empty());
    assert!(!tokenizer.encode("Hello world", false).unwrap().get_ids().is_empty());
}

#[test]
fn without_scores_all_tokens_are_equally_probable() {
    let file = with_tokenizer("llama_tied", "");
    let mut equal = file.clone();
    let count = texts(&mut equal).len();
    equal.set("tokenizer.ggml.scores", Meta::F32s(vec![0.0; count]));
    let of = |file: &Gguf| {
        convert_gguf(file, Dtype::F16)
            .unwrap()
            .2
            .tokenizer_json()
            .unwrap()
            .to_vec()
    };
    let missing = of(&without(file.clone(), "scores"));
    assert_eq!(missing, of(&equal));
    assert_ne!(missing, of(&file));
}

#[test]
fn a_token_without_text_is_never_matched() {
    let mut file = with_tokenizer("llama_tied", "");
    let last = texts(&mut file).len() - 1;
    for id in [last - 1, last] {
        texts(&mut file)[id].clear();
    }
    let (_dir, report, container) = convert_gguf(&file, Dtype::F16).unwrap();
    let note = format!("token {} has no text", last - 1);
    assert!(
        report.notes.iter().any(|found| found.contains(&note)),
        "{:?}",
        report.notes
    );
    assert_eq!(tokenizer(&container).id_to_token(last as u32), None);
    // Two equal texts are still an error.
    let text = texts(&mut file)[0].clone();
    texts(&mut file)[last] = text;
    let err = convert_gguf(&file, Dtype::F16).map(drop).unwrap_err();
    assert!(
        err.kind == Kind::Tokenizer && err.message.contains("occurs twice"),
        "{err}"
    );
}

#[test]
fn dimensions_of_one_at_the_end_change_nothing() {
    let file = gguf_of("llama_tied");
    let mut padded = file.clone();
    for tensor in &mut padded.tensors {
        tensor.dims.resize(4, 1);
    }
    let of = |file: &Gguf| values(&convert_gguf(file, Dtype::F16).unwrap().2);
    assert_eq!(of(&padded), of(&file));
}

#[test]
fn a_list_of_equal_numbers_is_one_number() {
    let file = gguf_of("llama_tied");
    let heads = |values: Vec<i32>| {
        let mut file = file.clone();
        file.set("llama.attention.head_count_kv", Meta::I32s(values));
        convert_gguf(&file, Dtype::F16).map(|(_, _, container)| container.header().arch.num_kv_heads)
    };
    let plain = convert_gguf(&file, Dtype::F16).unwrap().2.header().arch.num_kv_heads;
    assert_eq!(heads(vec![plain as i32; 2]).unwrap(), plain);
    for different in [vec![plain as i32, 1 + plain as i32], vec![], vec![-1, -1]] {
        assert_eq!(heads(different).unwrap_err().kind, Kind::UnsupportedModel);
    }
}

#[test]
fn a_factor_without_a_type_scales_linearly() {
    let factors = |keys: &[(&str, Meta)]| {
        let mut file = gguf_of("llama_tied");
        for (key, value) in keys {
            file.set(format!("llama.rope.{key}"), value.clone());
        }
        let (_dir, _, container) = convert_gguf(&file, Dtype::F16).unwrap();
        container.header().arch.rope_freq_factors.clone()
    };
    let factor = |value: f32| ("scaling.factor", Meta::F32(value));
    let linear = factors(&[("scaling.type", Meta::Str("linear".into())), factor(4.0)]);
    assert!(linear.is_some());
    assert_eq!(factors(&[factor(4.0)]), linear);
    assert_eq!(factors(&[("scale_linear", Meta::F32(4.0))]), linear);
    for nothing in [factor(0.0), factor(1.0)] {
        assert_eq!(factors(&[nothing]), None);
    }
    assert_eq!(
        factors(&[("scaling.type", Meta::Str("none".into())), factor(4.0)]),
        None
    );
}

#[test]
fn a_part_without_the_number_of_parts_names_the_key() {
    for key in ["split.no", "split.tensors.count"] {
        let mut file = gguf_of("llama_tied");
        file.set(key, Meta::U32(0));
        let err = convert_gguf(&file, Dtype::F16).map(drop).unwrap_err();
        assert!(err.kind == Kind::Parse && err.message.contains("split.count"), "{err}");
        assert!(err.message.contains("model.gguf"), "{err}");
    }
}

#[test]
fn tokens_that_only_the_configuration_adds_are_matched() {
    let source = Copy::of("llama_tied");
    let plain = |text: &str| {
        let (_dir, _, container) = converted(source.path(), Dtype::F16);
        tokenizer(&container).encode(text, false).unwrap().get_ids().to_vec()
    };
    let original = Tokenizer::from_file(source.path().join("tokenizer.json")).unwrap();
    let id = (3..)
        .find(|&id| original.id_to_token(id).is_some_and(|text| text.chars().count() == 1))
        .unwrap();
    let content = original.id_to_token(id).unwrap();
    let text = format!("a{content}b");
    let token = |id: u32| json!({id.to_string(): {"content": content, "special": true, "normalized": false}});
    let before = plain(&text);
    source.edit("tokenizer_config.json", |config| {
        config.insert("added_tokens_decoder".into(), token(id));
    });
    let added = plain(&text);
    assert!(added.contains(&id) && added != before, "{before:?} {added:?}");
    source.edit("tokenizer_config.json", |config| {
        config.insert("added_tokens_decoder".into(), token(id + 1));
    });
    assert_eq!(refusal(&source).kind, Kind::Tokenizer);
}

fn refusal(source: &Copy) -> cmf_gpu::Error {
    let dir = TempDir::new().unwrap();
    let result: Result<_> = run(source.path(), &dir.path().join("o.cmf"), Dtype::F16);
    result.map(drop).unwrap_err()
}

#[test]
fn numbers_of_python_that_json_lacks_are_read_as_absent() {
    let source = Copy::of("llama_tied");
    let path = source.path().join("config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let special = r#"{"a": NaN, "b": [Infinity, -Infinity], "c": "NaN \" Infinity","#;
    std::fs::write(&path, text.replacen('{', special, 1)).unwrap();
    converted(source.path(), Dtype::F16);
    std::fs::write(&path, text.replacen('{', r#"{"rms_norm_eps": NaN,"#, 1)).unwrap();
    assert_eq!(refusal(&source).kind, Kind::Parse);
}

#[test]
fn a_tokenizer_that_cannot_be_loaded_is_refused() {
    let source = Copy::of("qwen2");
    source.edit("tokenizer.json", |tokenizer| {
        let merges = json!([["a", "no such token"]]);
        tokenizer
            .get_mut("model")
            .and_then(Value::as_object_mut)
            .unwrap()
            .insert("merges".into(), merges);
    });
    let err = refusal(&source);
    assert!(
        err.kind == Kind::Tokenizer && err.message.contains("tokenizer"),
        "{err}"
    );
}

#[test]
fn pointers_of_git_lfs_are_named() {
    const POINTER: &str = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n";
    for file in ["model.safetensors", "tokenizer.json", "config.json"] {
        let source = Copy::of("llama_tied");
        std::fs::write(source.path().join(file), POINTER).unwrap();
        let err = refusal(&source);
        assert!(err.message.contains("git-lfs") && err.message.contains(file), "{err}");
    }
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, POINTER).unwrap();
    let err = run(&path, &dir.path().join("o.cmf"), Dtype::F16).map(drop).unwrap_err();
    assert!(err.message.contains("git-lfs"), "{err}");
}

#[cfg(unix)]
#[test]
fn links_lead_to_the_directory_or_to_the_blobs_of_its_cache() {
    use std::os::unix::fs::symlink;
    let cache = TempDir::new().unwrap();
    let [snapshot, blobs, elsewhere] = ["snapshots/abc", "blobs", "elsewhere"].map(|name| cache.path().join(name));
    for dir in [&snapshot, &blobs, &elsewhere] {
        std::fs::create_dir_all(dir).unwrap();
    }
    let model = Copy::of("llama_tied");
    for entry in std::fs::read_dir(model.path()).unwrap() {
        let name = entry.unwrap().file_name();
        std::fs::copy(model.path().join(&name), blobs.join(&name)).unwrap();
        symlink(std::path::Path::new("../../blobs").join(&name), snapshot.join(&name)).unwrap();
    }
    converted(&snapshot, Dtype::F16);
    for file in ["model.safetensors", "config.json"] {
        let link = snapshot.join(file);
        std::fs::copy(blobs.join(file), elsewhere.join(file)).unwrap();
        std::fs::remove_file(&link).unwrap();
        symlink(elsewhere.join(file), &link).unwrap();
        let err = run(&snapshot, &cache.path().join("o.cmf"), Dtype::F16)
            .map(drop)
            .unwrap_err();
        assert!(err.kind == Kind::Io && err.message.contains("link"), "{err}");
        std::fs::remove_file(&link).unwrap();
        symlink(blobs.join(file), &link).unwrap();
    }
}

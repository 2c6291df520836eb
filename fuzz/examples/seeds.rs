//! Writes the seeds of every target to `corpus/`: small files of each kind, from the fixtures and builders of the
//! tests.
//!
//! Run it in the directory `fuzz`: `cargo run --no-default-features --example seeds`.

#[allow(dead_code, reason = "the builder of the tests has more than the seeds need")]
#[path = "../../tests/convert/build.rs"]
mod build;
#[path = "../../tests/golden/mod.rs"]
mod golden;
#[allow(dead_code, reason = "the builder of the tests has more than the seeds need")]
#[path = "../../tests/container/raw.rs"]
mod raw;

use build::{Block, Gguf, Meta};
use cmf_gpu::convert::{Options, convert};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::dtype::encode::encode;
use cmf_gpu::format::cmf::{CmfWriter, Sections};
use cmf_gpu::format::ninfer::{Format, Identity, NewObject, Tensor, write};
use cmf_gpu::format::{TensorSpec, hash64};
use cmf_gpu::source::{Mask, MaskAxis, MaskShape, Masks};
use cmf_gpu::tools::shard::shard;
use cmf_gpu_fuzz::join_input;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

const TENSORS: [(&str, &str, &[u64]); 12] = [
    ("model.embed_tokens.weight", "token_embd.weight", &[8, 32]),
    ("model.norm.weight", "output_norm.weight", &[32]),
    ("lm_head.weight", "output.weight", &[8, 32]),
    ("model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight", &[32]),
    (
        "model.layers.0.post_attention_layernorm.weight",
        "blk.0.ffn_norm.weight",
        &[32],
    ),
    (
        "model.layers.0.self_attn.q_proj.weight",
        "blk.0.attn_q.weight",
        &[32, 32],
    ),
    (
        "model.layers.0.self_attn.k_proj.weight",
        "blk.0.attn_k.weight",
        &[16, 32],
    ),
    (
        "model.layers.0.self_attn.v_proj.weight",
        "blk.0.attn_v.weight",
        &[16, 32],
    ),
    (
        "model.layers.0.self_attn.o_proj.weight",
        "blk.0.attn_output.weight",
        &[32, 32],
    ),
    (
        "model.layers.0.mlp.gate_proj.weight",
        "blk.0.ffn_gate.weight",
        &[32, 32],
    ),
    ("model.layers.0.mlp.up_proj.weight", "blk.0.ffn_up.weight", &[32, 32]),
    (
        "model.layers.0.mlp.down_proj.weight",
        "blk.0.ffn_down.weight",
        &[32, 32],
    ),
];

fn main() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let fixtures = here.join("../tests/fixtures");
    let corpus = here.join("corpus");
    let add = |target: &str, bytes: &[u8]| {
        let dir = corpus.join(target);
        std::fs::create_dir_all(&dir).expect("a directory for the corpus");
        std::fs::write(dir.join(format!("{:016x}", hash64(bytes))), bytes).expect("a file of the corpus");
    };

    for template in files(&fixtures.join("chat/templates")) {
        add("template", &std::fs::read(template).expect("a fixture"));
    }
    let expressions = std::fs::read(fixtures.join("chat/expressions.json")).expect("a fixture");
    texts(&serde_json::from_slice(&expressions).expect("JSON"), &mut |text| {
        add("template", text.as_bytes())
    });

    for kind in ["gemma", "llama3", "qwen", "spm", "unigram"] {
        let json = std::fs::read(fixtures.join(format!("tokenizers/{kind}/tokenizer.json"))).expect("a fixture");
        add(
            "tokenizer",
            &join_input("Grüße <s>, 世界\u{1f600}  ab".as_bytes(), &json),
        );
    }
    for json in tokenizers() {
        add(
            "tokenizer",
            &join_input("a b ab <s> é  1".as_bytes(), json.to_string().as_bytes()),
        );
    }

    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 8,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 64, "hidden_act": "silu",
        "tie_word_embeddings": false, "bos_token_id": 1, "eos_token_id": 2, "attention_bias": false, "mlp_bias": false
    });
    let tensors: BTreeMap<String, (Vec<u64>, Vec<f32>)> = TENSORS
        .iter()
        .map(|(name, _, shape)| {
            let count = shape.iter().product::<u64>();
            let values = (0..count).map(|i| ((i * 7 % 23) as f32 - 11.0) / 16.0).collect();
            ((*name).into(), (shape.to_vec(), values))
        })
        .collect();
    let file = build::safetensors_f32(&tensors);
    add("safetensors", &join_input(config.to_string().as_bytes(), &file));
    for model in [
        "llama3_rope",
        "qwen2",
        "qwen3_yarn",
        "gemma3",
        "phi3_longrope",
        "mistral_swa",
        "qwen3_5",
        "qwen3_5_hub",
    ] {
        let config = std::fs::read(fixtures.join(format!("models/{model}/config.json"))).expect("a fixture");
        add("safetensors", &join_input(&config, &file));
    }

    let gguf = gguf();
    ["gguf", "source"].iter().for_each(|target| add(target, &gguf.bytes()));
    let mut plain = gguf.clone();
    plain.metadata.retain(|(key, _)| !key.starts_with("tokenizer."));
    ["gguf", "source"].iter().for_each(|target| add(target, &plain.bytes()));
    let mut pieces = gguf.clone();
    pieces.set("tokenizer.ggml.model", Meta::Str("llama".into()));
    pieces.set(
        "tokenizer.ggml.scores",
        Meta::F32s((0..8).map(|i| -(i as f32)).collect()),
    );
    ["gguf", "source"]
        .iter()
        .for_each(|target| add(target, &pieces.bytes()));

    add("ninfer", &ninfer());
    add(
        "ninfer",
        &std::fs::read(fixtures.join("ternary/formats.ninfer")).expect("a fixture"),
    );

    add("cmf", &raw::sample().build());
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::write(dir.path().join("config.json"), config.to_string()).expect("a file");
    std::fs::write(dir.path().join("model.safetensors"), &file).expect("a file");
    std::fs::write(dir.path().join("tokenizer.json"), tokenizers()[0].to_string()).expect("a file");
    for quant in [
        Dtype::F16,
        Dtype::Q8Row,
        Dtype::Q82f,
        Dtype::Q4Block,
        Dtype::Q4Tiled,
        Dtype::Q4tp,
    ] {
        let out = dir.path().join("out.cmf");
        convert(dir.path(), &out, &Options::new(quant), &mut |_| {
            ControlFlow::Continue(())
        })
        .expect("a conversion");
        add("cmf", &std::fs::read(out).expect("a file"));
    }
    add(
        "cmf",
        &std::fs::read(fixtures.join("interop/qwen2-q4tp-gfx-skillfile.cmf")).expect("a fixture"),
    );
    add_masked_models(dir.path(), &add);
}

/// A model of one layer with rotated weights, all of them 0.
fn ninfer() -> Vec<u8> {
    let config = json!({
        "model_type": "qwen3", "vocab_size": 16, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 128, "max_position_embeddings": 64,
        "prism_hadamard": {
            "version": 1, "block_size": 128, "transform": "normalized-sylvester-walsh-hadamard",
            "axis": "input-last-dimension", "sign_mode": "explicit", "sign_widths": [128]
        }
    });
    let (matrix, vector) = (Format::Ptq1_0, Format::Bf16);
    let tensors: [(&str, &[u64], Format); 14] = [
        ("text/token_embedding", &[16, 128], matrix),
        ("text/layers/0/input_norm", &[128], vector),
        ("text/layers/0/attention/query_key", &[256, 128], matrix),
        ("text/layers/0/attention/value", &[128, 128], Format::Pq2_0),
        ("text/layers/0/attention/query_norm", &[128], vector),
        ("text/layers/0/attention/key_norm", &[128], vector),
        ("text/layers/0/attention/output", &[128, 128], matrix),
        ("text/layers/0/post_attention_norm", &[128], vector),
        ("text/layers/0/mlp/gate_up", &[256, 128], matrix),
        ("text/layers/0/mlp/down", &[128, 128], matrix),
        ("text/final_norm", &[128], vector),
        ("text/output_head", &[16, 128], vector),
        ("text/hadamard_signs", &[128], Format::Fp32),
        ("text/hadamard_widths", &[1], Format::I32),
    ];
    let object = |name: &str, tensor, bytes: Vec<u8>| NewObject {
        name: name.to_owned(),
        tensor,
        bytes: bytes.len() as u64,
        payload: Box::new(|| Ok(bytes)),
    };
    let mut objects = vec![object("frontend/config.json", None, config.to_string().into_bytes())];
    for (name, shape, format) in tensors {
        let bytes = match format {
            Format::Fp32 => 1f32.to_le_bytes().repeat(128),
            Format::I32 => 128i32.to_le_bytes().to_vec(),
            _ => vec![0; format.size(shape).expect("a small tensor") as usize],
        };
        let shape = shape.to_vec();
        objects.push(object(name, Some(Tensor { shape, format }), bytes));
    }
    let identity = Identity {
        model_id: "seed".into(),
        weights_id: "folded-ternary".into(),
    };
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("seed.ninfer");
    write(&path, &identity, objects).expect("a file");
    std::fs::read(&path).expect("a file")
}

/// Small models with masks, skills and experts, whole and as two shards, and a signature.
fn add_masked_models(dir: &Path, add: &dyn Fn(&str, &[u8])) {
    let (model, out) = (dir.join("small.cmf"), dir.join("shards"));
    for dtype in Dtype::all() {
        small(&model, dtype);
        add("tools", &std::fs::read(&model).expect("a file"));
        let most = std::fs::metadata(&model).expect("a file").len() / 2 + 4096;
        let (paths, _) = shard(&model, most, &out, &mut |_, _| ControlFlow::Continue(())).expect("a split");
        let shards: Vec<Vec<u8>> = paths.iter().map(|path| std::fs::read(path).expect("a file")).collect();
        if let [first, second] = shards.as_slice() {
            add("shards", &join_input(first, second));
        }
        let signature = json!({"alg": "ed25519-sha256", "pubkey": "00".repeat(32), "sha256": "00".repeat(32),
            "sig": "00".repeat(64)});
        add("shards", &join_input(&shards[0], signature.to_string().as_bytes()));
    }
}

/// Writes a model with a dense layer and a layer of three experts, all of one type, with a mask and a skill for both
/// layers.
fn small(path: &Path, dtype: Dtype) {
    let mut header = raw::header();
    header["arch"]["intermediate_size"] = json!(64);
    header["arch"]["moe"] = json!({"num_experts": 3, "top_k": 1, "moe_intermediate_size": 32, "norm_topk_prob": true});
    header["skills"] = json!([{"id": "a", "quality": 1}]);
    let mut names: Vec<(String, [u64; 2])> = Vec::new();
    for (part, shape) in [("gate", [64, 32]), ("up", [64, 32]), ("down", [32, 64])] {
        names.push((format!("model.layers.0.mlp.{part}_proj.weight"), shape));
    }
    names.push(("skill.a.model.layers.0.mlp.down_proj.weight".into(), [32, 64]));
    for expert in 0..3 {
        for (part, shape) in [("gate", [32, 32]), ("up", [32, 32]), ("down", [32, 32])] {
            names.push((format!("model.layers.1.mlp.experts.{expert}.{part}_proj.weight"), shape));
        }
    }
    names.push(("skill.a.model.layers.1.mlp.experts.2.up_proj.weight".into(), [32, 32]));
    names.push(("model.layers.1.mlp.gate.weight".into(), [3, 32]));
    let spec = |(name, shape): &(String, [u64; 2])| TensorSpec {
        name: name.clone(),
        dtype,
        shape: shape.to_vec(),
    };
    let shape = MaskShape {
        layers: 2,
        rows: 2,
        ffn: 64,
        heads: 4,
        experts: 3,
    };
    let mut mask = Mask::open(0, "t", shape);
    (0..32).for_each(|neuron| mask.set_unit(MaskAxis::Neurons, 0, neuron, false).expect("a neuron"));
    let masks = Masks {
        default_task: None,
        masks: vec![mask],
    };
    let masks = masks.to_bytes().expect("a section");
    let sections = Sections {
        masks: Some(&masks),
        ..Sections::default()
    };
    let header = header.as_object().expect("an object").clone();
    let specs = names.iter().map(spec).collect();
    let mut writer = CmfWriter::create(path, header, specs, sections).expect("a file");
    for (_, [rows, cols]) in &names {
        let value = |i: usize| {
            if i % 50 == 0 {
                9.0
            } else {
                (i * 7 % 23) as f32 / 16.0 - 0.7
            }
        };
        let cols = *cols as usize;
        let payload = encode(dtype, *rows as usize, cols, &|first, out| {
            (first * cols..).zip(out).for_each(|(i, out)| *out = value(i));
            Ok(())
        });
        writer.write(&payload.expect("a payload")).expect("a tensor");
    }
    writer.finish().expect("a file");
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).expect("a directory of fixtures");
    entries.map(|entry| entry.expect("an entry").path()).collect()
}

/// Calls `found` for every string in a JSON value.
fn texts(value: &Value, found: &mut dyn FnMut(&str)) {
    match value {
        Value::String(text) => found(text),
        Value::Array(items) => items.iter().for_each(|item| texts(item, found)),
        Value::Object(members) => members.values().for_each(|item| texts(item, found)),
        _ => {}
    }
}

fn tokenizers() -> Vec<Value> {
    let bpe = json!({"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, " ": 3, "Ġ": 4, "<0x61>": 5},
        "merges": [["a", "b"]], "byte_fallback": true, "unk_token": "a", "fuse_unk": true});
    let words = json!({"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"});
    let pieces = json!({"type": "WordPiece", "vocab": {"a": 0, "##b": 1, "[UNK]": 2}, "unk_token": "[UNK]",
        "continuing_subword_prefix": "##", "max_input_chars_per_word": 100});
    let unigram = json!({"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", -1.0], ["▁", -2.0], ["ab", -1.5]],
        "unk_id": 0, "byte_fallback": false});
    let regex = |r: &str| json!({"type": "Split", "pattern": {"Regex": r}, "behavior": "Isolated", "invert": false});
    let byte = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let meta = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    let bert = json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
        "strip_accents": null, "lowercase": true});
    let replace = json!({"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}, {"type": "Strip", "strip_left": true, "strip_right": true}]});
    let fuse = json!({"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
    let post = json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": {"<s>": {"id": "<s>", "ids": [6], "tokens": ["<s>"]}}});
    let all = [
        (bpe.clone(), Value::Null, byte.clone(), byte.clone(), post.clone()),
        (bpe.clone(), replace.clone(), Value::Null, fuse, Value::Null),
        (
            words,
            json!({"type": "Lowercase"}),
            json!({"type": "Whitespace"}),
            Value::Null,
            Value::Null,
        ),
        (
            pieces,
            bert,
            json!({"type": "BertPreTokenizer"}),
            json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
            Value::Null,
        ),
        (unigram, Value::Null, meta.clone(), meta, Value::Null),
        (
            bpe.clone(),
            json!({"type": "NFC"}),
            json!({"type": "Sequence", "pretokenizers": [regex("\\p{N}{1,3}|\\s+(?!\\S)|[^\\s]+"),
            {"type": "Digits", "individual_digits": true}, {"type": "Punctuation", "behavior": "Contiguous"}]}),
            byte,
            post,
        ),
        (
            bpe,
            Value::Null,
            regex("(a+)+$"),
            json!({"type": "BPEDecoder", "suffix": "</w>"}),
            Value::Null,
        ),
    ];
    let whole = |(model, normalizer, pre, decoder, post)| {
        json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [
            {"id": 6, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true},
            {"id": 7, "content": "é", "single_word": true, "lstrip": true, "rstrip": true, "normalized": true, "special": false}],
            "normalizer": normalizer, "pre_tokenizer": pre, "post_processor": post, "decoder": decoder, "model": model})
    };
    all.into_iter().map(whole).collect()
}

fn gguf() -> Gguf {
    let mut file = Gguf::new();
    file.set("general.architecture", Meta::Str("llama".into()));
    for (key, value) in [
        ("block_count", 1),
        ("context_length", 64),
        ("embedding_length", 32),
        ("feed_forward_length", 32),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 8),
        ("rope.dimension_count", 8),
        ("vocab_size", 8),
    ] {
        file.set(format!("llama.{key}"), Meta::U32(value));
    }
    file.set("llama.rope.freq_base", Meta::F32(10000.0));
    file.set("llama.attention.layer_norm_rms_epsilon", Meta::F32(1e-5));
    file.set("tokenizer.ggml.model", Meta::Str("gpt2".into()));
    file.set("tokenizer.ggml.pre", Meta::Str("qwen2".into()));
    let tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab", "<0x20>", "c"];
    file.set("tokenizer.ggml.tokens", Meta::Strs(tokens.map(String::from).to_vec()));
    file.set("tokenizer.ggml.token_type", Meta::I32s(vec![2, 3, 3, 1, 1, 1, 6, 1]));
    file.set("tokenizer.ggml.merges", Meta::Strs(vec!["a b".into()]));
    file.set("tokenizer.ggml.bos_token_id", Meta::U32(1));
    file.set("tokenizer.ggml.eos_token_id", Meta::U32(2));
    file.set("tokenizer.chat_template", Meta::Str("{{ messages[0].content }}".into()));
    // Type id and bytes per 32 values of F32, F16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1; the matrices take them in turn.
    let kinds: [(u32, usize); 7] = [(0, 128), (1, 64), (8, 34), (2, 18), (3, 20), (6, 22), (7, 24)];
    for (i, (_, name, shape)) in TENSORS.iter().enumerate() {
        let (kind, bytes) = if shape.len() == 1 {
            kinds[0]
        } else {
            kinds[i % kinds.len()]
        };
        let count = shape.iter().product::<u64>() as usize / 32 * bytes;
        file.tensors.push(Block {
            name: (*name).into(),
            dims: shape.iter().rev().copied().collect(),
            kind,
            // Bytes that are small codes and scales in every type.
            data: (0..count).map(|i| [0x00, 0x2c, 0x11, 0x3c][i % 4]).collect(),
            offset: None,
        });
    }
    file
}

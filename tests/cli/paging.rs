//! Models whose experts are paged: messages, counters, and equal answers.

use crate::build::{Ran, run};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::format::TensorSpec;
use cmf_gpu::format::cmf::{CmfWriter, Sections};
use cmf_gpu::source::Tensors;
use cmf_gpu::synthetic::{ExpertShape, Shape, synthetic};
use serde_json::{Value, json};
use std::path::Path;

const HIDDEN: usize = 128;
const EXPERTS: usize = 64;
const TOP_K: usize = 4;
const LAYERS: usize = 2;
/// Gate, up and down projections in 8 bits, with a scale per row.
const EXPERT_BYTES: u64 = 3 * 128 * (128 + 2);

/// Writes a model of a few megabytes, most of them experts.
fn mixture(path: &Path) {
    let shape = Shape {
        hidden: HIDDEN,
        heads: 4,
        head_dim: 32,
        vocab: 128,
        experts: Some(ExpertShape {
            count: EXPERTS,
            top_k: TOP_K,
            width: 128,
            shared: 0,
        }),
        delta: None,
        hadamard: None,
        ..Shape::named("qwen3.5-35b-a3b").unwrap().with_layers(LAYERS).unwrap()
    };
    let (_, tensors) = synthetic(&shape, Dtype::Q8Row).unwrap();
    let arch = json!({
        "arch_name": "mixture",
        "hidden_size": HIDDEN,
        "intermediate_size": shape.width,
        "num_layers": LAYERS,
        "num_attention_heads": shape.heads,
        "num_kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "layer_types": vec!["FullAttention"; LAYERS],
        "rms_norm_eps": 1e-5,
        "norm_style": "qwen",
        "partial_rotary_factor": shape.rotary,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": 512,
        "moe": {"num_experts": EXPERTS, "top_k": TOP_K, "moe_intermediate_size": 128, "norm_topk_prob": true},
    });
    let Value::Object(header) = json!({ "arch": arch }) else {
        unreachable!()
    };
    let specs = tensors.infos().iter().map(|info| TensorSpec {
        name: info.name.clone(),
        dtype: info.dtype,
        shape: info.shape.clone(),
    });
    let mut writer = CmfWriter::create(path, header, specs.collect(), Sections::default()).unwrap();
    for id in 0..tensors.infos().len() {
        writer.write(&tensors.stored(id).unwrap().bytes).unwrap();
    }
    writer.finish().unwrap();
}

fn answer(model: &Path, flags: &[&str]) -> Ran {
    let prompt: Vec<String> = (0..70).map(|i| (i * 37 % 128).to_string()).collect();
    let prompt = prompt.join(",");
    let fixed = [
        "-c",
        "128",
        "--prompt-tokens",
        &prompt,
        "--greedy",
        "-n",
        "12",
        "--json",
    ];
    run(&[&["run", model.to_str().unwrap()], &fixed[..], flags].concat())
}

#[test]
fn a_mixture_that_does_not_fit_names_the_smallest_limit_and_answers_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("mixture.cmf");
    mixture(&model);
    let routes = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let whole = answer(&model, &["--route-stats", &routes("whole.json")]);
    assert!(!whole.stderr.contains("slots"), "{}", whole.stderr);
    let whole = whole.json();
    let counters = &whole["counters"];
    assert_eq!(counters["expert_slots"], Value::Null);
    for name in ["expert_hits", "expert_misses", "paged_bytes"] {
        assert_eq!(counters[name], 0, "{name}");
    }

    let message = answer(&model, &["--vram-mb", "1"]).fails(1, "OutOfMemory");
    assert!(message.contains("4 of 64 experts a layer"), "{message}");
    let (_, least) = message.split_once("the smallest limit that works is ").unwrap();
    let (least, _) = least.split_once(" MiB").unwrap();
    let least: u64 = least.parse().unwrap();
    let less = (least - 1).to_string();
    for spec in ["off", "3"] {
        let message = answer(&model, &["--vram-mb", &less, "--spec", spec]).fails(1, "OutOfMemory");
        assert!(
            message.contains(&format!("the smallest limit that works is {least} MiB")),
            "{message}"
        );
    }

    for (limit, slots) in [
        (least, TOP_K as u64..=EXPERTS as u64 / 2),
        (least + 3, 20..=EXPERTS as u64 - 1),
    ] {
        let paged = routes("paged.json");
        let ran = answer(&model, &["--vram-mb", &limit.to_string(), "--route-stats", &paged]);
        let said = ran.stderr.clone();
        let paged = ran.json();
        let number = |name: &str| paged["counters"][name].as_u64().unwrap();
        let found = number("expert_slots");
        assert!(slots.contains(&found), "{limit} MiB: {found}");
        assert!(number("expert_hits") > 0 && number("expert_misses") > 0);
        assert_eq!(number("paged_bytes"), number("expert_misses") * EXPERT_BYTES);
        assert_eq!(paged["tokens"], whole["tokens"]);
        for part in [
            format!("{found} of 64 experts a layer fit on the device"),
            format!("experts, {found} slots a layer: {} hits", number("expert_hits")),
        ] {
            assert_eq!(said.matches(&part).count(), 1, "{said}");
        }
        let text = |name: &str| std::fs::read_to_string(routes(name)).unwrap();
        assert_eq!(text("paged.json"), text("whole.json"));
    }

    for (limit, off) in [(vec![], 0), (vec!["--vram-mb", "4"], 1)] {
        let drafted = answer(&model, &[&["--spec", "3"][..], &limit].concat());
        let said = "speculation is off because experts are paged";
        assert_eq!(drafted.stderr.matches(said).count(), off, "{}", drafted.stderr);
        let drafted = drafted.json();
        assert_eq!(drafted["tokens"], whole["tokens"]);
        assert_eq!(drafted["speculation"]["rounds"] == 0, off == 1, "{drafted}");
    }

    let cpu = answer(&model, &["--device", "cpu", "--vram-mb", "64"]);
    assert_eq!(
        cpu.stderr.matches("the memory limit applies to caches").count(),
        1,
        "{}",
        cpu.stderr
    );
    let unlimited = answer(&model, &["--device", "cpu"]);
    assert!(!unlimited.stderr.contains("limit"), "{}", unlimited.stderr);
    assert_eq!(cpu.json()["tokens"], unlimited.json()["tokens"]);
    assert_eq!(cpu.json()["counters"]["expert_slots"], Value::Null);
}

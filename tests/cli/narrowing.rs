//! Narrowing a model to a task: from recorded routes to a mask or a smaller model, both with the same answers.

use crate::build::{fixture, run};
use cmf_gpu::format::TensorSpec;
use cmf_gpu::format::cmf::{CmfContainer, CmfWriter, Sections};
use cmf_gpu::source::{Mask, MaskAxis, MaskShape, Masks, TensorInfo};
use serde_json::Value;
use std::path::Path;
use tempfile::TempDir;

fn inside(dir: &TempDir, name: &str) -> String {
    dir.path().join(name).to_str().unwrap().to_string()
}

fn done(arguments: &[&str]) {
    let ran = run(arguments);
    assert_eq!(ran.code, Some(0), "{arguments:?}: {}", ran.stderr);
}

/// A greedy answer to a prompt of token ids.
fn answer(model: &str, prompt: &str, flags: &[&str]) -> Vec<u64> {
    let asked = [
        "run",
        model,
        "--prompt-tokens",
        prompt,
        "-n",
        "12",
        "-c",
        "64",
        "--greedy",
        "--kv",
        "f32",
        "--json",
    ];
    let report = run(&[&asked, flags].concat()).json();
    let tokens = report["tokens"].as_array().unwrap();
    tokens.iter().map(|token| token.as_u64().unwrap()).collect()
}

const PROMPTS: [&str; 3] = ["1,2,3,4,5,6,7,8", "40,41,300,7,9", "500"];

/// Would fail: a mask and a cut of a mixture give different answers, for some type of experts.
#[test]
fn a_mask_and_a_cut_agree_token_for_token() {
    let dir = tempfile::tempdir().unwrap();
    let (model, stats, masked, small) = (
        inside(&dir, "m.cmf"),
        inside(&dir, "s.json"),
        inside(&dir, "masked.cmf"),
        inside(&dir, "small.cmf"),
    );
    let (vbit, q1t, q1s) = (
        "*.experts.*.gate_proj.weight=vbit",
        "*.experts.*.up_proj.weight=q1t",
        "*.experts.*.down_proj.weight=q1s",
    );
    let mixed = ["--tensor-quant", vbit, "--tensor-quant", q1t, "--tensor-quant", q1s];
    for (name, types, same_weights) in [
        ("qwen3_moe", &[][..], true),
        ("qwen3_moe", &mixed, true),
        ("qwen2_moe", &mixed, false),
    ] {
        let src = crate::golden::dir(name);
        done(
            &[
                &["convert", src.to_str().unwrap(), "-o", &model, "--quant", "f16"],
                types,
            ]
            .concat(),
        );
        let whole = answer(&model, PROMPTS[0], &["--route-stats", &stats]);
        // All chosen experts are kept, so this prompt keeps its answer if weights are normalised over the chosen experts.
        for cover in ["1", "0.6"] {
            let narrow = ["--stats", &stats, "--cover", cover, "-o"];
            done(&[&["moe-mask", &model, "--task", "t"][..], &narrow, &[&masked]].concat());
            done(&[&["moe-defrag", &model][..], &narrow, &[&small]].concat());
            let cut = CmfContainer::open(Path::new(&small)).unwrap();
            let pre = cut.header().provenance["moe_defrag"]["num_experts_pre"]
                .as_u64()
                .unwrap();
            let kept = cut.header().provenance["moe_defrag"]["kept_per_layer"].clone();
            let kept: Vec<u64> = kept
                .as_array()
                .unwrap()
                .iter()
                .map(|kept| kept.as_u64().unwrap())
                .collect();
            assert!(
                cover == "1" || kept.iter().all(|&kept| kept < pre),
                "{name}: {kept:?} of {pre}"
            );
            for (i, prompt) in PROMPTS.into_iter().take(2).enumerate() {
                let restricted = answer(&masked, prompt, &["--task", "t"]);
                assert_eq!(
                    restricted,
                    answer(&small, prompt, &[]),
                    "{name} {types:?} {cover} {prompt}"
                );
                if i == 0 && cover == "1" && same_weights {
                    assert_eq!(restricted, whole, "{name} {types:?}: what was recorded");
                }
            }
        }
    }
}

/// Writes the model of `from` with the mask `t`, which switches off every third neuron and more of the second layer.
fn with_mask(from: &str, out: &str) {
    let model = CmfContainer::open(Path::new(from)).unwrap();
    let shape = MaskShape::of(&model.header().arch, false);
    let mut mask = Mask::open(0, "t", shape);
    for layer in 0..shape.layers {
        let off = (0..shape.ffn).filter(|neuron| neuron % 3 == layer % 3 || (layer == 1 && *neuron < 40));
        off.for_each(|neuron| mask.set_unit(MaskAxis::Neurons, layer, neuron, false).unwrap());
    }
    let masks = Masks {
        default_task: None,
        masks: vec![mask],
    };
    let masks = masks.to_bytes().unwrap();
    let spec = |info: &TensorInfo| TensorSpec {
        name: info.name.clone(),
        dtype: info.dtype,
        shape: info.shape.clone(),
    };
    let specs = model.infos().iter().map(spec).collect();
    let sections = Sections {
        masks: Some(&masks),
        ..model.sections().unwrap()
    };
    let mut writer = CmfWriter::create(Path::new(out), model.header_json().clone(), specs, sections).unwrap();
    (0..model.infos().len()).for_each(|id| writer.write(model.bytes(id).unwrap()).unwrap());
    writer.finish().unwrap();
}

/// Would fail: a cut model answers differently than under the mask, with some skill.
#[test]
fn a_cut_model_answers_as_under_its_mask() {
    let dir = tempfile::tempdir().unwrap();
    let interop = |name: &str| fixture("interop").join(name).to_str().unwrap().to_string();
    let (f16, masked, cut) = (
        inside(&dir, "f16.cmf"),
        inside(&dir, "masked.cmf"),
        inside(&dir, "cut.cmf"),
    );
    // In f16, columns can be removed exactly.
    done(&[
        "convert",
        &interop("qwen3_mtp-q8-appended.cmf"),
        "-o",
        &f16,
        "--quant",
        "f16",
    ]);
    with_mask(&f16, &masked);
    done(&["defrag", &masked, "--task", "t", "-o", &cut]);
    let mut answers = Vec::new();
    for skill in ["none", "tail"] {
        for prompt in PROMPTS {
            let wanted = answer(&masked, prompt, &["--task", "t", "--skill", skill]);
            assert_eq!(answer(&cut, prompt, &["--skill", skill]), wanted, "{skill} {prompt}");
            answers.push(wanted);
        }
    }
    assert!(answers[..3] != answers[3..], "the skill changes the answer");
    assert_ne!(answer(&f16, PROMPTS[0], &[]), answers[0], "the mask changes the answer");
}

/// A mixture runs, and is narrowed to the experts that it used.
#[test]
fn recorded_routes_narrow_a_mixture() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let (model, stats, masked, small) = (path("m.cmf"), path("s.json"), path("masked.cmf"), path("small.cmf"));
    let src = crate::golden::dir("qwen3_moe");
    assert_eq!(
        run(&["convert", src.to_str().unwrap(), "-o", &model, "--quant", "f16"]).code,
        Some(0)
    );
    let asked = [
        "run",
        &model,
        "--prompt-tokens",
        "1,2,3,4,5",
        "-n",
        "4",
        "--greedy",
        "--route-stats",
        &stats,
    ];
    let report = run(&[&asked[..], &["--json"]].concat()).json();
    let recorded: Value = serde_json::from_slice(&std::fs::read(&stats).unwrap()).unwrap();
    let tokens = report["tokens"].as_array().unwrap().len() as u64;
    for counts in recorded["layers"].as_object().unwrap().values() {
        let all: u64 = counts
            .as_array()
            .unwrap()
            .iter()
            .map(|count| count.as_u64().unwrap())
            .sum();
        // Two experts per token; the last token is not run.
        assert_eq!(all, 2 * (5 + tokens - 1));
    }
    let narrow = ["--stats", &stats, "--cover", "0.7", "-o"];
    let mask = [&["moe-mask", &model, "--task", "t"][..], &narrow, &[&masked]].concat();
    assert_eq!(run(&mask).code, Some(0), "{}", run(&mask).stderr);
    let shown = run(&["mask", "show", &masked, "t", "--json"]).json();
    let layers = shown["layers"].as_array().unwrap();
    let left: u64 = layers.iter().map(|layer| layer["experts"].as_u64().unwrap()).sum();
    let off = 1.0 - left as f64 / (8 * layers.len()) as f64;
    assert!(off > 0.1 && shown["experts_off"] == off, "{shown}");
    let text = run(&["mask", "show", &masked, "t"]).stdout;
    let total = format!(
        "\noff: 0.0 % of the neurons, 0.0 % of the heads, 0 of 4 layers, {:.1} % of the experts\n",
        100.0 * off
    );
    assert!(text.ends_with(&total), "{text}");
    let defrag = [&["moe-defrag", &model][..], &narrow, &[&small]].concat();
    for cover in ["0", "-0.5", "1.5", "nan", "inf", "x"] {
        // Before any file is opened.
        let cover = format!("--cover={cover}");
        for command in [&["moe-mask", "--task", "t"][..], &["moe-defrag"]] {
            let asked = [
                command,
                &["/no/model", "--stats", "/no/stats", &cover, "-o", "/no/such/place"],
            ]
            .concat();
            let message = run(&asked).fails(2, "Usage");
            assert!(message.contains("above 0 and at most 1"), "{message}");
        }
    }
    assert_eq!(run(&defrag).code, Some(0), "{}", run(&defrag).stderr);
    assert!(std::fs::metadata(&small).unwrap().len() < std::fs::metadata(&model).unwrap().len());
    // No output replaces an input: statistics the model or the prompt, a model the statistics.
    let before = std::fs::read(&model).unwrap();
    run(&[&asked[..asked.len() - 1], &[model.as_str()]].concat()).fails(2, "Usage");
    assert!(std::fs::read(&model).unwrap() == before);
    let before = std::fs::read(&stats).unwrap();
    run(&[&mask[..mask.len() - 1], &[stats.as_str()]].concat()).fails(2, "Usage");
    run(&[
        "convert",
        &model,
        "--quant",
        "vbit",
        "--router-stats",
        &stats,
        "-o",
        &stats,
    ])
    .fails(2, "Usage");
    assert!(std::fs::read(&stats).unwrap() == before);
    // A network without experts has no routes.
    let dense = [
        "run",
        crate::build::model(),
        "--prompt-tokens",
        "1",
        "-n",
        "1",
        "--route-stats",
        &stats,
    ];
    run(&dense).fails(2, "Usage");
}

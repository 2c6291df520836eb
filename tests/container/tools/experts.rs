//! Mixtures of experts, restricted to those that a task uses.

use super::super::raw;
use super::{go_on, interop, payload, sound};
use cmf_gpu::Kind;
use cmf_gpu::dtype::Dtype;
use cmf_gpu::dtype::encode::encode;
use cmf_gpu::format::TensorSpec;
use cmf_gpu::format::cmf::{CmfContainer, CmfWriter, Sections};
use cmf_gpu::source::{Mask, MaskShape, Masks, SkillView};
use cmf_gpu::tools::defrag::defrag;
use cmf_gpu::tools::diff::diff;
use cmf_gpu::tools::moe::{self, Narrowing, RoutingStats};
use serde_json::{Value, json};
use std::path::Path;

/// Two layers with eight experts each and a router in f16. All tensors differ.
fn experts(path: &Path) {
    with_skills(path, json!([]), &[]);
}

/// As [`experts`], with skills that replace tensors of these names and shapes.
fn with_skills(path: &Path, skills: Value, replaced: &[(&str, &[u64])]) {
    let mut header = raw::header();
    header["arch"]["moe"] = json!({"num_experts": 8, "top_k": 2, "moe_intermediate_size": 2, "norm_topk_prob": true});
    let f16 = |name: String, shape: &[u64]| TensorSpec {
        name,
        dtype: Dtype::F16,
        shape: shape.to_vec(),
    };
    let mut specs = vec![f16("model.norm.weight".into(), &[4])];
    for layer in [1, 3] {
        for expert in 0..8 {
            for part in ["down", "gate", "up"] {
                specs.push(f16(
                    format!("model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"),
                    &[2, 4],
                ));
            }
        }
        specs.push(f16(format!("model.layers.{layer}.mlp.gate.weight"), &[8, 4]));
        specs.push(f16(format!("model.layers.{layer}.mlp.expert_bias"), &[8]));
    }
    specs.extend(replaced.iter().map(|&(name, shape)| f16(name.into(), shape)));
    header["skills"] = skills;
    header["arch"]["num_layers"] = json!(4);
    header["arch"]["layer_types"] = json!(vec!["FullAttention"; 4]);
    let header = header.as_object().unwrap().clone();
    let mut writer = CmfWriter::create(path, header, specs.clone(), Sections::default()).unwrap();
    for (i, spec) in specs.iter().enumerate() {
        let values = 0..spec.shape.iter().product::<u64>();
        // Small finite half floats that depend on tensor and element.
        let payload: Vec<u8> = values.flat_map(|v| [v as u8, i as u8 & 0x3F]).collect();
        writer.write(&payload).unwrap();
    }
    writer.finish().unwrap();
}

/// Counts recorded by another implementation, and the experts that it keeps to cover 0.7 of them.
const STATS: &str = r#"{"layers": {"1": [1, 9, 10, 13, 5, 10, 28, 10], "3": [2, 23, 4, 17, 6, 15, 11, 8]}}"#;

const KEPT: [(usize, [usize; 4]); 2] = [(1, [2, 3, 5, 6]), (3, [1, 3, 5, 6])];

fn narrowing(cover: f64) -> Narrowing {
    Narrowing {
        stats: RoutingStats::parse(STATS.as_bytes()).unwrap(),
        cover,
    }
}

#[test]
fn experts_are_masked_by_recorded_counts() {
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (dir.path().join("model.cmf"), dir.path().join("out.cmf"));
    experts(&model);
    moe::mask(&model, &narrowing(0.7), "narrow", &out, &mut go_on).unwrap();
    let masked = sound(&out);
    let masks = masked.masks().unwrap();
    let mask = masks.find("narrow").unwrap();
    for layer in 0..4 {
        let on: Vec<usize> = (0..8).filter(|&expert| mask.expert(layer, expert)).collect();
        match KEPT.iter().find(|(kept, _)| *kept == layer) {
            Some((_, kept)) => assert_eq!(on, kept),
            None => assert_eq!(on.len(), 8),
        }
        assert!(mask.layer(layer) && mask.ffn_count(layer) == 128 && mask.head_count(layer) == 4);
    }
    assert_eq!(
        (mask.task_id, mask.sparsity, masks.default_mask()),
        (0, Some(0.5), None)
    );
    assert!(
        diff(&CmfContainer::open(&model).unwrap(), &masked)
            .unwrap()
            .tensors
            .is_empty()
    );
    let again = dir.path().join("again.cmf");
    moe::mask(&out, &narrowing(1.0), "all", &again, &mut go_on).unwrap();
    let both = sound(&again);
    let both = both.masks().unwrap();
    assert_eq!(both.masks[0], *mask);
    assert!(both.masks[1].task_id == 1 && both.masks[1].is_open());
    let kind = |model: &Path, narrowing: &Narrowing, task: &str| {
        moe::mask(model, narrowing, task, &again, &mut go_on).unwrap_err().kind
    };
    let taken = moe::mask(&out, &narrowing(0.5), "narrow", &again, &mut go_on).unwrap_err();
    assert_eq!(
        taken.to_string(),
        "Usage: mask 'narrow' exists already; choose another name"
    );
    assert_eq!(kind(&model, &narrowing(0.5), "none"), Kind::Usage);
    for cover in [0.0, -1.0, 1.1, f64::NAN] {
        assert_eq!(kind(&model, &narrowing(cover), "x"), Kind::Usage);
    }
    for stats in [r#"{"layers": {"0": [1]}}"#, r#"{"layers": {"1": [1, 2]}}"#] {
        let stats = RoutingStats::parse(stats.as_bytes()).unwrap();
        assert_eq!(kind(&model, &Narrowing { stats, cover: 0.5 }, "x"), Kind::Usage);
    }
    assert_eq!(
        kind(&interop("qwen2-q4tp.cmf"), &narrowing(0.5), "x"),
        Kind::UnsupportedModel
    );
    for text in [
        "[]",
        "{}",
        r#"{"layers": []}"#,
        r#"{"layers": {"x": []}}"#,
        r#"{"layers": {"1": [-1]}}"#,
        r#"{"layers": {"1": ["1"]}}"#,
        r#"{"layers": {"1": [1], "01": [1]}}"#,
        r#"{"layers": {"1": [1], "1": [1]}}"#,
        r#"{"layers": {"1": [1e999]}}"#,
        r#"{"layers": {"1": [1e308, 1e308]}}"#,
        r#"{"layers": {"1": [[1]]}}"#,
        r#"{"layers": {"99999999999999999999": [1]}}"#,
        &format!(r#"{{"layers": {{"1": {}"#, "[".repeat(100_000)),
    ] {
        assert_eq!(
            RoutingStats::parse(text.as_bytes()).unwrap_err().kind,
            Kind::Parse,
            "{text}"
        );
    }
}

#[test]
fn unused_experts_are_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (dir.path().join("model.cmf"), dir.path().join("out.cmf"));
    experts(&model);
    moe::defrag(&model, &narrowing(0.7), &out, &mut go_on).unwrap();
    let (from, to) = (sound(&model), sound(&out));
    for (layer, kept) in KEPT {
        for (new, old) in kept.into_iter().enumerate() {
            for part in ["gate_proj", "up_proj", "down_proj"] {
                let name = |expert: usize| format!("model.layers.{layer}.mlp.experts.{expert}.{part}.weight");
                assert_eq!(payload(&to, &name(new)), payload(&from, &name(old)));
            }
        }
        assert!(
            to.find(&format!("model.layers.{layer}.mlp.experts.4.gate_proj.weight"))
                .is_none()
        );
        for (name, row) in [("gate.weight", 8), ("expert_bias", 2)] {
            let name = format!("model.layers.{layer}.mlp.{name}");
            let rows = payload(&from, &name);
            let wanted: Vec<u8> = kept
                .iter()
                .flat_map(|&expert| rows[expert * row..][..row].to_vec())
                .collect();
            assert_eq!(payload(&to, &name), wanted);
            assert_eq!(to.infos()[to.find(&name).unwrap()].shape[0], 4);
        }
    }
    assert_eq!(to.infos().len(), 1 + 2 * (4 * 3 + 2));
    let roles: Vec<&str> = to.infos()[1..13]
        .iter()
        .map(|info| info.name.split('.').nth(6).unwrap())
        .collect();
    assert_eq!(roles, [["gate_proj"; 4], ["up_proj"; 4], ["down_proj"; 4]].concat());
    assert_eq!(to.header().arch.moe.as_ref().unwrap().num_experts, 8, "nominal");
    let told = &to.header().provenance["moe_defrag"];
    assert_eq!(
        (&told["kept_per_layer"], &told["routing_counts"]["1"]),
        (&json!([4, 4]), &json!([10, 13, 10, 28]))
    );
}

/// Experts of a skill are dropped and renumbered like those that they replace, and its routers lose the same rows.
#[test]
fn skills_of_a_mixture_are_cut_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (dir.path().join("model.cmf"), dir.path().join("out.cmf"));
    let skills = json!([
        {"id": "s", "quality": {"ppl": 1.0}, "selection": {
            "phi_layer": 0, "mean": "ADwAPAA8".repeat(21) + "ADw=", "basis": "ADwAPAA8".repeat(21) + "ADw=", "rank": 1}},
        {"id": "t"},
    ]);
    let replaced: [(&str, &[u64]); 5] = [
        ("skill.s.model.layers.1.mlp.experts.3.up_proj.weight", &[2, 4]),
        ("skill.s.model.layers.1.mlp.experts.4.up_proj.weight", &[2, 4]),
        ("skill.s.model.layers.3.mlp.gate.weight", &[8, 4]),
        ("skill.s.model.norm.weight", &[4]),
        ("skill.t.model.layers.1.mlp.experts.0.gate_proj.weight", &[2, 4]),
    ];
    with_skills(&model, skills, &replaced);
    let written = moe::defrag(&model, &narrowing(0.7), &out, &mut go_on).unwrap();
    let (from, to) = (sound(&model), sound(&out));
    // Layer 1 keeps experts 2, 3, 5 and 6; the second of them becomes 1.
    let same = |new: &str, old: &str| assert_eq!(payload(&to, new), payload(&from, old));
    same("skill.s.model.layers.1.mlp.experts.1.up_proj.weight", replaced[0].0);
    same(replaced[3].0, replaced[3].0);
    let rows = payload(&from, replaced[2].0);
    let wanted: Vec<u8> = KEPT[1]
        .1
        .iter()
        .flat_map(|&row| rows[row * 8..][..8].to_vec())
        .collect();
    assert_eq!(payload(&to, replaced[2].0), wanted);
    let own = to.infos().iter().filter(|info| info.name.starts_with("skill."));
    assert_eq!(own.count(), 3);
    assert_eq!(SkillView::new(&to, to.skills(), Some("s")).unwrap().replaced().len(), 3);
    assert_eq!(SkillView::new(&to, to.skills(), Some("t")).unwrap().replaced().len(), 0);
    let notes = written.notes.join("\n");
    assert!(
        notes.contains("skill 't': every tensor that it replaces was dropped"),
        "{notes}"
    );
    assert!(notes.contains("quality is removed"), "{notes}");
    // Layer 0 comes before every cut layer.
    let told = &to.header_json()["skills"][0];
    assert!(told["selection"].is_object() && told["quality"].is_null());
    // Nothing is dropped, so nothing changes.
    let all = json!({"layers": {"1": [1, 1, 1, 1, 1, 1, 1, 1]}});
    let stats = RoutingStats::parse(all.to_string().as_bytes()).unwrap();
    moe::defrag(&model, &Narrowing { stats, cover: 1.0 }, &out, &mut go_on).unwrap();
    let found = diff(&from, &sound(&out)).unwrap();
    assert!(found.tensors.is_empty() && found.skills.is_empty(), "{found:?}");
}

#[test]
fn router_rows_of_every_type_are_selected() {
    // A router in each type: the selected rows keep their values.
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (dir.path().join("model.cmf"), dir.path().join("out.cmf"));
    let keep = [0usize, 1, 3];
    let (rows, cols) = (4, 64);
    for dtype in Dtype::all().filter(|dtype| dtype.has_encoder()) {
        let payload = encode(dtype, rows, cols, &|first, out| {
            (first * cols..)
                .zip(out)
                .for_each(|(i, value)| *value = (((i * 37) % 101) as f32 - 50.0) * (1 << (i / cols)) as f32);
            Ok(())
        })
        .unwrap();
        let mut header = raw::header();
        header["arch"]["moe"] =
            json!({"num_experts": 8, "top_k": 1, "moe_intermediate_size": 2, "norm_topk_prob": true});
        let spec = TensorSpec {
            name: "model.layers.1.mlp.gate.weight".into(),
            dtype,
            shape: vec![4, 64],
        };
        let header = header.as_object().unwrap().clone();
        let mut writer = CmfWriter::create(&model, header, vec![spec], Sections::default()).unwrap();
        writer.write(&payload).unwrap();
        writer.finish().unwrap();
        let counts = json!({"layers": {"1": [5.0, 5.0, 0.0, 5.0]}});
        let stats = RoutingStats::parse(counts.to_string().as_bytes()).unwrap();
        moe::defrag(&model, &Narrowing { stats, cover: 0.99 }, &out, &mut go_on).unwrap();
        let name = "model.layers.1.mlp.gate.weight";
        let (from, to) = (super::weights(&sound(&model), name), super::weights(&sound(&out), name));
        assert!(from[0] != from[1] && from[1] != from[3]);
        assert!(to == keep.map(|row| from[row].clone()), "{}", dtype.name());
    }
}

/// A mask on neurons of a mixture is refused instead of ignored.
#[test]
fn neurons_of_mixtures_are_not_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let (model, masked, out) = (
        dir.path().join("m.cmf"),
        dir.path().join("masked.cmf"),
        dir.path().join("o.cmf"),
    );
    experts(&model);
    let shape = MaskShape::of(&sound(&model).header().arch, false);
    let mut mask = Mask::open(0, "t", shape);
    mask.set_ffn(3, 5, false).unwrap();
    let masks = Masks {
        default_task: None,
        masks: vec![mask],
    };
    super::rewritten(&model, &masked, |_| (), Some(&masks.to_bytes().unwrap()), &[]);
    let err = defrag(&masked, "t", false, &out, &mut go_on).unwrap_err();
    assert!(
        err.kind == Kind::UnsupportedModel && err.message.contains("neurons of layer 3"),
        "{err}"
    );
    let open = Masks {
        default_task: None,
        masks: vec![Mask::open(0, "t", shape)],
    };
    super::rewritten(&model, &masked, |_| (), Some(&open.to_bytes().unwrap()), &[]);
    let err = defrag(&masked, "t", false, &out, &mut go_on).unwrap_err();
    assert!(err.message.contains("no layer has a dense FFN"), "{err}");
}

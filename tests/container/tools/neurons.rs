//! `defrag`: models without the neurons that a mask switches off.

use super::{copy, entries, go_on, interop, payload, rewritten, sound, weights};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::source::{Mask, MaskShape, Masks, SkillView, Tensors};
use cmf_gpu::tools::defrag::defrag;
use cmf_gpu::tools::skill::{self, New};
use cmf_gpu::{Kind, convert};
use serde_json::{Value, json};
use std::ops::ControlFlow;

#[test]
fn inactive_neurons_are_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out.cmf");
    let model = interop("qwen2-q8_row-densemasks.cmf");
    let err = defrag(&model, "narrow", false, &out, &mut go_on).unwrap_err();
    assert!(err.kind == Kind::Usage && err.message.contains("heads"), "{err}");
    assert_eq!(
        defrag(&model, "wide", true, &out, &mut go_on).unwrap_err().kind,
        Kind::Usage
    );
    assert_eq!(
        defrag(&interop("qwen2-q4tp.cmf"), "narrow", true, &out, &mut go_on)
            .unwrap_err()
            .kind,
        Kind::Usage
    );
    assert_eq!(entries(dir.path()), 0);
    let written = defrag(&model, "narrow", true, &out, &mut go_on).unwrap();
    assert_eq!(
        written.notes,
        ["masks that refer to dropped neurons are removed: general"]
    );
    let (from, to) = (sound(&model), sound(&out));
    let mask = from.masks().unwrap().find("narrow").unwrap();
    assert!(to.masks().is_none() && to.index().is_none());
    assert_eq!(to.header().arch.intermediate_size, 88);
    assert_eq!(to.header().provenance["defrag"]["kept_per_layer"], json!([88, 80, 82]));
    for layer in 0..3 {
        let alive: Vec<usize> = (0..160).filter(|&neuron| mask.ffn(layer, neuron)).collect();
        for part in ["gate", "up"] {
            let name = format!("model.layers.{layer}.mlp.{part}_proj.weight");
            let (old, new) = (weights(&from, &name), weights(&to, &name));
            assert!(
                new == alive.iter().map(|&neuron| old[neuron].clone()).collect::<Vec<_>>(),
                "{name}"
            );
        }
        let name = format!("model.layers.{layer}.mlp.down_proj.weight");
        for (old, new) in weights(&from, &name).iter().zip(weights(&to, &name)) {
            let wanted: Vec<f32> = alive.iter().map(|&neuron| old[neuron]).collect();
            let step = wanted.iter().fold(0f32, |most, w| most.max(w.abs())) / 127.0;
            assert_eq!(new.len(), wanted.len());
            assert!(
                new.iter()
                    .zip(wanted)
                    .all(|(new, wanted)| (new - wanted).abs() <= 0.51 * step + 1e-6)
            );
        }
    }
    // A type with groups becomes q8_2f if the width is not a multiple of 32.
    let q4 = dir.path().join("q4.cmf");
    let options = convert::Options::new(Dtype::Q4tp);
    convert::convert(&model, &q4, &options, &mut |_| ControlFlow::Continue(())).unwrap();
    defrag(&q4, "narrow", true, &out, &mut go_on).unwrap();
    let narrowed = sound(&out);
    let dtype = |name: &str| narrowed.infos()[narrowed.find(name).unwrap()].dtype;
    assert_eq!(dtype("model.layers.0.mlp.down_proj.weight"), Dtype::Q82f);
    assert_eq!(dtype("model.layers.0.mlp.gate_proj.weight"), Dtype::Q4tp);
}

/// In every type, rows are identical to the old rows, and columns are close to the old ones.
#[test]
fn neurons_of_every_type_are_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (dir.path().join("model.cmf"), dir.path().join("out.cmf"));
    let source = interop("qwen2-q8_row-densemasks.cmf");
    for dtype in Dtype::all().filter(|dtype| dtype.has_encoder()) {
        let options = convert::Options::new(dtype);
        convert::convert(&source, &model, &options, &mut |_| ControlFlow::Continue(())).unwrap();
        defrag(&model, "narrow", true, &out, &mut go_on).unwrap();
        let (from, to) = (sound(&model), sound(&out));
        let mask = from.masks().unwrap().find("narrow").unwrap();
        for layer in 0..3 {
            let alive: Vec<usize> = (0..160).filter(|&neuron| mask.ffn(layer, neuron)).collect();
            for part in ["gate", "up"] {
                let name = format!("model.layers.{layer}.mlp.{part}_proj.weight");
                assert_eq!(to.infos()[to.find(&name).unwrap()].dtype, dtype);
                let old = weights(&from, &name);
                let wanted: Vec<Vec<f32>> = alive.iter().map(|&neuron| old[neuron].clone()).collect();
                assert!(weights(&to, &name) == wanted, "{name} {}", dtype.name());
            }
            // 88, 80 and 82 neurons are not whole groups of 32.
            let name = format!("model.layers.{layer}.mlp.down_proj.weight");
            let wanted = if dtype.row_multiple() > 1 { Dtype::Q82f } else { dtype };
            assert_eq!(to.infos()[to.find(&name).unwrap()].dtype, wanted);
            let (old, new) = (weights(&from, &name), weights(&to, &name));
            for (old, new) in old.iter().zip(new) {
                let old: Vec<f32> = alive.iter().map(|&neuron| old[neuron]).collect();
                let most = old.iter().fold(0f32, |most, w| most.max(w.abs()));
                // The groups of q4_block have moved, so weights may differ by a step: a seventh of the group's largest.
                let bound = if dtype == Dtype::Q4Block { 1.0 } else { 0.02 } * most + 1e-6;
                assert!(
                    old.iter().zip(&new).all(|(old, new)| (old - new).abs() <= bound),
                    "{name} {}",
                    dtype.name()
                );
            }
        }
    }
}

/// Skill tensors are cut with the model: the result is that of cutting the model with the skill active.
#[test]
fn skills_are_cut_with_their_model() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let model = copy(&dir, "qwen2-q8_row-densemasks.cmf");
    let specialist = path("specialist.cmf");
    // Two FFN matrices of the middle layer, and a matrix without neurons.
    let file = interop("qwen2-q4tp-gfx-skillfile.cmf");
    skill::apply(&model, &file, &specialist, true, &mut go_on).unwrap();
    let new = New {
        id: "gfx".into(),
        ..New::default()
    };
    skill::add(&model, &specialist, &new, &mut go_on).unwrap();
    // Adds members to its record.
    let known = path("known.cmf");
    let halves = |count: usize| "ADwAPAA8".repeat(count * 2 / 6);
    let selection = |phi: usize| json!({"phi_layer": phi, "mean": halves(96), "basis": halves(96), "rank": 1});
    let record = |phi: usize, default: &str| {
        let default = default.to_owned();
        let selection = selection(phi);
        move |header: &mut Value| {
            let record = header["skills"][0].as_object_mut().unwrap();
            record.insert("quality".into(), json!({"ppl": 2.0}));
            record.insert("input_mask_task".into(), json!("narrow"));
            record.insert("selection".into(), selection);
            record.insert("note".into(), json!(default));
        }
    };
    rewritten(&model, &known, record(1, ""), None, &[]);
    let (cut, alone) = (path("cut.cmf"), path("alone.cmf"));
    let written = defrag(&known, "narrow", true, &cut, &mut go_on).unwrap();
    defrag(&specialist, "narrow", true, &alone, &mut go_on).unwrap();
    let (cut, alone) = (sound(&cut), sound(&alone));
    let view = SkillView::new(&cut, cut.skills(), Some("gfx")).unwrap();
    assert_eq!(view.infos().len(), alone.infos().len());
    assert_eq!(view.replaced().len(), 2);
    for (id, info) in view.infos().iter().enumerate() {
        let other = alone.find(&info.name).unwrap();
        assert_eq!(
            (info.dtype, &info.shape),
            (alone.infos()[other].dtype, &alone.infos()[other].shape)
        );
        assert!(view.bytes(id).unwrap() == alone.bytes(other).unwrap(), "{}", info.name);
    }
    let narrowed = cut.find("skill.gfx.model.layers.1.mlp.down_proj.weight").unwrap();
    assert_eq!(cut.infos()[narrowed].shape, [96, 80]);
    // Statements about the uncut model are removed; unknown members stay.
    let told = &cut.header_json()["skills"][0];
    for key in ["quality", "selection", "input_mask_task"] {
        assert_eq!(told[key], Value::Null, "{key}");
    }
    assert_eq!((told["id"].as_str(), told["note"].as_str()), (Some("gfx"), Some("")));
    let notes = written.notes.join("\n");
    assert!(
        notes.contains("quality is removed") && notes.contains("selection is removed"),
        "{notes}"
    );
    assert!(notes.contains("task 'narrow' is removed"), "{notes}");
    assert_eq!(written.notes.len(), 4, "{notes}");

    // Hidden states before the first cut layer do not change, whatever the default task is.
    let masks = |default: &str| {
        let shape = MaskShape::of(&sound(&model).header().arch, false);
        let mut mask = Mask::open(0, "t", shape);
        (0..40).for_each(|neuron| mask.set_ffn(1, neuron, false).unwrap());
        // Another task, which switches off only a head of the first layer.
        let mut other = Mask::open(1, "u", shape);
        other.set_head(0, 0, false).unwrap();
        let default_task = Some(default.to_owned());
        Masks {
            default_task,
            masks: vec![mask, other],
        }
        .to_bytes()
        .unwrap()
    };
    for (phi, default, stays) in [(0, "other", true), (1, "other", false), (2, "t", false), (0, "u", true)] {
        let (with, out) = (path("with.cmf"), path("out.cmf"));
        rewritten(&model, &with, record(phi, default), Some(&masks(default)), &[]);
        defrag(&with, "t", false, &out, &mut go_on).unwrap();
        let skill = &sound(&out).header_json()["skills"][0].clone();
        assert_eq!(skill["selection"].is_object(), stays, "{phi} {default}");
        assert!(skill["quality"].is_null());
    }
    // A skill that does not match its model, and a skill file.
    let broken = path("broken.cmf");
    rewritten(
        &model,
        &broken,
        |_| (),
        None,
        &[(
            cmf_gpu::format::TensorSpec {
                name: "skill.gfx.model.layers.0.mlp.up_proj.weight".into(),
                dtype: Dtype::F16,
                shape: vec![2, 3],
            },
            vec![0; 12],
        )],
    );
    let kind = |model: &std::path::Path| {
        defrag(model, "narrow", true, &path("no.cmf"), &mut go_on)
            .unwrap_err()
            .kind
    };
    assert_eq!(kind(&broken), Kind::Parse);
    assert_eq!(kind(&file), Kind::SkillFile);
    assert!(!path("no.cmf").exists());
}

/// Masks do not cover the neurons of a draft head.
#[test]
fn a_draft_head_keeps_its_neurons() {
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (dir.path().join("model.cmf"), dir.path().join("out.cmf"));
    let source = interop("qwen3_mtp-q8-appended.cmf");
    let from = sound(&source);
    let shape = MaskShape::of(&from.header().arch, false);
    let mut mask = Mask::open(0, "t", shape);
    for layer in 0..shape.layers {
        (0..shape.ffn / 2).for_each(|neuron| mask.set_ffn(layer, neuron, false).unwrap());
    }
    let masks = Masks {
        default_task: None,
        masks: vec![mask],
    }
    .to_bytes()
    .unwrap();
    rewritten(&source, &model, |_| (), Some(&masks), &[]);
    defrag(&model, "t", false, &out, &mut go_on).unwrap();
    let to = sound(&out);
    let mut drafts = 0;
    for info in from.infos().iter().filter(|info| info.name.starts_with("model.mtp.")) {
        assert!(payload(&to, &info.name) == payload(&from, &info.name), "{}", info.name);
        drafts += usize::from(info.name.ends_with(".mlp.gate_proj.weight"));
    }
    assert_eq!(drafts, 1);
    let half = shape.ffn.div_ceil(2) as u64;
    for skill in ["", "skill.tail."] {
        let name = format!("{skill}model.layers.1.mlp.gate_proj.weight");
        assert_eq!(to.infos()[to.find(&name).unwrap()].shape[0], half);
    }
    // The header states the largest width.
    assert_eq!(to.header().arch.intermediate_size, shape.ffn);
    assert_eq!(to.header().provenance["defrag"]["post_intermediate_max"], half);
}

//! Skills of a model that is loaded: what they say, what a change moves, which one a prompt is for, and several at once.

use crate::interop::{compare, greedy, tokens};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::engine::Engine;
use cmf_gpu::format::TensorSpec;
use cmf_gpu::format::cmf::{CmfContainer, CmfWriter, Sections};
use cmf_gpu::graph::Counters;
use cmf_gpu::lm::run::Cancel;
use cmf_gpu::op::Kv;
use cmf_gpu::options::{DeviceChoice, LoadOptions, Overlay, Speculation, TaskChoice};
use cmf_gpu::source::{Mask, MaskAxis, MaskShape, Masks, Selection, SkillView};
use cmf_gpu::tools::skill::set_selection;
use cmf_gpu::{Kind, Notice, Result, routing, tools};
use half::f16;
use serde_json::{Value, json};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

const OTHER_TYPE: &str = "qwen3_mtp-q8-appended.cmf";
const SAME_TYPE: &str = "qwen3-q4t-alpha.cmf";

fn interop(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/interop")
        .join(name)
}

fn json_file(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(interop(name)).unwrap()).unwrap()
}

fn load(path: &Path, on_host: bool, overlay: Overlay) -> Engine {
    loaded(path, on_host, overlay, TaskChoice::Default).unwrap()
}

fn loaded(path: &Path, on_host: bool, overlay: Overlay, task: TaskChoice) -> Result<Engine> {
    // f32 caches: as exact as the recorded runs.
    let options = LoadOptions::default()
        .device(DeviceChoice::Cpu)
        .ctx(96)
        .kv(Kv::F32)
        .all_logits(true)
        .speculation(Speculation::Off)
        .overlay(overlay)
        .task(task);
    let mut progress = |_, _| ControlFlow::Continue(());
    match on_host {
        true => Engine::load(path, &options, &mut progress),
        false => Engine::load_on(path, crate::device(), &options, &mut progress),
    }
}

fn skill(id: &str) -> Overlay {
    Overlay::Skill(id.into())
}

/// The logits of a few tokens.
fn logits(engine: &mut Engine) -> Vec<f32> {
    let tokens = [51, 457, 310, 294, 82, 262, 220, 334];
    let mut all = Vec::new();
    let mut sink = |_: usize, logits: &[f32], _: &[Vec<f32>]| {
        all.extend_from_slice(logits);
        Ok(())
    };
    engine.session().logits(&tokens, 6, false, &mut sink).unwrap();
    all
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn skills_say_what_another_writer_recorded() {
    let manifest = json_file("manifest.json");
    let files = manifest["files"].as_array().unwrap();
    let appended = files.iter().find(|file| file["file"] == OTHER_TYPE).unwrap();
    let mut compared = 0;
    for (entry, id) in [(appended, "tail"), (&json_file("skills.json"), "alpha")] {
        let path = interop(entry["file"].as_str().unwrap());
        for on_host in [false, true] {
            let mut runs = |engine: &mut Engine, skill: Option<&str>| {
                let runs = entry["runs"].as_array().unwrap().iter();
                for run in runs.filter(|run| run["skill"].as_str() == skill) {
                    compare(engine.session(), run, &format!("{id}, host {on_host}, skill {skill:?}"));
                    compared += 1;
                }
            };
            let mut engine = load(&path, on_host, Overlay::Backbone);
            for skill in [None, Some(id), None] {
                engine.set_skill(skill).unwrap();
                runs(&mut engine, skill);
            }
            runs(&mut load(&path, on_host, skill(id)), Some(id));
        }
    }
    // Three prompts in four states of two files on two executors.
    assert_eq!(compared, 48);
}

/// Bytes of the weights that hold a tensor of a skill.
fn bytes_of(engine: &mut Engine, path: &Path, id: &str) -> u64 {
    let container = CmfContainer::open(path).unwrap();
    let replaced = SkillView::new(&container, container.skills(), Some(id))
        .unwrap()
        .replaced()
        .to_vec();
    let matrices = engine.session().plan().graph.matrices.iter();
    let held = matrices.filter(|matrix| matrix.parts.iter().any(|part| replaced.contains(part)));
    let segments = held.flat_map(|matrix| &matrix.segments);
    segments.map(|segment| segment.geometry.data_bytes()).sum()
}

fn switch(engine: &mut Engine, skill: Option<&str>) -> Counters {
    let before = engine.counters();
    engine.set_skill(skill).unwrap();
    engine.counters().since(&before)
}

#[test]
fn a_change_moves_the_skill_and_nothing_else() {
    for (name, id, in_place) in [(SAME_TYPE, "alpha", true), (OTHER_TYPE, "tail", false)] {
        let path = interop(name);
        let mut engine = load(&path, false, Overlay::Backbone);
        let backbone = logits(&mut engine);
        let bare = engine.counters().gpu_bytes;
        let mut other = load(&path, false, skill(id));
        let there = switch(&mut engine, Some(id));
        assert_eq!(there.upload_bytes, bytes_of(&mut engine, &path, id), "{name}");
        assert!(there.upload_bytes > 0);
        if in_place {
            // The two buffers are for staging.
            assert_eq!((there.buffers_created, there.bind_groups_created), (2, 0));
        }
        assert_eq!(there.gpu_bytes, other.counters().gpu_bytes, "{name}");
        let own = logits(&mut engine);
        assert_eq!(own, logits(&mut other), "{name}: as if it had been loaded so");
        assert!(distance(&own, &backbone) > 0.1, "{name}");
        assert_eq!(switch(&mut engine, Some(id)).upload_bytes, 0, "it is there");
        let back = switch(&mut engine, None);
        assert_eq!(back.upload_bytes, bytes_of(&mut engine, &path, id), "{name}");
        assert_eq!(back.gpu_bytes, bare, "{name}");
        assert_eq!(logits(&mut engine), backbone, "{name}");

        let err = engine.set_skill(Some("nobody")).unwrap_err();
        assert!(err.kind == Kind::Usage && err.message.contains(id), "{err}");
        assert_eq!(logits(&mut engine), backbone, "{name}: nothing happened");

        // A skill that is not active costs no device memory.
        let dir = tempfile::tempdir().unwrap();
        let without = dir.path().join("model.cmf");
        std::fs::write(&without, std::fs::read(&path).unwrap()).unwrap();
        tools::skill::remove(&without, id).unwrap();
        let without = load(&without, false, Overlay::Backbone);
        assert_eq!(without.counters().gpu_bytes, bare, "{name}");
    }
}

#[test]
fn an_answer_after_a_change_forgets_the_conversation_before() {
    let mut engine = load(&interop(SAME_TYPE), false, Overlay::Backbone);
    let prompt = [51, 457, 310, 294];
    let before = greedy(engine.session(), &prompt, 6);
    engine.set_skill(Some("alpha")).unwrap();
    assert!(engine.session().cached().is_empty());
    let with = greedy(engine.session(), &prompt, 6);
    let mut fresh = load(&interop(SAME_TYPE), false, skill("alpha"));
    assert_eq!(with, greedy(fresh.session(), &prompt, 6));
    assert_ne!(with, before);
}

#[test]
fn prompts_find_the_skills_that_another_writer_found() {
    let recorded = json_file("skills.json");
    for on_host in [false, true] {
        let mut engine = load(&interop(SAME_TYPE), on_host, skill("alpha"));
        for route in recorded["route"].as_array().unwrap() {
            let found = engine.route(&tokens(&route["ids"]), &Cancel::new()).unwrap();
            assert_eq!(found[0].id, route["winner"].as_str().unwrap());
            assert_eq!(found.len(), 2);
            for found in &found {
                let wanted = route["E"][&found.id].as_f64().unwrap();
                let off = (found.energy - wanted).abs();
                assert!(off < 1e-4, "host {on_host}: {found:?}, expected {wanted}");
            }
        }
        // Routing looks at the backbone.
        assert_eq!(engine.overlay(), &Overlay::Backbone);
    }
    let mut none = load(&interop(OTHER_TYPE), true, Overlay::Backbone);
    let err = none.route(&[1, 2], &Cancel::new()).unwrap_err();
    assert!(err.kind == Kind::Usage && err.message.contains("skill fit"), "{err}");
}

/// Tokens from a range, without a pattern.
fn prompt(seed: &mut u64, first: u32, count: u32) -> Vec<u32> {
    let mut next = |below: u32| {
        *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (*seed >> 33) as u32 % below
    };
    let length = 8 + next(24);
    (0..length).map(|_| first + next(count)).collect()
}

#[test]
fn the_mean_of_hidden_states_is_that_of_all_tokens() {
    let mut engine = load(&interop(SAME_TYPE), false, Overlay::Backbone);
    let mut seed = 5;
    // Longer than a chunk of a software adapter.
    let tokens: Vec<u32> = (0..12).flat_map(|_| prompt(&mut seed, 0, 512)).take(90).collect();
    assert_eq!(tokens.len(), 90);
    let layers = [0, 2];
    let found = engine.mean_hidden(&tokens, &layers, &Cancel::new()).unwrap();
    let mut sums = vec![vec![0.0; found[0].len()]; layers.len()];
    let mut sink = |_: usize, _: &[f32], hidden: &[Vec<f32>]| {
        for (sum, &layer) in sums.iter_mut().zip(&layers) {
            sum.iter_mut()
                .zip(&hidden[layer])
                .for_each(|(sum, &value)| *sum += f64::from(value));
        }
        Ok(())
    };
    engine.session().logits(&tokens, tokens.len(), true, &mut sink).unwrap();
    for (found, sum) in found.iter().zip(&sums) {
        for (found, sum) in found.iter().zip(sum) {
            assert!((found - sum / tokens.len() as f64).abs() < 1e-6);
        }
    }
    for layers in [&[3][..], &[2, 0]] {
        let err = engine.mean_hidden(&tokens, layers, &Cancel::new()).unwrap_err();
        assert_eq!(err.kind, Kind::Usage, "{layers:?}");
    }
}

#[test]
fn fitted_skills_find_the_prompts_that_are_like_their_examples() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.cmf");
    std::fs::write(&path, std::fs::read(interop(SAME_TYPE)).unwrap()).unwrap();
    let kinds = [("alpha", 100, 6), ("beta", 300, 6)];
    let mut seed = 1;
    let mut fitted: Vec<Selection> = Vec::new();
    {
        let mut engine = load(&path, false, Overlay::Backbone);
        for (_, first, count) in kinds {
            let mut example = || {
                let example = prompt(&mut seed, first, count);
                engine
                    .mean_hidden(&example, &[1], &Cancel::new())
                    .unwrap()
                    .swap_remove(0)
            };
            let examples: Vec<Vec<f64>> = (0..12).map(|_| example()).collect();
            fitted.push(routing::fit(&examples, 1, 4).unwrap());
        }
    }
    for ((id, ..), selection) in kinds.iter().zip(&fitted) {
        set_selection(&path, id, selection).unwrap();
    }
    let container = CmfContainer::open(&path).unwrap();
    assert!(container.verify(&mut |_, _| ()).ok());
    for (skill, fitted) in container.skills().iter().zip(&fitted) {
        // f16 all the way, so nothing is lost on the way to the file.
        assert_eq!(skill.selection.as_ref(), Some(fitted));
        assert_eq!((&skill.quality, fitted.rank), (&None, 4));
    }
    let mut engine = load(&path, false, Overlay::Backbone);
    for (id, first, count) in kinds {
        for _ in 0..5 {
            let unseen = prompt(&mut seed, first, count);
            let routes = engine.route(&unseen, &Cancel::new()).unwrap();
            assert_eq!(routes[0].id, id, "{routes:?}");
        }
    }
    drop(engine);
    let other = Selection {
        metric: Some("cosine".into()),
        ..fitted.swap_remove(1)
    };
    set_selection(&path, "beta", &other).unwrap();
    let routed = load(&path, false, Overlay::Backbone).route(&[1, 2], &Cancel::new());
    let err = routed.unwrap_err();
    assert!(
        err.message.contains("'beta'") && err.message.contains("'cosine'"),
        "{err}"
    );
    assert_eq!(err.kind, Kind::UnsupportedFeature);
}

/// By how much the skills of [`sample`] multiply tensors.
fn factor(skill: &str, name: &str) -> Option<f32> {
    match (skill, name) {
        ("a", "model.norm.weight") => Some(1.5),
        ("a", "model.layers.0.mlp.gate_proj.weight" | "model.layers.0.mlp.down_proj.weight") => Some(1.25),
        ("b", "model.layers.0.mlp.down_proj.weight" | "model.layers.1.self_attn.q_proj.weight") => Some(0.5),
        _ => None,
    }
}

type Weights = Vec<(TensorSpec, Vec<u8>)>;

/// A model with two skills, and one whose tensors are the means of theirs.
fn sample(dir: &Path) -> [PathBuf; 2] {
    let (container, _guard) = crate::golden("llama_tied", Dtype::F16);
    let values = |id: usize, by: f32| -> Vec<f32> {
        let halves = container.bytes(id).unwrap().as_chunks().0.iter();
        let scaled = halves.map(|&half| f16::from_f32(f16::from_le_bytes(half).to_f32() * by));
        scaled.map(f16::to_f32).collect()
    };
    let halves = |values: &[f32]| -> Vec<u8> {
        let halves = values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes());
        halves.collect()
    };
    let (mut with, mut means): (Weights, Weights) = Default::default();
    for (id, info) in container.infos().iter().enumerate() {
        let spec = |name: &str, dtype| TensorSpec {
            name: name.into(),
            dtype,
            shape: info.shape.clone(),
        };
        let plain = (spec(&info.name, Dtype::F16), halves(&values(id, 1.0)));
        let [a, b] = ["a", "b"].map(|skill| {
            let by = factor(skill, &info.name);
            if let Some(by) = by {
                let name = format!("skill.{skill}.{}", info.name);
                with.push((spec(&name, Dtype::F16), halves(&values(id, by))));
            }
            by
        });
        means.push(match a.or(b) {
            None => plain.clone(),
            Some(_) => {
                let [a, b] = [a, b].map(|by| values(id, by.unwrap_or(1.0)));
                let mean = a.iter().zip(&b).flat_map(|(a, b)| (0.5 * a + 0.5 * b).to_le_bytes());
                (spec(&info.name, Dtype::F32), mean.collect())
            }
        });
        with.push(plain);
    }
    let write = |name: &str, tensors: Weights, skills: Value| {
        let path = dir.join(name);
        let mut header = container.header_json().clone();
        header.insert("skills".into(), skills);
        let (specs, payloads): (Vec<_>, Vec<_>) = tensors.into_iter().unzip();
        let mut writer = CmfWriter::create(&path, header, specs, Sections::default()).unwrap();
        payloads.iter().for_each(|payload| writer.write(payload).unwrap());
        writer.finish().unwrap();
        path
    };
    let skills = json!([{"id": "a", "layers": [0]}, {"id": "b", "layers": [0, 1]}]);
    [write("two.cmf", with, skills), write("means.cmf", means, json!([]))]
}

/// The model of [`sample`] with masks: of the skill `a`, of the file, and one that only `lost` names and that is not there.
fn masked(dir: &Path) -> PathBuf {
    let [path, _] = sample(dir);
    let container = CmfContainer::open(&path).unwrap();
    let shape = MaskShape::of(&container.header().arch, false);
    let mut masks = Masks {
        default_task: Some("usual".into()),
        masks: ["usual", "narrow"]
            .iter()
            .zip(0..)
            .map(|(name, id)| Mask::open(id, *name, shape))
            .collect(),
    };
    for neuron in 0..32 {
        masks.masks[0].set_unit(MaskAxis::Neurons, 0, neuron, false).unwrap();
        masks.masks[1]
            .set_unit(MaskAxis::Neurons, 1, 2 * neuron, false)
            .unwrap();
    }
    let mut header = container.header_json().clone();
    let skills = json!([
        {"id": "a", "input_mask_task": "narrow"}, {"id": "b"}, {"id": "lost", "input_mask_task": "gone"},
        {"id": "whole", "input_mask_task": "none"},
    ]);
    header.insert("skills".into(), skills);
    let specs = container.infos().iter().map(|info| TensorSpec {
        name: info.name.clone(),
        dtype: info.dtype,
        shape: info.shape.clone(),
    });
    let section = masks.to_bytes().unwrap();
    let sections = Sections {
        masks: Some(&section),
        ..Sections::default()
    };
    let path = dir.join("masked.cmf");
    let mut writer = CmfWriter::create(&path, header, specs.collect(), sections).unwrap();
    (0..container.infos().len()).for_each(|id| writer.write(container.bytes(id).unwrap()).unwrap());
    writer.finish().unwrap();
    path
}

#[track_caller]
fn is(engine: &mut Engine, task: Option<&str>, wanted: &[f32]) {
    assert_eq!(engine.task(), task);
    assert!(logits(engine) == wanted, "other logits under {task:?}");
}

#[test]
fn a_skill_brings_its_mask_and_takes_it_away() {
    let dir = tempfile::tempdir().unwrap();
    let path = masked(dir.path());
    for on_host in [false, true] {
        let mut engine = load(&path, on_host, Overlay::Backbone);
        let named = |name: &str| TaskChoice::Named(name.into());
        let fresh = |overlay: Overlay, task: TaskChoice| logits(&mut loaded(&path, on_host, overlay, task).unwrap());
        let (usual, narrow) = (
            fresh(Overlay::Backbone, named("usual")),
            fresh(skill("a"), named("narrow")),
        );
        let (full, usual_a) = (
            fresh(Overlay::Backbone, TaskChoice::Full),
            fresh(skill("a"), named("usual")),
        );
        assert!(distance(&usual, &full) > 1e-3 && distance(&narrow, &usual_a) > 1e-3);

        is(&mut engine, Some("usual"), &usual);
        let unmeasured = Notice::MaskUnmeasured { task: "narrow".into() };
        assert_eq!(engine.set_skill(Some("a")).unwrap(), [unmeasured]);
        is(&mut engine, Some("narrow"), &narrow);
        assert_eq!(logits(&mut load(&path, on_host, skill("a"))), narrow, "loaded so");
        engine.set_skill(None).unwrap();
        is(&mut engine, Some("usual"), &usual);
        assert_eq!(engine.set_skill(Some("a")).unwrap(), [], "once");
        engine.set_skill(Some("b")).unwrap();
        assert_eq!(engine.task(), Some("usual"), "b says nothing");
        engine.set_skill(Some("whole")).unwrap();
        is(&mut engine, None, &full);

        // Who named a task gets it, until the choice is open again.
        engine.set_task(Some("usual")).unwrap();
        let overridden = Notice::TaskOverridden {
            skills: vec![("a".into(), "narrow".into())],
            chosen: "usual".into(),
        };
        assert_eq!(engine.set_skill(Some("a")).unwrap(), [overridden]);
        is(&mut engine, Some("usual"), &usual_a);
        engine.choose_task(&TaskChoice::Default).unwrap();
        is(&mut engine, Some("narrow"), &narrow);
        engine.set_task(None).unwrap();
        engine.set_skill(None).unwrap();
        is(&mut engine, None, &full);
        engine.choose_task(&TaskChoice::Default).unwrap();
        assert_eq!(engine.task(), Some("usual"));

        let err = engine.set_skill(Some("lost")).unwrap_err();
        assert!(err.kind == Kind::Parse && err.message.contains("'lost'"), "{err}");
        assert!(
            err.message.contains("'gone'") && err.message.contains("usual, narrow"),
            "{err}"
        );
        is(&mut engine, Some("usual"), &usual);
        let err = loaded(&path, on_host, skill("lost"), TaskChoice::Default)
            .map(drop)
            .unwrap_err();
        assert_eq!(err.kind, Kind::Parse);
        assert!(loaded(&path, on_host, skill("lost"), named("usual")).is_ok());

        let blend = |text: &str| Overlay::blend(text).unwrap();
        let differ = Notice::TasksDiffer {
            skills: vec![("a".into(), Some("narrow".into())), ("b".into(), None)],
        };
        assert_eq!(engine.set_overlay(&blend("a:0.5,b:0.5")).unwrap(), [differ]);
        assert_eq!(engine.task(), Some("usual"));
        engine.set_overlay(&blend("a:1,b:0")).unwrap();
        assert_eq!(engine.task(), Some("narrow"));

        // What a prompt is like does not depend on a task.
        let phi = |engine: &mut Engine| engine.mean_hidden(&[51, 457, 310], &[0, 1], &Cancel::new()).unwrap();
        engine.set_overlay(&Overlay::Backbone).unwrap();
        let under_usual = phi(&mut engine);
        is(&mut engine, Some("usual"), &usual);
        engine.set_skill(Some("a")).unwrap();
        assert_eq!(phi(&mut engine), under_usual);
        assert_eq!((engine.overlay(), engine.task()), (&Overlay::Backbone, Some("usual")));
        engine.set_task(None).unwrap();
        assert_eq!(phi(&mut engine), under_usual);
    }
    let report = CmfContainer::open(&path).unwrap().verify(&mut |_, _| ());
    let [failure] = report.failures.as_slice() else {
        panic!("{:?}", report.failures)
    };
    assert_eq!(
        (failure.subject.as_str(), failure.error.kind),
        ("skill 'lost'", Kind::Parse)
    );
    assert!(failure.error.message.contains("'gone'"), "{}", failure.error);
}

#[test]
fn a_blend_is_the_weighted_sum_of_skills() {
    let dir = tempfile::tempdir().unwrap();
    let [two, means] = sample(dir.path());
    let blend = |text: &str| Overlay::blend(text).unwrap();
    for on_host in [false, true] {
        let mut engine = load(&two, on_host, Overlay::Backbone);
        let backbone = logits(&mut engine);
        engine.set_overlay(&blend("a:0.5,b:0.5")).unwrap();
        let half = logits(&mut engine);
        let mut means = load(&means, on_host, Overlay::Backbone);
        assert_eq!(half, logits(&mut means), "host {on_host}");
        engine.set_overlay(&blend("a:1,b:0")).unwrap();
        let whole = logits(&mut engine);
        engine.set_skill(Some("a")).unwrap();
        let alone = logits(&mut engine);
        // The same weights; the kernels of another type add in another order.
        let apart = distance(&whole, &alone);
        assert!(apart < 1e-4, "host {on_host}: {apart}");
        assert!(distance(&half, &alone) > 1e-2 && distance(&alone, &backbone) > 1e-2);
        for bad in ["a:0.5,b:0.4", "a:-0.5,b:1.5", "a:0.5,a:0.5", "a:0.5,c:0.5", "a:nan"] {
            let err = engine.set_overlay(&blend(bad)).unwrap_err();
            assert_eq!(err.kind, Kind::Usage, "{bad}");
        }
        assert_eq!(logits(&mut engine), alone, "nothing happened");
        engine.set_overlay(&Overlay::Backbone).unwrap();
        assert_eq!(logits(&mut engine), backbone);
    }
}

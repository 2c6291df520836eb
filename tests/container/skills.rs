//! The registry of skills, and models with one skill active.

use super::raw::{Raw, record, sample};
use super::tools::{go_on, interop, sound};
use super::{fixture, on_disk, refusal};
use cmf_gpu::Kind;
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::source::{SkillView, Tensors};
use cmf_gpu::tools::skill::{self, New};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

/// Rows of 64 half floats of 1.0, in base64.
fn ones(rows: usize) -> String {
    // The bytes 00 3C 00 and 3C 00 3C in base64, then the rest of 128 bytes.
    let (whole, rest) = (rows * 128 / 6, rows * 128 % 6);
    let tail = match rest {
        0 => "",
        2 => "ADw=",
        _ => "ADwAPA==",
    };
    "ADwAPAA8".repeat(whole) + tail
}

fn with_skills(skills: Value) -> Raw {
    sample().with_header(|h| h["skills"] = skills)
}

#[test]
fn the_registry_is_read() {
    let selection = json!({"metric": "mse", "phi_layer": 1, "mean": ones(1), "basis": ones(2), "rank": 2});
    let raw = with_skills(json!([
        {"id": "a", "name": "first", "layers": [0, 1], "selection": selection, "quality": null, "input_mask_task": "t"},
        {"id": "b", "base_dir_hash": "00ff", "base_arch": "x", "task": "y", "provenance": {"z": 1}, "unknown": 1},
    ]));
    let (_dir, path) = on_disk(&raw.build());
    let container = CmfContainer::open(&path).unwrap();
    let [a, b] = container.skills() else { panic!() };
    assert_eq!(
        (a.id.as_str(), a.name.as_deref(), a.layers.as_slice()),
        ("a", Some("first"), &[0, 1][..])
    );
    assert_eq!(
        (a.input_mask_task.as_deref(), &a.quality, a.base_dir_hash),
        (Some("t"), &None, None)
    );
    let selection = a.selection.as_ref().unwrap();
    assert_eq!(
        (selection.phi_layer, selection.rank, selection.metric.as_deref()),
        (1, 2, Some("mse"))
    );
    assert!(selection.mean == [1.0; 64] && selection.basis == [1.0; 128]);
    assert_eq!((b.base_dir_hash, b.task.as_deref()), (Some(0xff), Some("y")));
}

#[test]
fn malformed_registries_are_refused() {
    let selection = |change: fn(&mut Value)| {
        let mut selection = json!({"phi_layer": 0, "mean": ones(1), "basis": ones(1)});
        change(&mut selection);
        json!([{"id": "a", "selection": selection}])
    };
    assert_eq!(
        refusal(&with_skills(selection(|_| ())).build()),
        Err("was opened".into())
    );
    let id = |id: &str| json!([{ "id": id }]);
    let cases: [(Value, &str); 24] = [
        (json!({}), "skills"),
        (json!(["a"]), "expected an object"),
        (json!([{}]), "missing field `id`"),
        (json!([{"id": 1}]), "invalid type"),
        (id(""), "skill id ''"),
        (id("none"), "skill id 'none'"),
        (id("auto"), "skill id 'auto'"),
        (id(".."), "skill id '..'"),
        (id("a.b"), "skill id 'a.b'"),
        (id("x/y"), "skill id 'x/y'"),
        (id("x\\y"), "skill id"),
        (id("a\u{1b}"), "skill id"),
        (id("a\0"), "skill id"),
        (id(&"x".repeat(10_000)), "skill id"),
        (json!([{"id": "a"}, {"id": "a"}]), "two skills have the id 'a'"),
        (json!([{"id": "a", "layers": [-1]}]), "header.skills[0]"),
        (json!([{"id": "a", "base_dir_hash": "zz"}]), "expected 16 hex digits"),
        (json!([{"id": "a", "base_dir_hash": ""}]), "expected 16 hex digits"),
        (selection(|s| s["mean"] = json!("!")), "mean is not base64"),
        (
            selection(|s| s["mean"] = json!(ones(2))),
            "mean has 128 values, expected 64",
        ),
        (selection(|s| s["basis"] = json!("ADw=")), "basis has 1 values"),
        (selection(|s| s["rank"] = json!(2)), "basis has 64 values"),
        (selection(|s| s["phi_layer"] = json!(2)), "phi_layer is 2"),
        (
            selection(|s| s["mean"] = json!("AHw=".to_owned())),
            "mean has the value inf",
        ),
    ];
    for (skills, says) in cases {
        let err = refusal(&with_skills(skills.clone()).build()).expect("must be refused");
        assert!(err.kind == Kind::Parse && err.message.contains(says), "{says}: {err}");
    }
}

#[test]
fn replaced_tensors_are_read_from_the_skill() {
    let container = Arc::new(CmfContainer::open(&fixture("interop/qwen3_mtp-q8-appended.cmf")).unwrap());
    let backbone = SkillView::new(&*container, container.skills(), None).unwrap();
    let view = SkillView::new(container.clone(), container.skills(), Some("tail")).unwrap();
    assert_eq!(
        (container.infos().len(), backbone.infos().len(), view.infos().len()),
        (54, 51, 51)
    );
    assert!(view.infos().iter().all(|info| !info.name.starts_with("skill.")));
    let mut replaced = Vec::new();
    for (id, info) in view.infos().iter().enumerate() {
        assert_eq!(view.find(&info.name), Some(id));
        assert_eq!(backbone.infos()[id].name, info.name, "one order for both");
        let plain = container.find(&info.name).unwrap();
        let own = container.find(&format!("skill.tail.{}", info.name));
        assert_eq!(
            view.stored(id).unwrap().bytes,
            container.bytes(own.unwrap_or(plain)).unwrap()
        );
        assert_eq!(backbone.stored(id).unwrap().bytes, container.bytes(plain).unwrap());
        assert_eq!(view.stored_id(id), Some(own.unwrap_or(plain)));
        if own.is_some() {
            assert_eq!(
                (info.dtype.name(), backbone.infos()[id].dtype.name()),
                ("f16", "q8_row")
            );
            replaced.push(info.name.as_str());
        }
        view.release(id);
    }
    let projection = |name: &str| format!("model.layers.1.mlp.{name}_proj.weight");
    assert_eq!(replaced, ["down", "gate", "up"].map(projection));
    assert_eq!(view.stored(51).err().unwrap().kind, Kind::Internal);
    let err = SkillView::new(&*container, container.skills(), Some("tial"))
        .map(|_| ())
        .unwrap_err();
    assert!(
        err.kind == Kind::Usage && err.message.contains("existing skills: tail"),
        "{err}"
    );
}

#[test]
fn skill_tensors_must_match_the_backbone() {
    let view = |name: &str, shape: &[u32], skill: Option<&str>| {
        let raw = with_skills(json!([{"id": "a"}])).with(|raw| {
            let elements: u32 = shape.iter().product();
            raw.records
                .push(record(name, 1, shape, [0, 0x3C].repeat(elements as usize)));
        });
        let (_dir, path) = on_disk(&raw.build());
        let container = CmfContainer::open(&path).unwrap();
        let report = container.verify(&mut |_, _| ());
        // Verification finds it although the skill is not active.
        let wrong = SkillView::new(&container, container.skills(), Some("a"))
            .err()
            .map(|err| (name, err.kind));
        let found = report
            .failures
            .first()
            .map(|found| (found.subject.as_str(), found.error.kind));
        assert_eq!((found, report.failures.len()), (wrong, usize::from(wrong.is_some())));
        SkillView::new(&container, container.skills(), skill).map(|view| view.infos().len())
    };
    assert_eq!(view("skill.a.f16", &[64], Some("a")), Ok(13));
    assert_eq!(
        view("skill.a.f16", &[64], None),
        Ok(13),
        "hidden while it is not active"
    );
    assert_eq!(
        view("skill.b.f16", &[64], None),
        Ok(14),
        "of no registered skill: a tensor like any other"
    );
    assert_eq!(view("skill.a.f16", &[32], Some("a")).unwrap_err().kind, Kind::Parse);
    assert_eq!(
        view("skill.a.other", &[64], Some("a")).unwrap_err().kind,
        Kind::MissingTensor
    );
    assert_eq!(view("skill.a.other", &[64], None), Ok(13));
    assert_eq!(view("skill.a.skill.a.other", &[64], None), Ok(13));
}

#[test]
fn the_mask_of_a_skill_must_exist() {
    let dir = tempfile::tempdir().unwrap();
    let (base, other) = (interop("qwen2-q8_row-densemasks.cmf"), interop("qwen2-q4tp.cmf"));
    let [model, file, full] = ["model", "file", "full"].map(|name| dir.path().join(name));
    std::fs::write(&model, std::fs::read(&base).unwrap()).unwrap();
    let new = |task: &str| New {
        id: "s".into(),
        input_mask_task: Some(task.into()),
        ..New::default()
    };
    let err = skill::add(&model, &other, &new("wide"), &mut go_on).unwrap_err();
    assert!(
        err.kind == Kind::Usage && err.message.contains("general, narrow"),
        "{err}"
    );
    assert_eq!(std::fs::read(&model).unwrap(), std::fs::read(&base).unwrap());
    skill::add(&model, &other, &new("narrow"), &mut go_on).unwrap();
    let task = |path: &Path| sound(path).skills()[0].input_mask_task.clone();
    assert_eq!(task(&model).as_deref(), Some("narrow"));
    // A skill file may use masks of its base.
    skill::export(&model, "s", &base, &file, &mut go_on).unwrap();
    assert!(sound(&file).masks().is_none());
    assert_eq!(sound(&file).skills()[0].task.as_deref(), Some("narrow"));
    skill::apply(&base, &file, &full, false, &mut go_on).unwrap();
    assert_eq!(task(&full).as_deref(), Some("narrow"));
    let out = dir.path().join("out");
    let err = skill::apply(&other, &file, &out, true, &mut go_on).unwrap_err();
    assert!(err.kind == Kind::Parse && err.message.contains("'narrow'"), "{err}");
    assert!(!out.exists());
}

/// The time must not grow with the square of the number of skills.
#[test]
fn a_thousand_skills_open_quickly() {
    let ids: Vec<Value> = (0..1000).map(|i| json!({"id": format!("s{i}")})).collect();
    let raw = with_skills(Value::Array(ids)).with(|raw| {
        for i in 0..1000 {
            raw.records
                .push(record(&format!("skill.s{i}.f16"), 1, &[64], [i as u8, 0x3C].repeat(64)));
        }
    });
    let (_dir, path) = on_disk(&raw.build());
    let container = CmfContainer::open(&path).unwrap();
    assert_eq!(container.skills().len(), 1000);
    for id in ["s0", "s7", "s999"] {
        let view = SkillView::new(&container, container.skills(), Some(id)).unwrap();
        assert_eq!((view.infos().len(), view.replaced().len()), (13, 1));
        let number: usize = id[1..].parse().unwrap();
        assert_eq!(view.stored(view.find("f16").unwrap()).unwrap().bytes[0], number as u8);
    }
}

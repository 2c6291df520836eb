//! Skills: export, apply, add, remove.

use super::super::golden;
use super::{copy, entries, go_on, interop, sound};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::source::Tensors;
use cmf_gpu::tools::diff::diff;
use cmf_gpu::tools::shard::{compact, shard};
use cmf_gpu::tools::skill::{self, New};
use cmf_gpu::{Kind, Result, convert};
use std::ops::ControlFlow;
use std::path::Path;

#[test]
fn exporting_and_applying_a_skill_are_inverse() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let (base, file) = (interop("qwen2-q4tp.cmf"), interop("qwen2-q4tp-gfx-skillfile.cmf"));
    skill::apply(&base, &file, &path("applied"), false, &mut go_on).unwrap();
    let applied = sound(&path("applied"));
    let (plain, delta) = (CmfContainer::open(&base).unwrap(), CmfContainer::open(&file).unwrap());
    assert!(!applied.is_skill_file());
    assert_eq!(applied.skills()[0].id, "gfx");
    assert_eq!(applied.infos().len(), plain.infos().len());
    for (id, info) in applied.infos().iter().enumerate() {
        let wanted = match delta.find(&info.name) {
            Some(other) => delta.bytes(other),
            None => plain.bytes(plain.find(&info.name).unwrap()),
        };
        assert_eq!(applied.bytes(id).unwrap(), wanted.unwrap(), "{}", info.name);
    }
    skill::export(&path("applied"), "gfx", &base, &path("cut"), &mut go_on).unwrap();
    let cut = sound(&path("cut"));
    assert!(cut.is_skill_file() && diff(&cut, &delta).unwrap().tensors.is_empty());
    assert_eq!(cut.skills()[0].base_dir_hash, Some(plain.directory_hash().unwrap()));
    assert_eq!(
        (cut.skills()[0].base_arch.as_deref(), cut.skills()[0].layers.as_slice()),
        (Some("qwen2"), &[1, 2][..])
    );
    skill::apply(&base, &path("cut"), &path("again"), false, &mut go_on).unwrap();
    assert!(diff(&sound(&path("again")), &applied).unwrap().tensors.is_empty());

    // Another base, no skill file, an existing skill, nothing to export, a skill file instead of a model.
    let kind = |result: Result<cmf_gpu::tools::Written>| result.unwrap_err().kind;
    let out = path("out");
    let err = skill::apply(&path("applied"), &file, &out, false, &mut go_on).unwrap_err();
    assert!(
        err.kind == Kind::SkillFile && err.message.contains("24d7001bfbff1f00"),
        "{err}"
    );
    assert_eq!(
        kind(skill::apply(&path("applied"), &file, &out, true, &mut go_on)),
        Kind::Usage
    );
    assert_eq!(
        kind(skill::apply(&base, &base, &out, false, &mut go_on)),
        Kind::SkillFile
    );
    assert_eq!(
        kind(skill::apply(&file, &file, &out, true, &mut go_on)),
        Kind::SkillFile
    );
    assert_eq!(
        kind(skill::apply(
            &interop("qwen3_mtp-q8-appended.cmf"),
            &file,
            &out,
            true,
            &mut go_on
        )),
        Kind::UnsupportedModel
    );
    assert_eq!(kind(skill::export(&base, "x", &base, &out, &mut go_on)), Kind::Usage);
    assert_eq!(kind(skill::export(&base, "a/b", &base, &out, &mut go_on)), Kind::Usage);
    assert_eq!(
        kind(skill::export(&file, "gfx", &base, &out, &mut go_on)),
        Kind::SkillFile
    );
    let other = interop("qwen3_mtp-q8-appended.cmf");
    assert_eq!(
        kind(skill::export(&other, "tail", &base, &out, &mut go_on)),
        Kind::UnsupportedModel
    );
    // With `force` it is applied to another base of the same shapes, with a note.
    let masked = interop("qwen2-q8_row-densemasks.cmf");
    let written = skill::apply(&masked, &file, &out, true, &mut go_on).unwrap();
    assert_eq!(written.notes.len(), 1);
    let forced = sound(&out);
    assert_eq!(
        forced.masks_section(),
        CmfContainer::open(&masked).unwrap().masks_section()
    );
    assert_eq!(forced.index(), CmfContainer::open(&masked).unwrap().index());
}

#[test]
fn skills_are_added_and_removed_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let model = copy(&dir, "qwen2-q4tp.cmf");
    let specialist = dir.path().join("specialist.cmf");
    skill::apply(
        &model,
        &interop("qwen2-q4tp-gfx-skillfile.cmf"),
        &specialist,
        false,
        &mut go_on,
    )
    .unwrap();
    let before = std::fs::read(&model).unwrap();
    let new = |id: &str, quant: Option<Dtype>| New {
        id: id.into(),
        name: Some("a name".into()),
        quant,
        ..New::default()
    };
    let written = skill::add(&model, &specialist, &new("gfx", None), &mut go_on).unwrap();
    let after = std::fs::read(&model).unwrap();
    assert_eq!(written.tensors, 2, "only what differs");
    assert_eq!(after[128..before.len()], before[128..], "earlier bytes never move");
    assert_eq!(after.len() as u64, before.len() as u64 + written.bytes);
    let grown = sound(&model);
    let view = cmf_gpu::source::SkillView::new(&grown, grown.skills(), Some("gfx")).unwrap();
    let wanted = CmfContainer::open(&specialist).unwrap();
    for (id, info) in view.infos().iter().enumerate() {
        assert_eq!(
            view.stored(id).unwrap().bytes,
            wanted.bytes(wanted.find(&info.name).unwrap()).unwrap()
        );
    }
    assert_eq!(grown.skills()[0].layers, [1, 2]);
    // Exporting the added skill makes a skill file with the same tensors.
    let cut = dir.path().join("cut.cmf");
    skill::export(&model, "gfx", &interop("qwen2-q4tp.cmf"), &cut, &mut go_on).unwrap();
    let skill_file = CmfContainer::open(&interop("qwen2-q4tp-gfx-skillfile.cmf")).unwrap();
    assert!(diff(&sound(&cut), &skill_file).unwrap().tensors.is_empty());

    // A second skill, with another type.
    let second = skill::add(&model, &specialist, &new("two", Some(Dtype::Q8Row)), &mut go_on).unwrap();
    assert_eq!(second.tensors, 2);
    let both = std::fs::read(&model).unwrap();
    assert_eq!(both[128..after.len()], after[128..]);
    let grown = sound(&model);
    let id = grown.find("skill.two.model.layers.1.mlp.down_proj.weight").unwrap();
    assert_eq!((grown.infos()[id].dtype, grown.infos().len()), (Dtype::Q8Row, 42));

    let kind = |result: Result<cmf_gpu::tools::Written>| result.unwrap_err().kind;
    for id in ["gfx", "a.b", "none", "", "../x"] {
        assert_eq!(
            kind(skill::add(&model, &specialist, &new(id, None), &mut go_on)),
            Kind::Usage,
            "{id}"
        );
    }
    assert_eq!(
        kind(skill::add(
            &model,
            &interop("qwen2-q4tp.cmf"),
            &new("x", None),
            &mut go_on
        )),
        Kind::Usage
    );
    assert_eq!(
        kind(skill::add(
            &model,
            &interop("qwen3_mtp-q8-appended.cmf"),
            &new("x", None),
            &mut go_on
        )),
        Kind::UnsupportedModel
    );
    assert_eq!(
        kind(skill::add(
            &model,
            &interop("qwen2-q4tp-gfx-skillfile.cmf"),
            &new("x", None),
            &mut go_on
        )),
        Kind::SkillFile
    );
    let cancelled = skill::add(&model, &specialist, &new("x", None), &mut |_, _| ControlFlow::Break(()));
    assert_eq!(kind(cancelled), Kind::Interrupted);
    assert_eq!(kind(skill::remove(&model, "three")), Kind::Usage);
    assert!(std::fs::read(&model).unwrap() == both, "what fails changes nothing");

    skill::remove(&model, "gfx").unwrap();
    let left = sound(&model);
    assert_eq!(
        (left.infos().len(), left.skills().len(), left.skills()[0].id.as_str()),
        (40, 1, "two")
    );
    assert!(std::fs::read(&model).unwrap()[128..both.len()] == both[128..]);
    skill::remove(&model, "two").unwrap();
    let (back, base) = (dir.path().join("back.cmf"), dir.path().join("base.cmf"));
    compact(&model, &back, &mut go_on).unwrap();
    compact(&interop("qwen2-q4tp.cmf"), &base, &mut go_on).unwrap();
    let (back, base) = (sound(&back), sound(&base));
    assert_eq!(
        back.directory_hash(),
        base.directory_hash(),
        "a compact file is the old model again"
    );
    assert_eq!(entries(dir.path()), 5);
}

#[test]
fn a_skill_can_come_from_other_formats() {
    let dir = tempfile::tempdir().unwrap();
    let (model, source) = (dir.path().join("model.cmf"), golden::dir("qwen2"));
    let options = convert::Options::new(Dtype::Q4tp);
    let converted = |source: &Path, out: &Path| {
        convert::convert(source, out, &options, &mut |_| ControlFlow::Continue(())).unwrap();
    };
    converted(&source, &model);
    let new = |id: &str, quant: Option<Dtype>| New {
        id: id.into(),
        quant,
        ..New::default()
    };
    let err = skill::add(&model, &source, &new("s", None), &mut go_on).unwrap_err();
    assert!(err.message.contains("differs from the model in no tensor"), "{err}");
    assert_eq!(entries(dir.path()), 1, "what was made for it is gone");

    // The same model with the sign of the last weight changed.
    let tuned = dir.path().join("tuned");
    std::fs::create_dir(&tuned).unwrap();
    for entry in std::fs::read_dir(&source).unwrap() {
        let from = entry.unwrap().path();
        let mut bytes = std::fs::read(&from).unwrap();
        if from.ends_with("model.safetensors") {
            *bytes.last_mut().unwrap() ^= 0x80;
        }
        std::fs::write(tuned.join(from.file_name().unwrap()), bytes).unwrap();
    }
    let added = skill::add(&model, &tuned, &new("s", None), &mut go_on).unwrap();
    let in_f16 = skill::add(&model, &tuned, &new("t", Some(Dtype::F16)), &mut go_on).unwrap();
    assert_eq!((added.tensors, in_f16.tensors), (1, 1));
    let wanted = dir.path().join("expected.cmf");
    converted(&tuned, &wanted);
    let (grown, wanted) = (sound(&model), sound(&wanted));
    let view = cmf_gpu::source::SkillView::new(&grown, grown.skills(), Some("s")).unwrap();
    for (id, info) in view.infos().iter().enumerate() {
        let other = wanted.find(&info.name).unwrap();
        assert_eq!(info.dtype, wanted.infos()[other].dtype);
        assert_eq!(
            view.stored(id).unwrap().bytes,
            wanted.bytes(other).unwrap(),
            "{}",
            info.name
        );
    }
    assert_eq!(grown.infos().last().unwrap().dtype, Dtype::F16);
}

#[test]
fn only_the_first_shard_grows() {
    let dir = tempfile::tempdir().unwrap();
    let (paths, _) = shard(&interop("qwen2-q4tp.cmf"), 100_000, dir.path(), &mut go_on).unwrap();
    let second = std::fs::read(&paths[1]).unwrap();
    let specialist = dir.path().join("specialist.cmf");
    skill::apply(
        &interop("qwen2-q4tp.cmf"),
        &interop("qwen2-q4tp-gfx-skillfile.cmf"),
        &specialist,
        false,
        &mut go_on,
    )
    .unwrap();
    let new = New {
        id: "gfx".into(),
        ..New::default()
    };
    skill::add(&paths[1], &specialist, &new, &mut go_on).unwrap();
    assert_eq!(std::fs::read(&paths[1]).unwrap(), second);
    assert_eq!(sound(&paths[0]).infos().len(), 40);
    // A skill in several files can be removed only after compacting.
    let spread = tempfile::tempdir().unwrap();
    let (parts, _) = shard(&paths[0], 60_000, spread.path(), &mut go_on).unwrap();
    let err = skill::remove(&parts[0], "gfx").unwrap_err();
    assert!(err.kind == Kind::Usage && err.message.contains("compact"), "{err}");
    skill::remove(&paths[0], "gfx").unwrap();
    assert_eq!(sound(&paths[1]).infos().len(), 38);
}

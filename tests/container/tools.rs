//! Tools that write files: what comes out is the same model, or exactly what was asked to change.

use super::{fixture, on_disk, raw};
use cmf_gpu::container::{Container, Sections, TensorSpec, Tensors, Writer, hash64};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::tools::compact::compact;
use cmf_gpu::tools::defrag::defrag;
use cmf_gpu::tools::diff::diff;
use cmf_gpu::tools::moe::{self, Narrowing, RoutingStats};
use cmf_gpu::tools::shard::{convert_to_shards, shard};
use cmf_gpu::tools::skill::{self, New};
use cmf_gpu::{Kind, Result, convert};
use serde_json::json;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn interop(name: &str) -> PathBuf {
    fixture("interop").join(name)
}

fn go_on(_: u64, _: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// An open file without a fault.
fn sound(path: &Path) -> Container {
    let container = Container::open(path).unwrap();
    let report = container.verify(&mut |_, _| ());
    assert!(report.ok() && report.notes.is_empty(), "{report:?}");
    container
}

fn same(a: &Path, b: &Path) {
    let found = diff(&sound(a), &Container::open(b).unwrap()).unwrap();
    assert!(found.is_empty(), "{found:?}");
}

fn entries(dir: &Path) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

/// A writable copy of a fixture.
fn copy(dir: &TempDir, name: &str) -> PathBuf {
    let to = dir.path().join(name);
    std::fs::write(&to, std::fs::read(interop(name)).unwrap()).unwrap();
    to
}

#[test]
fn a_compact_file_is_the_same_model() {
    let dir = tempfile::tempdir().unwrap();
    let (once, twice) = (dir.path().join("once.cmf"), dir.path().join("twice.cmf"));
    for name in [
        "qwen3_mtp-q8-appended.cmf",
        "qwen2-q8_row-densemasks.cmf",
        "qwen2-q4tp-gfx-skillfile.cmf",
        "llama_tied-q8_row-sharded-00002-of-00003.cmf",
    ] {
        let written = compact(&interop(name), &once, &mut go_on).unwrap();
        assert_eq!(written.bytes, std::fs::metadata(&once).unwrap().len());
        same(&once, &interop(name));
        compact(&once, &twice, &mut go_on).unwrap();
        assert_eq!(
            std::fs::read(&once).unwrap(),
            std::fs::read(&twice).unwrap(),
            "{name}: canonical"
        );
    }
    assert!(std::fs::metadata(&once).unwrap().len() > 500_000, "all three shards");
    let appended = copy(&dir, "qwen3_mtp-q8-appended.cmf");
    compact(&appended, &once, &mut go_on).unwrap();
    let sizes = [&appended, &once].map(|path| std::fs::metadata(path).unwrap().len());
    assert!(sizes[1] < sizes[0], "{sizes:?}: dead bytes are gone");
    let err = compact(&appended, &appended, &mut go_on).unwrap_err();
    assert_eq!(err.kind, Kind::Usage, "{err}");
}

#[test]
fn damage_gets_no_new_checksum() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out.cmf");
    let break_at = |name: &str, at: fn(&Container) -> usize| {
        let path = copy(&dir, name);
        let at = at(&Container::open(&path).unwrap());
        let mut file = std::fs::read(&path).unwrap();
        file[at] ^= 1;
        std::fs::write(&path, file).unwrap();
        path
    };
    // The last byte of the blob's first tensor; a letter in the tokenizer.
    let tensor = break_at("qwen2-q4tp.cmf", |c| 0x2000 + c.infos()[0].nbytes as usize - 1);
    let vocab = break_at("qwen2-q8_row-densemasks.cmf", |_| 280_552 + 40);
    for path in [tensor, vocab] {
        assert_eq!(compact(&path, &out, &mut go_on).unwrap_err().kind, Kind::HashMismatch);
        assert_eq!(
            shard(&path, 100_000, dir.path(), &mut go_on).unwrap_err().kind,
            Kind::HashMismatch
        );
    }
    assert_eq!(entries(dir.path()), 2, "nothing was left behind");
    let err = compact(&interop("qwen2-q4tp.cmf"), &out, &mut |_, _| ControlFlow::Break(())).unwrap_err();
    assert!(err.kind == Kind::Usage && err.message == "cancelled" && entries(dir.path()) == 2);
}

#[test]
fn shards_are_the_same_model_and_small_enough() {
    let dir = tempfile::tempdir().unwrap();
    for (name, most, least_files) in [
        ("qwen2-q8_row-densemasks.cmf", 90_000, 4),
        ("qwen3_mtp-q8-appended.cmf", 120_000, 4),
        ("llama_tied-q8_row-sharded-00003-of-00003.cmf", 200_000, 4),
        ("qwen2-q4tp.cmf", 10_000_000, 1),
    ] {
        let target = TempDir::new_in(dir.path()).unwrap();
        let (paths, written) = shard(&interop(name), most, target.path(), &mut go_on).unwrap();
        assert!(paths.len() >= least_files, "{name}: {}", paths.len());
        assert_eq!(entries(target.path()), paths.len());
        let sizes: Vec<u64> = paths
            .iter()
            .map(|path| std::fs::metadata(path).unwrap().len())
            .collect();
        assert_eq!(sizes.iter().sum::<u64>(), written.bytes);
        for (path, size) in paths.iter().zip(sizes) {
            same(path, &interop(name));
            let own = Container::open(path).unwrap();
            let no = paths.iter().position(|other| other == path).unwrap();
            let tensors = own.infos().iter().filter(|info| info.shard == no).count();
            assert!(size <= most || tensors == 1, "{}: {size} bytes", path.display());
        }
        let joined = target.path().join("joined.cmf");
        compact(&paths[paths.len() - 1], &joined, &mut go_on).unwrap();
        let direct = target.path().join("direct.cmf");
        compact(&interop(name), &direct, &mut go_on).unwrap();
        assert_eq!(std::fs::read(joined).unwrap(), std::fs::read(direct).unwrap(), "{name}");
    }
    // Named by the caller; the first file has what belongs to the whole.
    let (paths, _) = shard(
        &interop("qwen2-q4tp.cmf"),
        100_000,
        &dir.path().join("x.y.cmf"),
        &mut go_on,
    )
    .unwrap();
    let names: Vec<&str> = paths
        .iter()
        .map(|path| path.file_name().unwrap().to_str().unwrap())
        .collect();
    assert_eq!(names, ["x.y-00001-of-00002.cmf", "x.y-00002-of-00002.cmf"]);
    let again = shard(&paths[1], 100_000, &dir.path().join("x.y"), &mut go_on).unwrap_err();
    assert!(
        again.kind == Kind::Usage && again.message.contains("replace an input"),
        "{again}"
    );
    assert_eq!(
        shard(&paths[0], 0, dir.path(), &mut go_on).unwrap_err().kind,
        Kind::Usage
    );
}

#[test]
fn a_conversion_to_shards_is_the_conversion() {
    let dir = tempfile::tempdir().unwrap();
    let options = convert::Options::new(Dtype::Q8Row);
    let whole = dir.path().join("whole.cmf");
    let source = super::golden::dir("qwen3");
    let going_on = |_: convert::Event| ControlFlow::Continue(());
    let one = convert::convert(&source, &whole, &options, &mut { going_on }).unwrap();
    let base = dir.path().join("parts");
    let (many, paths) = convert_to_shards(&source, &base, 300_000, &options, &mut { going_on }, &mut go_on).unwrap();
    assert!(paths.len() > 2 && many.tensors == one.tensors);
    same(&paths[1], &whole);
    assert_eq!(entries(dir.path()), 1 + paths.len());
}

#[test]
fn differences_are_named() {
    let (a, b) = (interop("qwen2-q4tp.cmf"), interop("qwen2-q8_row-densemasks.cmf"));
    let found = diff(&Container::open(&a).unwrap(), &Container::open(&b).unwrap()).unwrap();
    let names = |part: &[cmf_gpu::tools::diff::Difference]| part.iter().map(|d| d.name.clone()).collect::<Vec<_>>();
    // Null and absent are one, and so are 1000000 and 1e6; this is said in one of the files only.
    assert_eq!(names(&found.arch), ["attention_sink"]);
    assert_eq!(names(&found.masks), ["general", "narrow"]);
    assert_eq!(names(&found.sections), ["index"]);
    let embed = found
        .tensors
        .iter()
        .find(|d| d.name == "model.embed_tokens.weight")
        .unwrap();
    assert_eq!(embed.a.as_ref().unwrap()["dtype"], "q4tp");
    assert_eq!(embed.b.as_ref().unwrap()["dtype"], "q8_row");
    let skill = Container::open(&interop("qwen2-q4tp-gfx-skillfile.cmf")).unwrap();
    let found = diff(&Container::open(&a).unwrap(), &skill).unwrap();
    assert_eq!(
        (found.tensors.len(), names(&found.skills)),
        (38, vec!["gfx".to_owned()])
    );
    assert_eq!(found.tensors.iter().filter(|d| d.b.is_none()).count(), 36, "removed");
}

#[test]
fn a_skill_file_makes_the_specialist_and_is_made_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let (base, file) = (interop("qwen2-q4tp.cmf"), interop("qwen2-q4tp-gfx-skillfile.cmf"));
    skill::apply(&base, &file, &path("applied"), false, &mut go_on).unwrap();
    let applied = sound(&path("applied"));
    let (plain, delta) = (Container::open(&base).unwrap(), Container::open(&file).unwrap());
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

    // Another base, what is no skill, a skill that is there, nothing to export, a skill file in a model's place.
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
    // Forced onto another base of the same shapes it is applied, and says so.
    let masked = interop("qwen2-q8_row-densemasks.cmf");
    let written = skill::apply(&masked, &file, &out, true, &mut go_on).unwrap();
    assert_eq!(written.notes.len(), 1);
    let forced = sound(&out);
    assert_eq!(
        forced.masks_section(),
        Container::open(&masked).unwrap().masks_section()
    );
    assert_eq!(forced.index(), Container::open(&masked).unwrap().index());
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
    };
    let written = skill::add(&model, &specialist, &new("gfx", None), &mut go_on).unwrap();
    let after = std::fs::read(&model).unwrap();
    assert_eq!(written.tensors, 2, "only what differs");
    assert_eq!(after[128..before.len()], before[128..], "earlier bytes never move");
    assert_eq!(after.len() as u64, before.len() as u64 + written.bytes);
    let grown = sound(&model);
    let view = cmf_gpu::container::SkillView::new(&grown, Some("gfx")).unwrap();
    let wanted = Container::open(&specialist).unwrap();
    for (id, info) in view.infos().iter().enumerate() {
        assert_eq!(
            view.bytes(id).unwrap(),
            wanted.bytes(wanted.find(&info.name).unwrap()).unwrap()
        );
    }
    assert_eq!(grown.skills()[0].layers, [1, 2]);
    // An exported skill of a grown model is that of the specialist.
    let cut = dir.path().join("cut.cmf");
    skill::export(&model, "gfx", &interop("qwen2-q4tp.cmf"), &cut, &mut go_on).unwrap();
    let skill_file = Container::open(&interop("qwen2-q4tp-gfx-skillfile.cmf")).unwrap();
    assert!(diff(&sound(&cut), &skill_file).unwrap().tensors.is_empty());

    // A second one, in a type of its own.
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
    assert_eq!(kind(cancelled), Kind::Usage);
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
fn a_skill_can_come_from_other_peoples_files() {
    let dir = tempfile::tempdir().unwrap();
    let (model, source) = (dir.path().join("model.cmf"), super::golden::dir("qwen2"));
    let options = convert::Options::new(Dtype::Q4tp);
    let converted = |source: &Path, out: &Path| {
        convert::convert(source, out, &options, &mut |_| ControlFlow::Continue(())).unwrap();
    };
    converted(&source, &model);
    let new = |id: &str, quant: Option<Dtype>| New {
        id: id.into(),
        name: None,
        quant,
    };
    let err = skill::add(&model, &source, &new("s", None), &mut go_on).unwrap_err();
    assert!(err.message.contains("differs from the model in no tensor"), "{err}");
    assert_eq!(entries(dir.path()), 1, "what was made for it is gone");

    // The same model with another sign of the last weight in its file.
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
    let wanted = dir.path().join("wanted.cmf");
    converted(&tuned, &wanted);
    let (grown, wanted) = (sound(&model), sound(&wanted));
    let view = cmf_gpu::container::SkillView::new(&grown, Some("s")).unwrap();
    for (id, info) in view.infos().iter().enumerate() {
        let other = wanted.find(&info.name).unwrap();
        assert_eq!(info.dtype, wanted.infos()[other].dtype);
        assert_eq!(view.bytes(id).unwrap(), wanted.bytes(other).unwrap(), "{}", info.name);
    }
    assert_eq!(grown.infos().last().unwrap().dtype, Dtype::F16);
}

#[test]
fn a_shard_grows_and_its_siblings_stay() {
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
        name: None,
        quant: None,
    };
    skill::add(&paths[1], &specialist, &new, &mut go_on).unwrap();
    assert_eq!(std::fs::read(&paths[1]).unwrap(), second);
    assert_eq!(sound(&paths[0]).infos().len(), 40);
    // Spread over files it can only go with a rewrite.
    let spread = tempfile::tempdir().unwrap();
    let (parts, _) = shard(&paths[0], 60_000, spread.path(), &mut go_on).unwrap();
    let err = skill::remove(&parts[0], "gfx").unwrap_err();
    assert!(err.kind == Kind::Usage && err.message.contains("compact"), "{err}");
    skill::remove(&paths[0], "gfx").unwrap();
    assert_eq!(sound(&paths[1]).infos().len(), 38);
}

/// Two layers with four experts each and a router in f16, every tensor of other bytes.
fn experts(path: &Path) {
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
    header["arch"]["num_layers"] = json!(4);
    header["arch"]["layer_types"] = json!(vec!["FullAttention"; 4]);
    let header = header.as_object().unwrap().clone();
    let mut writer = Writer::create(path, header, specs.clone(), Sections::default()).unwrap();
    for (i, spec) in specs.iter().enumerate() {
        let values = 0..spec.shape.iter().product::<u64>();
        // Small finite halves, each tensor's and each element's own.
        let payload: Vec<u8> = values.flat_map(|v| [v as u8, i as u8 & 0x3F]).collect();
        writer.write(&payload).unwrap();
    }
    writer.finish().unwrap();
}

/// Counts that another implementation recorded, and what it kept of them for a share of 0.7.
const STATS: &str = r#"{"layers": {"1": [1, 9, 10, 13, 5, 10, 28, 10], "3": [2, 23, 4, 17, 6, 15, 11, 8]}}"#;
const KEPT: [(usize, [usize; 4]); 2] = [(1, [2, 3, 5, 6]), (3, [1, 3, 5, 6])];

fn narrowing(cover: f64) -> Narrowing {
    Narrowing {
        stats: RoutingStats::parse(STATS.as_bytes()).unwrap(),
        cover,
    }
}

#[test]
fn experts_are_masked_by_what_was_recorded() {
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
        diff(&Container::open(&model).unwrap(), &masked)
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
    assert_eq!(kind(&out, &narrowing(0.5), "narrow"), Kind::Usage);
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
    ] {
        assert_eq!(
            RoutingStats::parse(text.as_bytes()).unwrap_err().kind,
            Kind::Parse,
            "{text}"
        );
    }
}

#[test]
fn experts_that_are_not_used_are_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (dir.path().join("model.cmf"), dir.path().join("out.cmf"));
    experts(&model);
    moe::defrag(&model, &narrowing(0.7), &out, &mut go_on).unwrap();
    let (from, to) = (sound(&model), sound(&out));
    let bytes = |container: &Container, name: &str| {
        let id = container.find(name).unwrap_or_else(|| panic!("{name}"));
        container.bytes(id).unwrap().to_vec()
    };
    for (layer, kept) in KEPT {
        for (new, old) in kept.into_iter().enumerate() {
            for part in ["gate_proj", "up_proj", "down_proj"] {
                let name = |expert: usize| format!("model.layers.{layer}.mlp.experts.{expert}.{part}.weight");
                assert_eq!(bytes(&to, &name(new)), bytes(&from, &name(old)));
            }
        }
        assert!(
            to.find(&format!("model.layers.{layer}.mlp.experts.4.gate_proj.weight"))
                .is_none()
        );
        for (name, row) in [("gate.weight", 8), ("expert_bias", 2)] {
            let name = format!("model.layers.{layer}.mlp.{name}");
            let rows = bytes(&from, &name);
            let wanted: Vec<u8> = kept
                .iter()
                .flat_map(|&expert| rows[expert * row..][..row].to_vec())
                .collect();
            assert_eq!(bytes(&to, &name), wanted);
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

#[test]
fn rows_of_every_type_are_picked_as_they_are() {
    // A router in each type that keeps rows apart: what is picked decodes to the rows that were meant.
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (dir.path().join("model.cmf"), dir.path().join("out.cmf"));
    let keep = [0usize, 1, 3];
    let source = raw::sample();
    for (name, works) in [
        ("f32", true),
        ("bf16", true),
        ("q8_row", true),
        ("q8_2f", true),
        ("q4_tiled", true),
        ("q1", true),
        ("q4tp", true),
        ("q4_block", true),
        ("vbit", false),
        ("vbit_ro", false),
        ("q1s", false),
        ("q1t", false),
    ] {
        let dtype = Dtype::from_id(source.records.iter().find(|r| r.name == name.as_bytes()).unwrap().dtype).unwrap();
        let (rows, cols) = (4, 64);
        let encoded = || {
            cmf_gpu::dtype::encode::encode(dtype, rows, cols, &|first, out| {
                (first * cols..)
                    .zip(out)
                    .for_each(|(i, value)| *value = ((i * 37) % 101) as f32 - 50.0);
                Ok(())
            })
            .unwrap()
        };
        let payload = match name {
            // Tiles of a scale of 1.0 and bits that are different in each.
            "q1" => (0..8u8)
                .flat_map(|tile| [0x00, 0x3C, tile, 0x5A, 0xFF - tile, 7 * tile])
                .collect(),
            _ if works => encoded(),
            // Any sound payload will do: it is refused.
            _ => source
                .records
                .iter()
                .find(|r| r.name == name.as_bytes())
                .unwrap()
                .payload
                .clone(),
        };
        let shape = if works { vec![4, 64] } else { vec![2, 32] };
        let mut header = raw::header();
        header["arch"]["moe"] =
            json!({"num_experts": 8, "top_k": 1, "moe_intermediate_size": 2, "norm_topk_prob": true});
        let spec = TensorSpec {
            name: "model.layers.1.mlp.gate.weight".into(),
            dtype,
            shape,
        };
        let mut writer = Writer::create(
            &model,
            header.as_object().unwrap().clone(),
            vec![spec],
            Sections::default(),
        )
        .unwrap();
        writer.write(&payload).unwrap();
        writer.finish().unwrap();
        let counts: &[f64] = if works { &[5.0, 5.0, 0.0, 5.0] } else { &[5.0, 0.0] };
        let stats = RoutingStats::parse(json!({"layers": {"1": counts}}).to_string().as_bytes()).unwrap();
        let result = moe::defrag(&model, &Narrowing { stats, cover: 0.99 }, &out, &mut go_on);
        if !works {
            assert_eq!(result.unwrap_err().kind, Kind::UnsupportedTensorType, "{name}");
            continue;
        }
        result.unwrap();
        let decoded = |path: &Path, rows: usize| {
            let container = sound(path);
            let decoder = dtype.decoder(container.bytes(0).unwrap(), rows, cols).unwrap();
            let row = |row: usize| {
                let mut weights = vec![0f32; cols];
                decoder.row(row, &mut weights);
                weights
            };
            (0..rows).map(row).collect::<Vec<_>>()
        };
        let (from, to) = (decoded(&model, 4), decoded(&out, 3));
        assert_eq!(to, keep.map(|row| from[row].clone()), "{name}");
    }
}

#[test]
fn neurons_that_are_off_are_dropped() {
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
    defrag(&model, "narrow", true, &out, &mut go_on).unwrap();
    let (from, to) = (sound(&model), sound(&out));
    let mask = from.masks().unwrap().find("narrow").unwrap();
    assert!(to.masks().is_none() && to.index().is_none());
    assert_eq!(to.header().arch.intermediate_size, 88);
    assert_eq!(to.header().provenance["defrag"]["kept_per_layer"], json!([88, 80, 82]));
    let weights = |container: &Container, name: &str| {
        let id = container.find(name).unwrap();
        let info = &container.infos()[id];
        let (rows, cols) = info.rows_cols();
        let decoder = info.dtype.decoder(container.bytes(id).unwrap(), rows, cols).unwrap();
        (0..rows)
            .map(|row| {
                let mut weights = vec![0f32; cols];
                decoder.row(row, &mut weights);
                weights
            })
            .collect::<Vec<_>>()
    };
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
    // In a type of groups a width that is no multiple of 32 is written as q8_2f.
    let q4 = dir.path().join("q4.cmf");
    let options = convert::Options::new(Dtype::Q4tp);
    convert::convert(&model, &q4, &options, &mut |_| ControlFlow::Continue(())).unwrap();
    defrag(&q4, "narrow", true, &out, &mut go_on).unwrap();
    let narrowed = sound(&out);
    let dtype = |name: &str| narrowed.infos()[narrowed.find(name).unwrap()].dtype;
    assert_eq!(dtype("model.layers.0.mlp.down_proj.weight"), Dtype::Q82f);
    assert_eq!(dtype("model.layers.0.mlp.gate_proj.weight"), Dtype::Q4tp);
}

#[test]
fn a_file_that_only_says_that_it_is_a_skill_is_not_rewritten() {
    let (dir, path) = on_disk(&raw::sample().with(|raw| raw.features |= 1 << 6).build());
    let err = compact(&path, &dir.path().join("out.cmf"), &mut go_on).unwrap_err();
    assert_eq!(err.kind, Kind::SkillFile);
    // Every type survives a rewrite.
    let (dir, path) = on_disk(&raw::sample().build());
    let out = dir.path().join("out.cmf");
    compact(&path, &out, &mut go_on).unwrap();
    let (a, b) = (Container::open(&path).unwrap(), Container::open(&out).unwrap());
    for (id, info) in a.infos().iter().enumerate() {
        assert_eq!(
            (hash64(b.bytes(id).unwrap()), b.infos()[id].hash),
            (info.hash, info.hash)
        );
    }
}

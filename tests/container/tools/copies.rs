//! `compact` and `diff`: copies are complete, damage is detected, differences are listed.

use super::super::{on_disk, raw};
use super::{copy, entries, go_on, interop, same};
use cmf_gpu::Kind;
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::format::hash64;
use cmf_gpu::tools::diff::diff;
use cmf_gpu::tools::shard::{compact, shard};
use std::ops::ControlFlow;

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
    let break_at = |name: &str, at: fn(&CmfContainer) -> usize| {
        let path = copy(&dir, name);
        let at = at(&CmfContainer::open(&path).unwrap());
        let mut file = std::fs::read(&path).unwrap();
        file[at] ^= 1;
        std::fs::write(&path, file).unwrap();
        path
    };
    // The last byte of the first tensor, and a letter of the tokenizer.
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
    assert!(err.kind == Kind::Interrupted && err.message == "cancelled" && entries(dir.path()) == 2);
}

#[test]
fn differences_are_listed() {
    let (a, b) = (interop("qwen2-q4tp.cmf"), interop("qwen2-q8_row-densemasks.cmf"));
    let found = diff(&CmfContainer::open(&a).unwrap(), &CmfContainer::open(&b).unwrap()).unwrap();
    let names = |part: &[cmf_gpu::tools::diff::Difference]| part.iter().map(|d| d.name.clone()).collect::<Vec<_>>();
    // Null equals absent, and 1000000 equals 1e6. Only one of the files has these members.
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
    let skill = CmfContainer::open(&interop("qwen2-q4tp-gfx-skillfile.cmf")).unwrap();
    let found = diff(&CmfContainer::open(&a).unwrap(), &skill).unwrap();
    assert_eq!(
        (found.tensors.len(), names(&found.skills)),
        (38, vec!["gfx".to_owned()])
    );
    assert_eq!(found.tensors.iter().filter(|d| d.b.is_none()).count(), 36, "removed");
}

#[test]
fn a_skill_file_without_a_base_is_refused() {
    let (dir, path) = on_disk(&raw::sample().with(|raw| raw.features |= 1 << 6).build());
    let err = compact(&path, &dir.path().join("out.cmf"), &mut go_on).unwrap_err();
    assert_eq!(err.kind, Kind::SkillFile);
    // Every type is copied unchanged.
    let (dir, path) = on_disk(&raw::sample().build());
    let out = dir.path().join("out.cmf");
    compact(&path, &out, &mut go_on).unwrap();
    let (a, b) = (CmfContainer::open(&path).unwrap(), CmfContainer::open(&out).unwrap());
    for (id, payload) in a.payloads().iter().enumerate() {
        let hash = payload.hash;
        assert_eq!((hash64(b.bytes(id).unwrap()), b.payloads()[id].hash), (hash, hash));
    }
}

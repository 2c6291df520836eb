//! Models in several files.

use super::raw::{Raw, record, sample};
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::{Kind, Result};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn name(no: u32, count: u32) -> String {
    format!("m..x-{no:05}-of-{count:05}.cmf")
}

/// Shard `no` of 3, with a tensor named after it.
fn shard(no: u32) -> Raw {
    sample()
        .with(|raw| {
            raw.records = vec![record(
                &format!("t{no}"),
                1,
                &[no, 4],
                [0, 0x3C].repeat(no as usize * 4),
            )];
            if no > 1 {
                (raw.features, raw.masks, raw.vocab, raw.index) = (1, Vec::new(), Vec::new(), Vec::new());
            }
        })
        .with_header(|h| {
            h["shard"] = json!({"no": no, "count": 3});
            if no > 1 {
                h["tokenizer_config"] = Value::Null;
            }
        })
}

/// Three shards, changed by `change` before they are written.
fn on_disk(change: impl FnOnce(&mut Vec<Raw>)) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut shards = vec![shard(1), shard(2), shard(3)];
    change(&mut shards);
    for (i, raw) in shards.iter().enumerate() {
        std::fs::write(dir.path().join(name(i as u32 + 1, 3)), raw.build()).unwrap();
    }
    dir
}

fn open(dir: &TempDir, no: u32) -> Result<CmfContainer> {
    CmfContainer::open(&dir.path().join(name(no, 3)))
}

fn file_name(path: &Path) -> &str {
    path.file_name().unwrap().to_str().unwrap()
}

#[test]
fn any_shard_opens_the_model() {
    let dir = on_disk(|_| ());
    for no in 1..=3 {
        let model = open(&dir, no).unwrap();
        let names: Vec<&str> = model.infos().iter().map(|info| info.name.as_str()).collect();
        assert_eq!(names, ["t1", "t2", "t3"]);
        let shards: Vec<usize> = model.payloads().iter().map(|payload| payload.shard).collect();
        assert_eq!(shards, [0, 1, 2]);
        assert_eq!(model.bytes(model.find("t3").unwrap()).unwrap().len(), 24);
        assert_eq!(
            model.header().tokenizer_config.eos_token_ids,
            [1, 2],
            "those of shard 1"
        );
        assert!(model.tokenizer_json().is_some());
        let paths: Vec<&str> = model.shard_paths().iter().map(|path| file_name(path)).collect();
        assert_eq!(paths, [name(1, 3), name(2, 3), name(3, 3)]);
        let size = |path: &PathBuf| std::fs::metadata(path).unwrap().len();
        assert_eq!(model.file_bytes(), model.shard_paths().iter().map(size).sum::<u64>());
        assert!(model.verify(&mut |_, _| ()).ok());
    }
}

#[test]
fn damage_in_any_shard_is_reported_with_the_file() {
    let dir = on_disk(|shards| shards[2].records[0].hash = Some(1));
    let report = open(&dir, 1).unwrap().verify(&mut |_, _| ());
    let [failure] = report.failures.as_slice() else {
        panic!("{:?}", report.failures)
    };
    assert!(failure.error.message.contains(&name(3, 3)), "{}", failure.error);
}

#[test]
fn shards_that_do_not_match_are_refused() {
    type Change = fn(&mut Vec<Raw>);
    let set = |shard: Value| move |h: &mut Value| h["shard"] = shard;
    let cases: [(&str, Change, Kind, u32, &str); 12] = [
        (
            "missing",
            |s| drop(s.pop()),
            Kind::ShardMismatch,
            3,
            "shard 3 of 3 is missing",
        ),
        (
            "other count",
            |s| s[1] = s[1].clone().with_header(|h| h["shard"]["count"] = json!(4)),
            Kind::ShardMismatch,
            2,
            "the header says shard 2 of 4",
        ),
        (
            "no shard",
            |s| s[1] = s[1].clone().with_header(|h| h["shard"] = Value::Null),
            Kind::ShardMismatch,
            2,
            "the header says no shard",
        ),
        (
            "same shard twice",
            |s| s[2] = s[1].clone(),
            Kind::ShardMismatch,
            3,
            "the header says shard 2 of 3",
        ),
        (
            "other arch",
            |s| s[2] = s[2].clone().with_header(|h| h["arch"]["head_dim"] = json!(32)),
            Kind::ShardMismatch,
            3,
            "arch differs",
        ),
        (
            "other origin",
            |s| s[1] = s[1].clone().with_header(|h| h["provenance"] = json!(1)),
            Kind::ShardMismatch,
            2,
            "provenance differs",
        ),
        (
            "other types",
            |s| s[1] = s[1].clone().with_header(|h| h["quant_type"] = json!("Q4TP")),
            Kind::ShardMismatch,
            2,
            "quant_type differs",
        ),
        (
            "other set",
            |s| {
                for (i, raw) in s.iter_mut().enumerate() {
                    let set = format!("{:016x}", i / 2);
                    *raw = raw.clone().with_header(|h| h["shard"]["set"] = json!(set));
                }
            },
            Kind::ShardMismatch,
            3,
            "shard.set differs",
        ),
        (
            "sets of other types",
            |s| {
                s[0] = s[0].clone().with_header(|h| h["shard"]["set"] = json!("1"));
                s[1] = s[1]
                    .clone()
                    .with_header(|h| h["shard"]["set"] = json!({"deep": [[[]]]}));
            },
            Kind::ShardMismatch,
            2,
            "shard.set differs",
        ),
        (
            "tensor twice",
            |s| s[2].records[0].name = b"t1".into(),
            Kind::ShardMismatch,
            3,
            "tensor 't1' is also in",
        ),
        (
            "sections",
            |s| s[1].vocab = b"{}".into(),
            Kind::ShardMismatch,
            2,
            "a tokenizer section, which only shard 1 may",
        ),
        ("broken", |s| s[1].records[0].ndim = 7, Kind::Parse, 2, "7 dimensions"),
    ];
    for (what, change, kind, no, says) in cases {
        let err = open(&on_disk(change), 1).map(|_| ()).expect_err(what);
        assert_eq!(err.kind, kind, "{what}: {err}");
        assert!(
            err.message.contains(says) && err.message.contains(&name(no, 3)),
            "{what}: {err}"
        );
    }
    let headers = [
        json!({"no": 1, "count": 0}),
        json!({"no": 0, "count": 3}),
        json!({"no": 4, "count": 3}),
        json!({"no": 1, "count": 1_000_000_000}),
    ];
    for header in headers {
        let dir = on_disk(|s| s[0] = s[0].clone().with_header(set(header.clone())));
        let err = open(&dir, 1).map(|_| ()).unwrap_err();
        assert_eq!(err.kind, Kind::ShardMismatch, "{header}: {err}");
    }
}

/// Writers may omit the set that a file belongs to.
#[test]
fn sets_are_compared_if_both_files_have_one() {
    for (sets, opens) in [
        ([Some("a"), Some("a"), Some("a")], true),
        ([Some("a"), None, Some("a")], true),
        ([None, Some("a"), None], true),
        ([Some("a"), None, Some("b")], false),
    ] {
        let dir = on_disk(|shards| {
            for (raw, set) in shards.iter_mut().zip(sets) {
                *raw = raw.clone().with_header(|h| h["shard"]["set"] = json!(set));
            }
        });
        assert_eq!(open(&dir, 2).is_ok(), opens, "{sets:?}");
    }
}

/// A first shard without tensors can have the sections of the whole model.
#[test]
fn the_first_shard_may_have_no_tensors() {
    let dir = on_disk(|shards| shards[0].records.clear());
    let model = open(&dir, 3).unwrap();
    assert_eq!(model.infos().len(), 2);
    assert!(model.tokenizer_json().is_some() && model.verify(&mut |_, _| ()).ok());
}

/// Siblings are searched beside the given path, not beside the target of a link.
#[test]
fn siblings_are_beside_the_given_path() {
    let dir = on_disk(|_| ());
    let other = tempfile::tempdir().unwrap();
    for base in ["..", "-00001-of-00003", "a/../b", "..\\up"] {
        let to = |no: u32| {
            other
                .path()
                .join(format!("{}-{no:05}-of-00003.cmf", base.replace('/', "_")))
        };
        for no in 1..=3 {
            std::fs::copy(dir.path().join(name(no, 3)), to(no)).unwrap();
        }
        let model = CmfContainer::open(&to(2)).unwrap();
        assert_eq!(model.shard_paths(), [to(1), to(2), to(3)]);
        std::fs::remove_file(to(1)).unwrap();
        let err = CmfContainer::open(&to(2)).map(|_| ()).unwrap_err();
        assert!(err.message.contains("shard 1 of 3 is missing"), "{err}");
    }
    #[cfg(unix)]
    {
        // A single link to a shard in another directory has no siblings beside it.
        let link = other.path().join(name(1, 3));
        std::os::unix::fs::symlink(dir.path().join(name(1, 3)), &link).unwrap();
        let err = CmfContainer::open(&link).map(|_| ()).unwrap_err();
        assert!(err.message.contains("shard 2 of 3 is missing"), "{err}");
        // Only regular files are opened: reading a device would never end.
        for no in [2, 3] {
            std::os::unix::fs::symlink("/dev/zero", other.path().join(name(no, 3))).unwrap();
        }
        let err = CmfContainer::open(&link).map(|_| ()).unwrap_err();
        assert!(err.kind == Kind::Io && err.message.contains(&name(2, 3)), "{err}");
        let around = other.path().join(name(2, 3));
        std::fs::remove_file(&around).unwrap();
        std::os::unix::fs::symlink(&around, &around).unwrap();
        assert_eq!(CmfContainer::open(&link).map(|_| ()).unwrap_err().kind, Kind::Io);
    }
}

#[test]
fn names_must_agree_with_headers() {
    let dir = on_disk(|_| ());
    let path = dir.path().join(name(2, 3));
    for (to, says) in [
        ("other.cmf".into(), "must be named BASE-00002-of-00003.cmf"),
        (name(2, 4), "the name says shard 2 of 4"),
        (name(3, 3), "the name says shard 3 of 3"),
    ] {
        let to = dir.path().join(to);
        std::fs::copy(&path, &to).unwrap();
        let err = CmfContainer::open(&to).map(|_| ()).unwrap_err();
        assert_eq!(err.kind, Kind::ShardMismatch);
        assert!(err.message.contains(says), "{err}");
    }
}

#[test]
fn a_sibling_that_is_not_a_regular_file_is_refused() {
    let dir = on_disk(|shards| drop(shards.pop()));
    std::fs::create_dir(dir.path().join(name(3, 3))).unwrap();
    let err = open(&dir, 1).map(|_| ()).unwrap_err();
    assert_eq!(err.kind, Kind::Io, "{err}");
    assert!(err.message.contains(&name(3, 3)), "{err}");
}

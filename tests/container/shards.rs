//! Models in several files.

use super::raw::{Raw, record, sample};
use cmf_gpu::container::{Container, Tensors};
use cmf_gpu::{Kind, Result};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn name(no: u32, count: u32) -> String {
    format!("m..x-{no:05}-of-{count:05}.cmf")
}

/// Shard `no` of 3, with one tensor named after it.
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

fn open(dir: &TempDir, no: u32) -> Result<Container> {
    Container::open(&dir.path().join(name(no, 3)))
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
        let shards: Vec<usize> = model.infos().iter().map(|info| info.shard).collect();
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
fn damage_in_any_shard_is_found_and_the_file_named() {
    let dir = on_disk(|shards| shards[2].records[0].hash = Some(1));
    let report = open(&dir, 1).unwrap().verify(&mut |_, _| ());
    let [failure] = report.failures.as_slice() else {
        panic!("{:?}", report.failures)
    };
    assert!(failure.error.message.contains(&name(3, 3)), "{}", failure.error);
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    type Change = fn(&mut Vec<Raw>);
    let set = |shard: Value| move |h: &mut Value| h["shard"] = shard;
    let cases: [(&str, Change, Kind, u32, &str); 9] = [
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
        let err = Container::open(&to).map(|_| ()).unwrap_err();
        assert_eq!(err.kind, Kind::ShardMismatch);
        assert!(err.message.contains(says), "{err}");
    }
}

#[test]
fn a_sibling_that_is_no_regular_file_is_refused() {
    let dir = on_disk(|shards| drop(shards.pop()));
    std::fs::create_dir(dir.path().join(name(3, 3))).unwrap();
    let err = open(&dir, 1).map(|_| ()).unwrap_err();
    assert_eq!(err.kind, Kind::Io, "{err}");
    assert!(err.message.contains(&name(3, 3)), "{err}");
}

//! Reading and verifying valid and nearly valid files.

use super::raw::{NO_MASKS, Raw, header, record, sample};
use super::{fixture, on_disk, refusal};
use cmf_gpu::Kind;
use cmf_gpu::dtype::Dtype;
use cmf_gpu::format::cmf::{CmfContainer, VerifyReport};
use cmf_gpu::format::hash64;
use cmf_gpu::source::{LayerType, MemoryTensors, NormStyle, Tensors};
use serde_json::{Value, json};
use std::fs::OpenOptions;

fn verified(file: &[u8]) -> VerifyReport {
    let (_dir, path) = on_disk(file);
    CmfContainer::open(&path).expect("opens").verify(&mut |_, _| ())
}

#[test]
fn golden_checksums() {
    let bytes = std::fs::read(fixture("hash64/hash64.bin")).unwrap();
    let golden: Value = serde_json::from_slice(&std::fs::read(fixture("hash64/hash64.json")).unwrap()).unwrap();
    let vectors = golden["vectors"].as_array().unwrap();
    assert_eq!(vectors.len(), 14);
    for vector in vectors {
        let field = |name: &str| vector["data"][name].as_u64().unwrap() as usize;
        let data = &bytes[field("off")..][..field("len")];
        assert_eq!(
            format!("{:016x}", hash64(data)),
            vector["hash64"].as_str().unwrap(),
            "{}",
            vector["name"]
        );
    }
}

#[test]
fn the_sample_is_read_completely() {
    let raw = sample();
    let file = raw.build();
    let (_dir, path) = on_disk(&file);
    let container = CmfContainer::open(&path).unwrap();
    assert_eq!(container.infos().len(), raw.records.len());
    for (id, record) in raw.records.iter().enumerate() {
        let name = std::str::from_utf8(&record.name).unwrap();
        assert_eq!(container.find(name), Some(id));
        let info = &container.infos()[id];
        assert_eq!((info.name.as_str(), info.dtype.name()), (name, name));
        assert_eq!(container.payloads()[id].shard, 0);
        assert_eq!(container.bytes(id).unwrap(), record.payload);
        container.release(id);
        assert_eq!(container.bytes(id).unwrap(), record.payload, "after release");
    }
    assert_eq!(container.find("f33"), None);
    assert_eq!(container.bytes(raw.records.len()).unwrap_err().kind, Kind::Internal);
    assert_eq!(container.tokenizer_json(), Some(raw.vocab.as_slice()));
    assert_eq!(container.masks_section(), Some(raw.masks.as_slice()));
    assert_eq!(container.index_section(), Some(raw.index.as_slice()));
    assert_eq!(container.file_bytes(), file.len() as u64);
    assert_eq!(container.shard_paths(), [path]);
    assert!(!container.is_skill_file() && !container.has_loop_masks());
    assert_eq!(Value::from(container.header_json().clone()), header());
    assert_eq!(container.header().provenance["tool"], "by hand");
    assert_eq!(container.header().tokenizer_config.eos_token_ids, [1, 2]);
    let arch = &container.header().arch;
    assert_eq!(
        arch.layer_types,
        [LayerType::FullAttention, LayerType::SlidingAttention]
    );
    assert_eq!(
        (arch.norm_style, arch.rope_theta, arch.num_loops),
        (Some(NormStyle::Qwen), 10_000.0, 1)
    );
    assert!(arch.moe.is_none());
    let shape = |name: &str| container.infos()[container.find(name).unwrap()].rows_cols();
    assert_eq!(
        [shape("f16"), shape("bf16"), shape("q8_row")],
        [(1, 64), (6, 4), (4, 33)]
    );
}

#[test]
fn unusual_but_valid_files_are_opened() {
    let data_off = sample().head_and_blob().0.len();
    let file = sample().build();
    let patched = |patches: &[(usize, u64)]| {
        let mut file = file.clone();
        for (at, v) in patches {
            file[*at..at + 8].copy_from_slice(&v.to_le_bytes());
        }
        file
    };
    let changed = |change: fn(&mut Raw)| sample().with(change).build();
    let mut flags = file.clone();
    flags[8] = 0xFF;
    let cases = [
        ("trailing bytes", [file.as_slice(), &[1; 1000]].concat()),
        ("reserved flags", flags),
        ("offset 0 is absent, whatever the length", patched(&[(0x60, 0)])),
        (
            "vocab inside of the blob",
            patched(&[(0x50, data_off as u64), (0x58, 13)]),
        ),
        ("no stored hashes", patched(&[(0x70, 0), (0x78, 0)])),
        (
            "hash of an absent section",
            sample()
                .with(|raw| raw.vocab.clear())
                .with_header(|h| h["section_hashes"] = json!({"vocab": "1"}))
                .build(),
        ),
        (
            "null members",
            sample()
                .with_header(|h| (h["quant_type"], h["shard"]) = (Value::Null, Value::Null))
                .build(),
        ),
        ("no skills", sample().with_header(|h| h["skills"] = json!([])).build()),
        (
            "unknown members",
            sample()
                .with_header(|h| (h["x"], h["arch"]["x"]) = (json!({}), json!(1.5)))
                .build(),
        ),
        (
            "vbit_ro without bit 2",
            changed(|raw| {
                raw.features &= !4;
                raw.records.retain(|r| r.dtype != 8 && r.dtype != 9);
            }),
        ),
        ("no tensors", changed(|raw| raw.records.clear())),
        (
            "two names for one payload",
            changed(|raw| {
                let mut alias = record("alias", 0, &[15], raw.records[0].payload.clone());
                alias.off = Some(0);
                raw.records.push(alias);
            }),
        ),
        (
            "loop masks",
            sample()
                .with(|raw| raw.features |= 32)
                .with_header(|h| h["arch"]["num_loops"] = json!(2))
                .build(),
        ),
    ];
    for (what, file) in cases {
        let report = verified(&file);
        assert!(report.ok(), "{what}: {:?}", report.failures);
    }
    assert_eq!(
        verified(&patched(&[(0x70, 0)]))
            .notes
            .iter()
            .filter(|note| note.contains("no header hash"))
            .count(),
        1
    );
}

#[test]
fn skill_files_are_recognised_by_bit_and_by_record() {
    let bound = json!([{"id": "a", "base_dir_hash": "0123456789abcdef"}]);
    let by_bit = sample().with(|raw| raw.features |= 1 << 6).build();
    let by_record = sample().with_header(|h| h["skills"] = bound).build();
    for file in [by_bit, by_record] {
        let (_dir, path) = on_disk(&file);
        assert!(CmfContainer::open(&path).unwrap().is_skill_file());
    }
}

#[test]
fn verify_lists_all_failures() {
    let raw = sample().with_header(|h| {
        h["section_hashes"] = json!({"masks": format!("{:016x}", hash64(NO_MASKS)), "index": "00", "vocab": null});
    });
    let (head, blob) = raw.head_and_blob();
    let mut file = raw.build();
    for record in &raw.records {
        // The last payload byte belongs to no table.
        let at = blob
            .windows(record.payload.len())
            .position(|bytes| bytes == record.payload)
            .unwrap();
        file[head.len() + at + record.payload.len() - 1] ^= 1;
    }
    // Changes a letter of the masks' JSON, which stays valid.
    file[head.len() + blob.len() + 10] ^= 1;
    let report = verified(&file);
    let found: Vec<(&str, Kind)> = report
        .failures
        .iter()
        .map(|f| (f.subject.as_str(), f.error.kind))
        .collect();
    let mut wanted = vec![("masks", Kind::HashMismatch), ("index", Kind::HashMismatch)];
    wanted.extend(
        raw.records
            .iter()
            .map(|r| (std::str::from_utf8(&r.name).unwrap(), Kind::HashMismatch)),
    );
    assert_eq!(found, wanted);
    assert!(
        report.notes.iter().any(|note| note.ends_with("no vocab hash")),
        "{:?}",
        report.notes
    );
    assert_eq!((report.tensors, report.bytes), (raw.records.len(), file.len() as u64));
}

#[test]
fn verify_checks_payloads_with_a_valid_checksum() {
    const NAN: [u8; 2] = [0x00, 0x7E];
    const INF: [u8; 2] = [0x00, 0x7C];
    type Change = fn(&mut Vec<u8>);
    let cases: [(&str, Change, Kind, &str); 13] = [
        ("q1s", |p| p[16] = 64, Kind::Parse, "index below 64, found 64"),
        ("q1t", |p| p[30] = 32, Kind::Parse, "column below 32, found 32"),
        ("q1t", |p| p[2] = 243, Kind::Parse, "243"),
        (
            "f32",
            |p| p[8..12].copy_from_slice(&f32::NAN.to_le_bytes()),
            Kind::NonFinite,
            "row 0, column 2: the weight is NaN",
        ),
        (
            "f16",
            |p| p[126..].copy_from_slice(&INF),
            Kind::NonFinite,
            "column 63: the weight is inf",
        ),
        (
            "q8_row",
            |p| p[134..136].copy_from_slice(&NAN),
            Kind::NonFinite,
            "row 1, column 0",
        ),
        (
            "q8_2f",
            |p| p[70..72].copy_from_slice(&INF),
            Kind::NonFinite,
            "row 0, column 0",
        ),
        (
            "q4_block",
            |p| p[34..36].copy_from_slice(&INF),
            Kind::NonFinite,
            "row 4, column 4",
        ),
        (
            "q4_tiled",
            |p| p[18..20].copy_from_slice(&NAN),
            Kind::NonFinite,
            "row 0, column 32",
        ),
        (
            "q1",
            |p| p[12..14].copy_from_slice(&NAN),
            Kind::NonFinite,
            "row 1, column 0",
        ),
        (
            "vbit_ro",
            |p| p[4..6].copy_from_slice(&NAN),
            Kind::NonFinite,
            "row 1, column 0",
        ),
        (
            "q4tp",
            |p| p[64..66].copy_from_slice(&NAN),
            Kind::NonFinite,
            "row 0: scales 2^(NaN",
        ),
        // lo 0, step 16: 2^496 overflows f32, although no code of the sample is that high.
        (
            "q4tp",
            |p| p[64..68].copy_from_slice(&[0, 0, 0x00, 0x4C]),
            Kind::NonFinite,
            "row 0: scales 2^(0",
        ),
    ];
    for (name, change, kind, says) in cases {
        let report = verified(&sample().with(|raw| change(&mut raw.record(name).payload)).build());
        let [failure] = report.failures.as_slice() else {
            panic!("{name}, {says}: {:?}", report.failures)
        };
        assert_eq!(
            (failure.subject.as_str(), failure.error.kind),
            (name, kind),
            "{}",
            failure.error
        );
        assert!(
            failure.error.message.contains(says),
            "{name}: expected ..{says}.., found {}",
            failure.error
        );
    }
}

#[test]
fn progress_ends_at_the_total() {
    let (_dir, path) = on_disk(&sample().build());
    let mut seen = Vec::new();
    CmfContainer::open(&path)
        .unwrap()
        .verify(&mut |done, total| seen.push((done, total)));
    let total: u64 = sample().records.iter().map(|record| record.payload.len() as u64).sum();
    assert_eq!(seen.len(), sample().records.len());
    assert!(seen.is_sorted() && seen.iter().all(|(_, t)| *t == total), "{seen:?}");
    assert_eq!(seen.last(), Some(&(total, total)));
}

#[test]
fn a_truncated_file_is_an_error_and_no_crash() {
    let file = sample().build();
    let (_dir, path) = on_disk(&file);
    let container = CmfContainer::open(&path).unwrap();
    OpenOptions::new()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(4096)
        .unwrap();
    let err = container.bytes(0).unwrap_err();
    assert_eq!(err.kind, Kind::Io);
    assert!(
        err.message
            .contains(&format!("truncated from {} to 4096 bytes", file.len())),
        "{err}"
    );
    let report = container.verify(&mut |_, _| ());
    assert_eq!(report.failures.len(), 1 + container.infos().len());
    assert!(report.failures.iter().all(|failure| failure.error.kind == Kind::Io));
}

#[test]
fn a_file_replaced_by_renaming_keeps_its_old_bytes() {
    let (dir, path) = on_disk(&sample().build());
    let container = CmfContainer::open(&path).unwrap();
    let other = dir.path().join("other");
    std::fs::write(&other, b"short").unwrap();
    std::fs::rename(&other, &path).unwrap();
    assert!(container.verify(&mut |_, _| ()).ok());
}

#[test]
fn only_regular_files_are_opened() {
    let dir = tempfile::tempdir().unwrap();
    let io = |path: &std::path::Path, says: &str| {
        let err = CmfContainer::open(path).map(|_| ()).unwrap_err();
        assert_eq!(err.kind, Kind::Io);
        assert!(err.message.contains(says), "{err}");
    };
    io(dir.path(), "found a directory");
    io(&dir.path().join("missing.cmf"), "missing.cmf");
    #[cfg(unix)]
    {
        io("/dev/null".as_ref(), "special file");
        let pipe = dir.path().join("pipe");
        assert!(
            std::process::Command::new("mkfifo")
                .arg(&pipe)
                .status()
                .unwrap()
                .success()
        );
        io(&pipe, "special file");
        let link = dir.path().join("link.cmf");
        let target = dir.path().join("target.cmf");
        std::fs::write(&target, sample().build()).unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        assert!(CmfContainer::open(&link).is_ok(), "a link to a regular file is one");
    }
}

#[test]
fn errors_name_the_file() {
    let err = refusal(&sample().with(|raw| raw.record("q1").ndim = 7).build()).unwrap();
    assert!(
        err.message.contains("model.cmf: record 9, tensor 'q1': 7 dimensions"),
        "{err}"
    );
}

#[test]
fn tensors_in_memory_are_checked_like_those_of_a_file() {
    let tensor = |name: &str, len: usize| (name.to_owned(), Dtype::F16, vec![2, 4], vec![1; len]);
    let set = MemoryTensors::new([tensor("a", 16), tensor("b", 16)]).unwrap();
    assert_eq!((set.find("b"), set.find("c")), (Some(1), None));
    assert_eq!(
        (set.stored(1).unwrap().bytes.len(), set.infos()[1].rows_cols()),
        (16, (2, 4))
    );
    assert_eq!(set.infos()[0].nbytes, 16);
    assert_eq!(set.stored(2).err().unwrap().kind, Kind::Internal);
    for bad in [[tensor("a", 16), tensor("a", 16)], [tensor("a", 16), tensor("b", 15)]] {
        assert_eq!(MemoryTensors::new(bad).map(|_| ()).unwrap_err().kind, Kind::Parse);
    }
}

//! Containers as sources: the result is the same model, and damaged payloads do not get a new checksum.

use crate::build::{converted, fixture, run, values};
use cmf_gpu::Kind;
use cmf_gpu::dtype::Dtype;
use cmf_gpu::format::cmf::CmfContainer;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn interop(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/interop")
        .join(name)
}

#[test]
fn a_container_is_a_source_too() {
    let (dir, _, f32) = converted(&fixture("qwen3"), Dtype::F32);
    let (_dir, _, direct) = converted(&fixture("qwen3"), Dtype::Q4Tiled);
    let (_again, _, indirect) = converted(&dir.path().join("out.cmf"), Dtype::Q4Tiled);
    assert_eq!(direct.infos(), indirect.infos());
    assert_eq!(f32.header_json()["arch"], indirect.header_json()["arch"]);
    assert_eq!(f32.tokenizer_json(), indirect.tokenizer_json());
    assert_eq!(f32.header().tokenizer_config, indirect.header().tokenizer_config);
    // Tensors that have the type already are copied.
    let (_dir, _, same) = converted(&_again.path().join("out.cmf"), Dtype::Q4Tiled);
    assert_eq!(same.infos(), indirect.infos());
}

#[test]
fn shards_masks_and_skills_are_carried_over() {
    let (_dir, _, whole) = converted(&interop("llama_tied-q8_row-sharded-00002-of-00003.cmf"), Dtype::Q8Row);
    let (_dir, _, direct) = converted(&fixture("llama_tied"), Dtype::Q8Row);
    assert_eq!(whole.infos().len(), direct.infos().len());
    assert_eq!(whole.shard_paths().len(), 1);
    assert!(whole.header().shard.is_none());

    let source = CmfContainer::open(&interop("qwen2-q8_row-densemasks.cmf")).unwrap();
    let (_dir, report, found) = converted(&interop("qwen2-q8_row-densemasks.cmf"), Dtype::F32);
    assert!(source.masks_section().is_some());
    assert_eq!(found.masks_section(), source.masks_section());
    assert_eq!(report.notes, ["the sparse index is left out"]);
    assert!(values(&found) == values(&source));

    let source = CmfContainer::open(&interop("qwen3_mtp-q8-appended.cmf")).unwrap();
    let (_dir, _, found) = converted(&interop("qwen3_mtp-q8-appended.cmf"), Dtype::F16);
    assert!(!source.header().skills.is_empty());
    assert_eq!(found.header().skills, source.header().skills);
}

#[test]
fn a_skill_is_no_source() {
    let dir = TempDir::new().unwrap();
    let err = run(
        &interop("qwen2-q4tp-gfx-skillfile.cmf"),
        &dir.path().join("o.cmf"),
        Dtype::F16,
    )
    .unwrap_err();
    assert_eq!(err.kind, Kind::SkillFile);
}

#[test]
fn damage_is_found() {
    let (dir, _, container) = converted(&fixture("qwen3"), Dtype::Q8Row);
    let path = dir.path().join("out.cmf");
    let bytes = std::fs::read(&path).unwrap();
    let tokenizer = container.tokenizer_json().unwrap().to_vec();
    let payload = container.bytes(1).unwrap().to_vec();
    for (part, name) in [(tokenizer, "vocab"), (payload, container.infos()[1].name.as_str())] {
        let at = bytes.windows(part.len()).position(|window| window == part).unwrap();
        let mut bytes = bytes.clone();
        bytes[at + part.len() / 2] ^= 1;
        let damaged = dir.path().join("damaged.cmf");
        std::fs::write(&damaged, bytes).unwrap();
        // Copied and encoded again.
        for quant in [Dtype::Q8Row, Dtype::F16] {
            let err = run(&damaged, &dir.path().join("o.cmf"), quant).unwrap_err();
            assert!(err.kind == Kind::HashMismatch && err.message.contains(name), "{err}");
        }
    }
}

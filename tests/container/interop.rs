//! Files of another writer: they open, verify and have the contents that their manifest lists.

use super::fixture;
use cmf_gpu::Kind;
use cmf_gpu::format::TensorInfo;
use cmf_gpu::format::cmf::{CmfContainer, Payload};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::path::Path;

fn tensor((info, payload): (&TensorInfo, &Payload)) -> Value {
    json!({
        "name": info.name, "dtype": info.dtype.name(), "shape": info.shape,
        "offset": payload.offset, "nbytes": info.nbytes, "hash": format!("{:016x}", payload.hash)
    })
}

/// Compares a manifest entry with its file.
fn check(dir: &Path, entry: &Value) {
    let name = entry["name"].as_str().unwrap();
    let path = dir.join(entry["file"].as_str().unwrap());
    match entry["expect"].as_str().unwrap() {
        "open_fails" => {
            assert!(CmfContainer::open(&path).is_err(), "{name} opens");
        }
        "verify_fails" => {
            let report = CmfContainer::open(&path).expect(name).verify(&mut |_, _| ());
            assert!(!report.ok(), "{name} verifies");
        }
        expect => {
            let container = CmfContainer::open(&path).expect(name);
            let report = container.verify(&mut |_, _| ());
            assert!(report.ok(), "{name}: {:?}", report.failures);
            assert_eq!(container.is_skill_file(), expect == "skillfile", "{name}");
            let mut wanted = entry["tensors"].as_array().unwrap().clone();
            for sibling in entry["siblings"].as_array().into_iter().flatten() {
                let tensors = &entry["sibling_tensors"][sibling.as_str().unwrap()];
                wanted.extend(tensors.as_array().unwrap().iter().cloned());
            }
            let found: Vec<Value> = container.infos().iter().zip(container.payloads()).map(tensor).collect();
            assert_eq!(found, wanted, "{name}");
            let sections = &entry["envelope"]["sections"];
            let len = |section: Option<&[u8]>| section.map_or(0, <[u8]>::len) as u64;
            assert_eq!(
                len(container.tokenizer_json()),
                sections["vocab"][1].as_u64().unwrap(),
                "{name}"
            );
            assert_eq!(
                len(container.masks_section()),
                sections["masks"][1].as_u64().unwrap(),
                "{name}"
            );
            assert_eq!(
                len(container.index_section()),
                sections["index"][1].as_u64().unwrap(),
                "{name}"
            );
        }
    }
}

fn manifest(dir: &Path) -> Vec<Value> {
    let manifest: Value = serde_json::from_slice(&std::fs::read(dir.join("manifest.json")).unwrap()).unwrap();
    manifest["files"].as_array().unwrap().clone()
}

#[test]
fn files_of_another_writer_match_their_manifest() {
    let dir = fixture("interop");
    let files = manifest(&dir);
    assert_eq!(files.len(), 7);
    files.iter().for_each(|entry| check(&dir, entry));
}

#[test]
fn tensors_decode_to_the_values_in_the_manifest() {
    let dir = fixture("interop");
    let recorded: Value = serde_json::from_slice(&std::fs::read(dir.join("values.json")).unwrap()).unwrap();
    let mut decoded = 0;
    for file in recorded["files"].as_array().unwrap() {
        let name = file["file"].as_str().unwrap();
        let container = CmfContainer::open(&dir.join(name)).expect(name);
        for tensor in file["tensors"].as_array().unwrap() {
            let what = tensor["name"].as_str().unwrap();
            let id = container.infos().iter().position(|info| info.name == what).expect(what);
            let info = &container.infos()[id];
            assert_eq!(info.dtype.name(), tensor["dtype"], "{name}: {what}");
            let (rows, cols) = info.rows_cols();
            let decoder = info
                .dtype
                .decoder(container.bytes(id).unwrap(), rows, cols)
                .expect(what);
            let mut hash = Sha256::new();
            let mut values = vec![0.0; cols];
            for row in 0..rows {
                decoder.row(row, &mut values);
                values.iter().for_each(|value: &f32| hash.update(value.to_le_bytes()));
            }
            let found: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(found, tensor["sha256"], "{name}: {what}");
            decoded += 1;
        }
    }
    assert_eq!(decoded, 20);
}

#[test]
fn each_flipped_bit_is_detected() {
    let file = std::fs::read(fixture("interop/qwen2-q4tp-gfx-skillfile.cmf")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("flipped.cmf");
    let at = |word: usize| u64::from_le_bytes(file[word..word + 8].try_into().unwrap()) as usize;
    // Samples of header, directory and payloads. Padding and the envelope have no checksum.
    let tensors = CmfContainer::open(&fixture("interop/qwen2-q4tp-gfx-skillfile.cmf")).unwrap();
    let payloads = tensors
        .infos()
        .iter()
        .zip(tensors.payloads())
        .flat_map(|(info, payload)| {
            let start = at(0x30) + payload.offset as usize;
            (start..start + info.nbytes as usize).step_by(97)
        });
    let places = (at(0x10)..at(0x10) + at(0x18))
        .step_by(7)
        .chain(at(0x20)..at(0x20) + at(0x28))
        .chain(payloads);
    let mut tried = 0;
    for place in places {
        let mut flipped = file.clone();
        flipped[place] ^= 1 << (place % 8);
        std::fs::write(&path, flipped).unwrap();
        let noticed = match CmfContainer::open(&path) {
            Err(err) => err.kind != Kind::Io,
            Ok(container) => !container.verify(&mut |_, _| ()).ok(),
        };
        assert!(noticed, "bit {} of byte {place:#x}", place % 8);
        tried += 1;
    }
    assert!(tried > 400, "{tried}");
}

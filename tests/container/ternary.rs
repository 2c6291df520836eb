//! Rotation keys of GGUF files, and what must be refused in them.

use crate::fixture;
use crate::ninfer::edited;
use cmf_gpu::format::gguf::Gguf;
use serde_json::Value;

fn read(name: &str) -> Vec<u8> {
    std::fs::read(fixture("ternary").join(name)).unwrap()
}

#[test]
fn the_rotation_of_a_gguf_file() {
    let bytes = read("hybrid-ptq1_0.gguf");
    let rotation = Gguf::parse(&bytes).unwrap().rotation(&bytes).unwrap().unwrap();
    assert_eq!(rotation.hadamard.block(), 128);
    assert_eq!(rotation.hadamard.widths().collect::<Vec<_>>(), [256, 384, 640]);
    assert!(!rotation.hadamard.is_identity());
    assert!(rotation.grouped_values);
    assert!(rotation.hadamard.forward.contains("blk.0.ssm_out.weight"));
    assert!(rotation.hadamard.inverse.contains("token_embd.weight"));
    let signs = rotation.hadamard.signs(640).unwrap();
    assert!(signs.len() == 640 && signs.iter().all(|sign| sign.abs() == 1.0));
}

/// The recorded edits of a GGUF file: all but the one that removes every key are refused.
#[test]
fn broken_rotations_are_refused() {
    let base = read("dense-pq2_0.gguf");
    let cases: Vec<Value> = serde_json::from_slice(&read("patches.json")).unwrap();
    let mut refused = 0;
    for case in cases.iter().filter(|case| case["base"] == "dense-pq2_0.gguf") {
        let bytes = edited(&base, &case["edits"], base.len());
        let found = Gguf::parse(&bytes).and_then(|gguf| gguf.rotation(&bytes));
        match case["expect"].as_str().unwrap() {
            "reject" => {
                let err = found.expect_err(case["name"].as_str().unwrap());
                let kind = match case["name"].as_str().unwrap().rsplit(':').next().unwrap() {
                    "sign_0" | "sign_2" | "width_sum" => "Parse",
                    "unknown_weight" => "MissingTensor",
                    _ => "UnsupportedFeature",
                };
                assert_eq!(err.kind.name(), kind, "{}: {err}", case["name"]);
                refused += 1;
            }
            _ => assert_eq!(found.unwrap(), None, "{}", case["name"]),
        }
    }
    assert_eq!(refused, 15);
}

//! Models in other formats than CMF: what commands say about them, and what they refuse.

use crate::build::{golden, ids, run};
use serde_json::json;

#[test]
fn a_directory_is_a_model() {
    let dir = crate::golden::dir("llama_tied");
    let dir = dir.to_str().unwrap();
    let info = run(&["info", dir, "--json", "--tensors"]).json();
    assert_eq!((&info["format"], &info["runs"]), (&json!("safetensors"), &json!(true)));
    let bytes = std::fs::metadata(format!("{dir}/model.safetensors")).unwrap().len();
    assert_eq!(info["bytes"], bytes);
    assert!(
        info["bytes_by_dtype"].as_object().unwrap().contains_key("bf16"),
        "{info}"
    );
    let first = &info["tensors"][0];
    assert!(first["offset"].is_u64() && first["hash"].is_null(), "{first}");

    let verified = run(&["verify", dir, "--json"]).json();
    assert_eq!(
        (&verified["ok"], &verified["format"]),
        (&json!(true), &json!("safetensors"))
    );
    assert!(verified["notes"][0].as_str().unwrap().contains("no checksums"));

    let (prompt, greedy) = golden(0);
    for more in [&[][..], &["--quant", "f32"]] {
        let tokens = ids(&prompt);
        let arguments = ["run", dir, "--prompt-tokens", &tokens, "--greedy", "-n", "4", "--json"];
        let answer = run(&[&arguments[..], more].concat()).json();
        assert_eq!(answer["tokens"], json!(greedy[..4]), "{more:?}");
    }
    let plan = run(&["bench", dir, "--plan", "--json"]).json();
    assert_eq!(plan["format"], "safetensors");
    let small = run(&["info", dir, "--json", "--quant", "q4tp"]).json();
    assert!(small["memory"]["weight_bytes"].as_u64() < info["memory"]["weight_bytes"].as_u64());
}

/// Files of other formats say whether their weights are rotated.
#[test]
fn info_shows_the_rotation_of_weights() {
    let fixtures = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/ternary");
    for (name, format) in [("dense-ptq1_0.ninfer", "ninfer"), ("dense-pq2_0.gguf", "gguf")] {
        let file = fixtures.join(name);
        let file = file.to_str().unwrap();
        let info = run(&["info", file, "--json"]).json();
        assert_eq!((&info["format"], &info["runs"]), (&json!(format), &json!(true)));
        assert_eq!(
            info["hadamard"],
            json!({"block": 128, "signs": "explicit", "forward": 15, "inverse": 1})
        );
        let shown = run(&["info", file]).stdout;
        assert!(shown.contains("hadamard: block 128, explicit signs"), "{shown}");
    }
    let file = fixtures.join("dense-ptq1_0.ninfer");
    let verified = run(&["verify", file.to_str().unwrap(), "--json"]).json();
    assert_eq!((&verified["ok"], &verified["format"]), (&json!(true), &json!("ninfer")));
    let plain = crate::golden::dir("llama_tied");
    let info = run(&["info", plain.to_str().unwrap(), "--json"]).json();
    assert!(info["hadamard"].is_null());
}

#[test]
fn what_only_cmf_files_have_is_refused_by_name() {
    let dir = crate::golden::dir("llama_tied");
    let dir = dir.to_str().unwrap();
    let key = "0".repeat(64);
    for arguments in [
        &["mask", "list", dir][..],
        &["skill", "list", dir],
        &["verify", dir, "--pubkey", &key],
        &["compact", dir, "-o", "never.cmf"],
        &["shard", dir, "--shard-max-gb", "1", "-o", "never"],
    ] {
        let message = run(arguments).fails(1, "UnsupportedFeature");
        assert!(message.contains("CMF file"), "{message}");
    }
    run(&["run", dir, "--task", "x", "-p", "a"]).fails(2, "Usage");
    run(&["run", dir, "--skill", "x", "-p", "a"]).fails(2, "Usage");
}

/// Without a type, `convert` keeps what it can. What is quantised again or loses its rotation is announced.
#[test]
fn convert_says_what_it_keeps() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (kept, plain, again) = (path("kept.cmf"), path("plain.cmf"), path("again.cmf"));
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/ternary/dense-pq2_0.gguf");

    let ran = run(&["convert", source, "-o", &kept, "--json"]);
    let report = ran.json();
    assert!(report["kept"]["tensors"].as_u64() > Some(10), "{report}");
    assert_eq!(
        (&report["quantised_again"]["tensors"], &report["unrotated"]["tensors"]),
        (&json!(0), &json!(0))
    );
    assert!(
        ran.stderr.contains("kept exactly: ") && !ran.stderr.contains("WARNING"),
        "{}",
        ran.stderr
    );
    let info = run(&["info", &kept, "--json"]).json();
    assert!(
        info["bytes_by_dtype"].as_object().unwrap().contains_key("q1t"),
        "{info}"
    );

    let ran = run(&["convert", source, "-o", &plain, "--quant", "q8", "--json"]);
    let report = ran.json();
    assert!(ran.stderr.contains("WARNING: un-rotated: lossy: "), "{}", ran.stderr);
    assert!(report["unrotated"]["relative_error"].as_f64() > Some(0.001), "{report}");
    assert_eq!(report["kept"]["tensors"], 0);

    let ran = run(&["convert", &plain, "-o", &again, "--quant", "q4tp", "--json"]);
    let report = ran.json();
    assert!(ran.stderr.contains("WARNING: quantised again: "), "{}", ran.stderr);
    assert!(
        report["quantised_again"]["relative_error"].as_f64() > Some(0.01),
        "{report}"
    );
    let tokens = ["--prompt-tokens", "1,2,3", "--greedy", "-n", "4", "-c", "64", "--json"];
    let answer = |model: &str| run(&[&["run", model], &tokens[..]].concat()).json()["tokens"].clone();
    assert_eq!(answer(source), answer(&kept));
}

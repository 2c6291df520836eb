//! Tools for model files: fields, exit codes, and unchanged inputs.

use crate::build::{fixture, has, run};
use serde_json::Value;
use tempfile::TempDir;

fn interop(name: &str) -> String {
    fixture("interop").join(name).to_str().unwrap().to_string()
}

fn inside(dir: &TempDir, name: &str) -> String {
    dir.path().join(name).to_str().unwrap().to_string()
}

#[test]
fn signing_and_verifying() {
    let dir = tempfile::tempdir().unwrap();
    let (model, key) = (inside(&dir, "model.cmf"), inside(&dir, "key"));
    std::fs::copy(interop("qwen2-q4tp.cmf"), &model).unwrap();
    std::fs::write(&key, "07".repeat(32)).unwrap();
    let unsigned = run(&["verify", &model, "--json"]).json();
    assert_eq!(unsigned["signature"], Value::Null);

    let signed = run(&["sign", &model, "--key", &key, "--json"]).json();
    let pubkey = signed["files"][0]["pubkey"].as_str().unwrap();
    has(&signed["files"][0], &["file", "signature", "pubkey", "sha256"]);
    let valid = run(&["verify", &model, "--json"]);
    assert!(valid.stderr.contains("a key that was not checked"), "{}", valid.stderr);
    let valid = valid.json();
    assert_eq!(
        (&valid["ok"], &valid["signature"]["pinned"]),
        (&true.into(), &false.into())
    );
    assert_eq!(valid["signature"]["pubkey"], pubkey);
    let pinned = run(&["verify", &model, "--pubkey", pubkey, "--json"]);
    assert_eq!(pinned.stderr, "");
    assert_eq!(pinned.json()["signature"]["pinned"], true);
    assert!(run(&["verify", &model, "--pubkey", pubkey]).stdout.contains(pubkey));

    for (pubkey, sig) in [(&"00".repeat(32), None), (&pubkey.to_owned(), Some("{}"))] {
        if let Some(text) = sig {
            std::fs::write(inside(&dir, "model.cmf.sig"), text).unwrap();
        }
        let ran = run(&["verify", &model, "--pubkey", pubkey, "--json"]);
        assert_eq!(ran.code, Some(1));
        assert!(ran.stderr.starts_with("error: SignatureInvalid: "), "{}", ran.stderr);
        let report: Value = serde_json::from_str(&ran.stdout).unwrap();
        assert_eq!(
            (&report["ok"], &report["signature"]["valid"]),
            (&false.into(), &false.into())
        );
        assert_eq!(report["failures"][0]["kind"], "SignatureInvalid");
    }
    // `run --verify` checks the signature too.
    let asked = ["run", &model, "--verify", "--prompt-tokens", "1,2", "-n", "1"];
    run(&asked).fails(1, "SignatureInvalid");
    let beside = inside(&dir, "model.cmf.sig");
    std::fs::copy(&key, &beside).unwrap();
    run(&["sign", &model, "--key", &beside]).fails(2, "Usage");
    assert_eq!(std::fs::read(&beside).unwrap(), std::fs::read(&key).unwrap());
    run(&["sign", &model, "--key", &model]).fails(1, "Bounds");
    run(&["sign", &model]).fails(2, "Usage");
}

#[test]
fn differences_and_their_exit_code() {
    let (a, b) = (interop("qwen2-q4tp.cmf"), interop("qwen2-q8_row-densemasks.cmf"));
    let same = run(&["diff", &a, &a]);
    assert_eq!((same.code, same.stdout.as_str()), (Some(0), "equal\n"));
    let other = run(&["diff", &a, &b, "--json"]);
    assert_eq!(other.code, Some(1));
    let object: Value = serde_json::from_str(&other.stdout).unwrap();
    has(
        &object,
        &["equal", "arch", "header", "tensors", "masks", "skills", "sections"],
    );
    assert_eq!(object["equal"], false);
    assert_eq!(
        (&object["masks"][0]["name"], &object["masks"][0]["a"]),
        (&"general".into(), &Value::Null)
    );
    let text = run(&["diff", &a, &b]).stdout;
    assert!(
        text.contains("\n+ masks general: {") && text.contains("~ tensors model.embed_tokens.weight: {"),
        "{text}"
    );
    run(&["diff", &a]).fails(2, "Usage");
    run(&["diff", &a, "/no/such/file", "--json"]).fails(1, "Io");
}

#[test]
fn masks_are_shown() {
    let model = interop("qwen2-q8_row-densemasks.cmf");
    let list = run(&["mask", "list", &model, "--json"]).json();
    assert_eq!(
        (&list["default_task"], &list["masks"][0]["default"]),
        (&"general".into(), &true.into())
    );
    has(
        &list["masks"][1],
        &[
            "task_id",
            "name",
            "description",
            "sparsity",
            "quality",
            "open",
            "experts",
        ],
    );
    assert_eq!(run(&["mask", "list", &model]).stdout.lines().count(), 2);
    let narrow = run(&["mask", "show", &model, "narrow", "--json"]).json();
    let layer = |layer: usize, field: &str| narrow["layers"][layer][field].clone();
    assert_eq!([0, 1, 2].map(|l| layer(l, "ffn")), [88, 80, 82].map(Value::from));
    assert_eq!(
        [0, 1, 2].map(|l| layer(l, "active")),
        [true, false, true].map(Value::from)
    );
    let text = run(&["mask", "show", &model, "narrow"]).stdout;
    assert!(text.contains("layer 1  off  neurons 80/160  heads 1/3"), "{text}");
    assert!(
        text.ends_with("\noff: 47.9 % of the neurons, 44.4 % of the heads, 1 of 3 layers\n"),
        "{text}"
    );
    assert_eq!(
        (&narrow["layers_off"], &narrow["experts_off"]),
        (&1.into(), &Value::Null)
    );
    let message = run(&["mask", "show", &model, "wide"]).fails(2, "Usage");
    assert!(message.contains("general, narrow"), "{message}");
    let info = run(&["info", &model, "--json"]).json();
    assert_eq!(info["masks"], list["masks"]);
    assert_eq!(info["index"]["entries"].as_array().unwrap().len(), 5);
    run(&["mask"]).fails(2, "Usage");
}

#[test]
fn skill_files() {
    let dir = tempfile::tempdir().unwrap();
    let (base, file) = (interop("qwen2-q4tp.cmf"), interop("qwen2-q4tp-gfx-skillfile.cmf"));
    let (model, out) = (inside(&dir, "model.cmf"), inside(&dir, "out.cmf"));
    std::fs::write(&model, std::fs::read(&base).unwrap()).unwrap();
    let applied = run(&["skill", "apply", &base, &file, "-o", &out, "--json"]).json();
    assert_eq!(
        (&applied["tensors"], &applied["out"]),
        (&38.into(), &out.as_str().into())
    );
    let message = run(&["skill", "apply", &out, &file, "-o", &inside(&dir, "no.cmf")]).fails(1, "SkillFile");
    assert!(message.contains("24d7001bfbff1f00"), "{message}");
    run(&["skill", "add", &model, &out, "--id", "a.b"]).fails(2, "Usage");
    let added = run(&["skill", "add", &model, &out, "--id", "gfx", "--name", "n", "--json"]).json();
    assert_eq!(added["tensors"], 2);
    let list = run(&["skill", "list", &model, "--json"]).json();
    has(
        &list["skills"][0],
        &[
            "id",
            "name",
            "layers",
            "tensors",
            "bytes",
            "selection",
            "quality",
            "base_dir_hash",
        ],
    );
    assert_eq!(
        (&list["skills"][0]["tensors"], &list["skills"][0]["name"]),
        (&2.into(), &"n".into())
    );
    let info = run(&["info", &model, "--json"]).json();
    assert_eq!(
        (&info["skills"], &info["unused"]),
        (&list["skills"], &serde_json::json!([]))
    );
    let cut = inside(&dir, "cut.cmf");
    run(&["skill", "export", &model, "gfx", "--base", &base, "-o", &cut, "--json"]).json();
    assert_eq!(run(&["skill", "list", &cut, "--json"]).json()["skill_file"], true);
    // A misspelt id does not select another skill.
    run(&["skill", "export", &model, "gxf", "--base", &base, "-o", &cut]).fails(2, "Usage");
    assert_eq!(
        run(&["skill", "list", &file, "--json"]).json()["skills"][0]["tensors"],
        2
    );
    run(&["skill", "remove", &model, "gfx", "--json"]).json();
    assert_eq!(run(&["skill", "list", &model]).stdout, "");
    run(&["skill", "remove", &model, "gfx"]).fails(2, "Usage");
}

#[test]
fn splitting_and_joining() {
    let dir = tempfile::tempdir().unwrap();
    let model = interop("qwen2-q4tp.cmf");
    let parts = run(&[
        "shard",
        &model,
        "--shard-max-gb",
        "0.0001",
        "-o",
        dir.path().to_str().unwrap(),
        "--json",
    ])
    .json();
    let second = parts["files"][1].as_str().unwrap();
    assert!(second.ends_with("qwen2-q4tp-00002-of-00002.cmf"), "{second}");
    let whole = inside(&dir, "whole.cmf");
    run(&["compact", second, "-o", &whole, "--json"]).json();
    assert_eq!(run(&["diff", &whole, &model]).stdout, "equal\n");
    let silly = [
        ("0", "more than 0"),
        ("-1", "more than 0"),
        ("1e-10", "at least a byte"),
        ("-inf", "more than 0"),
        ("x", "such as 4 or 0.5"),
        ("", "such as 4 or 0.5"),
        ("nan", "such as 4 or 0.5"),
        ("inf", "at most 1e9"),
        ("1e300", "at most 1e9"),
    ];
    let source = crate::golden::dir("qwen3");
    for (gigabytes, says) in silly {
        let most = format!("--shard-max-gb={gigabytes}");
        for command in [["shard", model.as_str()], ["convert", source.to_str().unwrap()]] {
            // Before any file is looked at.
            let message = run(&[&command[..], &[&most, "-o", "/no/such/place"]].concat()).fails(2, "Usage");
            assert!(message.contains(says) && message.contains("shard-max-gb"), "{message}");
        }
    }
    let told = run(&["shard", &model, "--shard-max-gb", "1e-5", "-o", &inside(&dir, "many")]);
    assert!(
        told.stderr.contains("files have more than 10000 bytes"),
        "{}",
        told.stderr
    );
    run(&["compact", &model, "-o", &model]).fails(2, "Usage");
    let base = inside(&dir, "conv");
    let converted = [
        "convert",
        source.to_str().unwrap(),
        "-o",
        &base,
        "--quant",
        "q8",
        "--shard-max-gb",
        "0.0003",
        "--json",
    ];
    assert!(run(&converted).json()["bytes"].as_u64().unwrap() > 300_000);
    let first = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let first = first
        .into_iter()
        .find(|path| path.to_str().unwrap().contains("conv-00001-of-"))
        .unwrap();
    assert_eq!(run(&["verify", first.to_str().unwrap()]).code, Some(0));
}

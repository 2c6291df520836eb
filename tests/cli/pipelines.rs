//! Files of text-to-image pipelines: what commands for files and for language models say about them.

use crate::build::{has, run};
use crate::golden::pipeline::{F16, REFERENCE_Q4T, container, dir};
use serde_json::{Value, json};
use std::path::Path;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Copies a directory with one level of folders.
pub fn copy_dir(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap().map(|entry| entry.unwrap().path()) {
        let target = to.join(entry.file_name().unwrap());
        match entry.is_dir() {
            true => {
                std::fs::create_dir(&target).unwrap();
                copy_dir(&entry, &target);
            }
            false => drop(std::fs::copy(&entry, target).unwrap()),
        }
    }
}

#[test]
fn info_describes_the_components() {
    for (path, format, stated, shards) in [
        (dir(), "diffusers", true, 9),
        (container(F16), "cmf-v2", true, 1),
        (container(REFERENCE_Q4T), "cmf-v2", false, 1),
    ] {
        let info = run(&["info", text(&path), "--json", "--tensors"]).json();
        has(
            &info,
            &[
                "arch",
                "bytes_by_dtype",
                "eos_token_ids",
                "masks",
                "skills",
                "index",
                "memory",
            ],
        );
        assert_eq!(
            (&info["format"], &info["runs"], &info["reason"]),
            (&json!(format), &json!(true), &Value::Null)
        );
        assert_eq!(
            (&info["arch"]["arch_name"], &info["params"]),
            (&json!("lumina2-image"), &json!(1_542_067))
        );
        assert_eq!(info["shards"].as_array().unwrap().len(), shards);
        let pipeline = &info["pipeline"];
        assert_eq!(pipeline["kind"], "lumina2-image");
        let scheduler = json!({"stated": stated, "shift": 6.0, "dynamic_shift": false});
        assert_eq!(pipeline["scheduler"], scheduler);
        let components = pipeline["components"].as_array().unwrap();
        let names: Vec<_> = components.iter().map(|one| (&one["name"], &one["params"])).collect();
        let wanted =
            [("te", 181_056), ("dit", 1_197_376), ("vae", 163_635)].map(|(name, params)| (json!(name), json!(params)));
        assert_eq!(
            names,
            wanted.iter().map(|(name, params)| (name, params)).collect::<Vec<_>>()
        );
        let [te, dit, vae] = [0, 1, 2].map(|index| &components[index]["dimensions"]);
        assert_eq!(
            (&te["layers"], &te["window"], &te["vocabulary"]),
            (&json!(3), &json!(4096), &json!(512))
        );
        assert_eq!(
            (&dit["axes"], &dit["head_dim"], &dit["size"]),
            (&json!([4, 6, 6]), &json!(16), &json!(128))
        );
        assert_eq!(
            (&vae["channels"], &vae["scaling"]),
            (&json!([16, 16, 32, 32]), &json!(0.3611))
        );
        let tensors = info["tensors"].as_array().unwrap();
        let config = tensors
            .iter()
            .find(|tensor| tensor["name"] == "vae.config_json")
            .unwrap();
        assert_eq!((&config["dtype"], &config["shape"]), (&json!("u8"), &json!([763])));
        assert!(config["offset"].is_u64());
        let shown = run(&["info", text(&path)]).stdout;
        for line in [
            "pipeline     lumina2-image\n",
            "dit          1197376 parameters, 115 tensors",
            "runs         yes\n",
        ] {
            assert!(shown.contains(line), "{shown}");
        }
        assert_eq!(shown.contains("the file states none"), !stated);
        assert!(!shown.contains("template") && shown.lines().count() < 20, "{shown}");
    }
    let unused = run(&["info", text(&dir())]).stdout;
    assert!(unused.contains("and 48 more, which --json lists"), "{unused}");
}

#[test]
fn commands_for_language_models_name_the_command_for_pictures() {
    let (dir, file) = (dir(), container(F16));
    let messages = dir.join("model_index.json");
    let out = file.with_file_name("unwritten.safetensors");
    for path in [text(&dir), text(&file)] {
        for command in [
            &["run", path, "-p", "a fox", "--json"][..],
            &["logits", path, "--tokens", "1,2", "--out", text(&out)],
            &["ppl", path, "--file", text(&messages)],
            &["bench", path],
            &["bench", path, "--plan"],
            &["parity", path],
            &["chat-template", path, "--messages", text(&messages)],
        ] {
            let message = run(command).fails(1, "UnsupportedModel");
            assert!(message.contains("is a text-to-image pipeline"), "{message}");
            assert!(message.contains("`cmf-gpu imagine`"), "{message}");
        }
        // The tokenizer is one of a language model.
        assert_eq!(run(&["tokenize", path, "hi"]).json_or_text(), "2,314,315");
    }
    assert!(!out.exists());
}

impl crate::build::Ran {
    fn json_or_text(&self) -> &str {
        assert_eq!(self.code, Some(0), "{}", self.stderr);
        self.stdout.trim()
    }
}

#[test]
fn pipelines_are_converted_verified_split_signed_and_compared() {
    let out = tempfile::tempdir().unwrap();
    let small = out.path().join("small.cmf");
    let converted = run(&["convert", text(&dir()), "-o", text(&small), "--quant", "q8", "--json"]).json();
    assert_eq!(
        (&converted["tensors"], converted["dropped"].as_array().unwrap().len()),
        (&json!(257), 72)
    );
    let key = out.path().join("key");
    std::fs::write(&key, "17".repeat(32)).unwrap();
    run(&["sign", text(&small), "--key", text(&key)]).json_or_text();
    let verified = run(&["verify", text(&small), "--json"]).json();
    assert_eq!(
        (&verified["ok"], &verified["signature"]["valid"]),
        (&json!(true), &json!(true))
    );
    let shards = run(&[
        "shard",
        text(&small),
        "--shard-max-gb",
        "0.0008",
        "-o",
        text(out.path()),
        "--json",
    ])
    .json();
    let shards: Vec<&str> = shards["files"]
        .as_array()
        .unwrap()
        .iter()
        .map(|file| file.as_str().unwrap())
        .collect();
    assert!(shards.len() > 2);
    let equal = run(&["diff", text(&small), shards[1], "--json"]).json();
    assert_eq!(equal["equal"], true);
    assert_eq!(run(&["info", shards[2], "--json"]).json()["runs"], true);
    let differs = run(&["diff", text(&small), text(&container(F16))]);
    assert_eq!(differs.code, Some(1));
    assert!(
        differs.stdout.contains("~ tensors dit.layers.0.attn.to_q.weight:"),
        "{}",
        differs.stdout
    );
    assert!(!differs.stdout.contains("config_json"), "{}", differs.stdout);
    // Damage in a configuration is found.
    let mut bytes = std::fs::read(&small).unwrap();
    let at = bytes.windows(12).position(|window| window == b"axes_dim_rop").unwrap();
    bytes[at] ^= 1;
    let damaged = out.path().join("damaged.cmf");
    std::fs::write(&damaged, bytes).unwrap();
    let report = run(&["verify", text(&damaged), "--json"]);
    assert!(report.stderr.contains("error: HashMismatch: "), "{}", report.stderr);
    assert!(report.stderr.contains("'dit.config_json'"), "{}", report.stderr);
}

#[test]
fn an_incomplete_directory_is_not_converted() {
    let copy = tempfile::tempdir().unwrap();
    copy_dir(&dir(), copy.path());
    let out = copy.path().join("o.cmf");
    let convert = |kind: &str| run(&["convert", text(copy.path()), "-o", text(&out)]).fails(1, kind);
    let config = copy.path().join("transformer/config.json");
    let plain = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, plain.replace("\"num_layers\": 3", "\"num_layers\": 4")).unwrap();
    assert!(convert("MissingTensor").contains("dit.layers.3."));
    let info = run(&["info", text(copy.path()), "--json"]).json();
    assert_eq!(info["runs"], false);
    assert!(
        info["reason"].as_str().unwrap().starts_with("MissingTensor: "),
        "{info}"
    );
    std::fs::remove_file(&config).unwrap();
    assert!(convert("Io").contains("transformer/config.json"));
    assert!(!out.exists());
}

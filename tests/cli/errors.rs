//! Everything that goes wrong is one line with a known kind, an exit code, and an object if one was asked for.

use crate::build::{fixture, model, run};
use serde_json::Value;

/// Runs without and with `--json`; both fail the same way.
fn fails(arguments: &[&str], code: i32, kind: &str) -> String {
    let message = run(arguments).fails(code, kind);
    let ran = run(&[arguments, &["--json"]].concat());
    assert_eq!(ran.fails(code, kind), message);
    let object: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(object["error"]["kind"], kind);
    message
}

#[test]
fn calls_that_make_no_sense_are_usage_errors() {
    let model = model();
    let run = |flags: &[&'static str]| [&["run", model, "-p", "x"], flags].concat();
    let cases: Vec<Vec<&str>> = vec![
        vec![],
        vec!["nonsense"],
        vec!["run"],
        vec!["run", model, "-m", model, "-p", "x"],
        run(&["--no-such-flag"]),
        run(&["-n", "many"]),
        run(&["--device", ""]),
        run(&["--kv", "q8"]),
        run(&["--kv", "f8"]),
        run(&["--temp", "-1"]),
        run(&["--temp", "nan"]),
        run(&["--top-p", "2"]),
        run(&["--min-p", "-0.5"]),
        run(&["--seed", "-3"]),
        run(&["--stop", ""]),
        run(&["--greedy", "--temp", "1"]),
        run(&["--prompt-tokens", "1"]),
        run(&["-f", "/dev/null"]),
        run(&["--task", "poetry"]),
        run(&["--skill", "auto"]),
        run(&["--blend", "a:1"]),
        run(&["--spec", "4"]),
        run(&["--repeat-penalty", "0"]),
        run(&["--presence-penalty", "nan"]),
        run(&["--frequency-penalty", "-101"]),
        run(&["--raw", "--system", "s"]),
        vec!["run", model, "--prompt-tokens", "1,x"],
        vec!["run", model, "--prompt-tokens", "512"],
        vec![
            "logits",
            model,
            "--tokens",
            "1,2",
            "--out",
            "/tmp/x",
            "--step-from",
            "3",
        ],
        vec!["logits", model, "--tokens", "99999", "--out", "/tmp/x"],
        vec!["bench", model, "--synthetic", "1b"],
        vec!["bench", model, "-r", "0"],
        vec!["bench", model, "-o", "xml"],
        vec!["convert", model],
        vec!["convert", model, "-o", model],
        vec!["convert", model, "-o", "/tmp/x.cmf", "--quant", "q3"],
        vec!["detokenize", model, "1,99999"],
        vec!["detokenize", model, "-1"],
        vec!["ppl", model, "--file", "/dev/null"],
        vec!["verify", model, "--pubkey", "00"],
    ];
    for case in cases {
        assert!(!fails(&case, 2, "Usage").is_empty(), "{case:?}");
    }
}

#[test]
fn files_that_are_no_good_are_named() {
    let missing = "/no/such/model.cmf";
    let directory = env!("CARGO_MANIFEST_DIR");
    let text = fixture("models/llama_tied/config.json");
    let skill = fixture("interop/qwen2-q4tp-gfx-skillfile.cmf");
    let (text, skill) = (text.to_str().unwrap(), skill.to_str().unwrap());
    let commands: [&[&str]; 8] = [
        &["info"],
        &["verify"],
        &["run", "-p", "x"],
        &["run"],
        &["bench"],
        &["logits", "--tokens", "1", "--out", "/tmp/x"],
        &["ppl", "--file", text],
        &["chat-template", "--messages", text],
    ];
    for command in commands {
        for (path, kind) in [(missing, "Io"), (directory, "Io"), (text, "InvalidMagic")] {
            let message = fails(&[command, &["-m", path]].concat(), 1, kind);
            assert!(message.contains(path), "{message}");
        }
    }
    for command in [&["run", "-p", "x"][..], &["bench"]] {
        fails(&[command, &["-m", skill]].concat(), 1, "SkillFile");
    }
    for command in [
        &["tokenize", missing, "x"][..],
        &["detokenize", missing, "1"],
        &["convert", missing, "-o", "/tmp/x"],
    ] {
        assert!(fails(command, 1, "Io").contains(missing));
    }
    for flag in ["-f", "--file"] {
        assert!(fails(&["run", model(), flag, missing], 1, "Io").contains(missing));
        assert!(fails(&["run", model(), flag, directory], 1, "Io").contains(directory));
    }
    let out = "/no/such/directory/out";
    assert!(fails(&["logits", model(), "--tokens", "1", "--out", out], 1, "Io").contains("/no/such/directory"));
    assert!(
        run(&["convert", model(), "-o", out])
            .fails(1, "Io")
            .contains("/no/such/directory")
    );
    assert!(fails(&["shaders", "--dump", text], 1, "Io").contains(text));
}

#[test]
fn a_prompt_longer_than_the_context_says_both_lengths() {
    let prompt = vec!["5"; 70].join(",");
    let message = fails(
        &["run", model(), "--prompt-tokens", &prompt, "-c", "64"],
        1,
        "ContextFull",
    );
    assert!(message.contains("70") && message.contains("64"), "{message}");
}

#[test]
fn devices_that_are_not_there_are_no_adapter() {
    for device in ["99", "no such card"] {
        let message = fails(&["run", model(), "-p", "x", "--device", device], 1, "NoAdapter");
        assert!(message.contains(device));
    }
}

#[test]
fn what_does_not_fit_is_out_of_memory() {
    let message = fails(&["run", model(), "-p", "x", "--vram-mb", "1"], 1, "OutOfMemory");
    assert!(message.contains("--vram-mb"));
}

#[test]
fn templates_and_messages_are_checked() {
    let dir = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    let cases = [
        ("not-json.json", "{", "Parse", 1),
        ("no-list.json", "{}", "Usage", 2),
        (
            "wrong-role.json",
            r#"[{"role": "assistant", "content": "x"}]"#,
            "Template",
            1,
        ),
    ];
    for (name, text, kind, code) in cases {
        let path = dir.join(name);
        std::fs::write(&path, text).unwrap();
        fails(
            &["chat-template", model(), "--messages", path.to_str().unwrap()],
            code,
            kind,
        );
    }
}

/// An output that replaces what is being read, or a device, destroys it.
#[test]
fn logits_replace_neither_their_input_nor_what_is_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let own = dir.path().join("own.cmf");
    std::fs::copy(model(), &own).unwrap();
    let own = own.to_str().unwrap();
    let logits = |out: &str, code, kind| {
        fails(
            &["logits", own, "--tokens", "1,2", "--device", "cpu", "--out", out],
            code,
            kind,
        )
    };
    let message = logits(own, 2, "Usage");
    assert!(message.contains("own.cmf"), "{message}");
    assert_eq!(std::fs::read(own).unwrap(), std::fs::read(model()).unwrap());
    let folder = dir.path().join("folder");
    std::fs::create_dir(&folder).unwrap();
    logits(folder.to_str().unwrap(), 1, "Io");
    let names = std::fs::read_dir(dir.path()).unwrap().count();
    assert_eq!(names, 2, "no temporary file is left");
}

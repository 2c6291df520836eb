//! Every error is one line with a known kind, an exit code, and with `--json` an object.

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
fn invalid_arguments_are_usage_errors() {
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
        run(&["--spec", "8"]),
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
        vec!["bench", model, "--layers", "2"],
        vec!["bench", "--synthetic", "llama-8b", "--layers", "33", "--plan"],
        vec!["bench", "--synthetic", "llama-8b", "--layers", "0"],
        vec!["bench", model, "-r", "0"],
        vec!["bench", model, "-o", "xml"],
        vec!["convert", model],
        vec!["convert", model, "-o", model],
        vec!["convert", model, "-o", "/tmp/x.cmf", "--quant", "q3"],
        vec!["convert", model, "-o", "/tmp/x.cmf", "--tensor-quant", "*"],
        vec!["convert", model, "-o", "/tmp/x.cmf", "--tensor-quant", "*=q3"],
        vec![
            "convert",
            model,
            "-o",
            "/tmp/x.cmf",
            "--tensor-quant",
            "*.down_prj.*=q8",
        ],
        vec!["convert", model, "-o", "/tmp/x.cmf", "--tensor-quant", "*norm*=q4"],
        vec![
            "convert",
            model,
            "-o",
            "/tmp/x.cmf",
            "--quant",
            "vbit",
            "--mean-bits",
            "2",
        ],
        vec![
            "convert",
            model,
            "-o",
            "/tmp/x.cmf",
            "--quant",
            "q8",
            "--mean-bits",
            "4",
        ],
        vec!["detokenize", model, "1,99999"],
        vec!["detokenize", model, "-1"],
        vec!["ppl", model, "--file", "/dev/null"],
        vec!["verify", model, "--pubkey", "00"],
    ];
    for case in cases {
        assert!(!fails(&case, 2, "Usage").is_empty(), "{case:?}");
    }
}

/// Would fail: the error of a missing cache type does not name the existing ones.
#[test]
fn a_missing_cache_type_names_the_existing_ones() {
    let message = fails(&["run", model(), "-p", "x", "--kv", "q8"], 2, "Usage");
    assert!(message.contains("not implemented yet; use f16"), "{message}");
    assert!(message.contains("f32"), "{message}");
}

/// Would fail: the error does not name the unknown token, or the size of the vocabulary.
#[test]
fn tokens_beyond_the_vocabulary_are_named_with_its_size() {
    for id in ["512", "4294967295", "4294967296", "18446744073709551615"] {
        let wanted = format!("token {id} is not in the vocabulary of 512");
        assert_eq!(
            fails(&["detokenize", model(), &format!("1, {id},2")], 2, "Usage"),
            wanted
        );
    }
    assert!(fails(&["detokenize", model(), "1,x"], 2, "Usage").contains("found 'x'"));
}

/// Would fail: an invalid number is taken for a flag, or the error does not name the range.
#[test]
fn numbers_out_of_range_name_the_flag_and_the_range() {
    let m = model();
    let commands: [(&[&str], &[&str]); 5] = [
        (
            &["run", m, "-p", "x"],
            &["--max-tokens", "--top-k", "--seed", "--ctx", "--vram-mb"],
        ),
        (&["bench", m], &["--n-prompt", "--n-gen", "--n-depth", "--repetitions"]),
        (&["ppl", m, "--file", "/dev/null"], &["--stride"]),
        (&["info", m], &["--ctx"]),
        (&["logits", m, "--tokens", "1", "--out", "/tmp/x"], &["--step-from"]),
    ];
    for (command, flags) in commands {
        for flag in flags {
            for value in ["-1", "99999999999999999999", "1.5"] {
                let message = fails(&[command, &[*flag, value]].concat(), 2, "Usage");
                let said = [*flag, value, "from 0 to"].iter().all(|part| message.contains(part));
                assert!(said && !message.contains("tip"), "{message}");
            }
        }
    }
    let message = run(&["run", m, "-p", "x", "-n", "-5"]).fails(2, "Usage");
    assert!(
        message.contains("'-5'") && message.contains("--max-tokens"),
        "{message}"
    );
    let message = run(&["run", m, "-p", "x", "--device", ""]).fails(2, "Usage");
    assert_eq!(message.matches("Usage").count(), 0, "{message}");
}

/// Would fail: invalid arguments are found after the model is loaded, which may take minutes.
#[test]
fn invalid_arguments_are_found_before_a_device_is_opened() {
    let m = model();
    let cases: [(&[&str], &str); 11] = [
        (&["run", m, "-p", "x", "--stop", ""], "--stop"),
        (&["run", m, "--prompt-tokens", "1,512"], "512"),
        (&["logits", m, "--tokens", "512", "--out", "/tmp/x"], "512"),
        (&["ppl", m, "--file", "/dev/null", "--stride", "0"], "--stride"),
        (
            &["ppl", m, "--file", "/dev/null", "-c", "8", "--stride", "9"],
            "--stride",
        ),
        (&["ppl", m, "--file", "/dev/null", "-c", "1"], "--ctx"),
        (&["bench", m, "-c", "8"], "-p"),
        (&["bench", m, "-p", "4", "-n", "8", "-c", "8"], "-n"),
        (&["bench", m, "-p", "4", "-n", "0", "-d", "8", "-c", "8"], "-d"),
        // Longer than the model was trained for.
        (&["bench", m, "-c", "0", "-p", "99999"], "-p"),
        (&["parity", "--filter", "no such case"], "matvec"),
    ];
    for (case, said) in cases {
        // Opening this device would give another error.
        let message = fails(&[case, &["--device", "no such card"]].concat(), 2, "Usage");
        assert!(message.contains(said), "{message}");
    }
    let file = [
        "run",
        "-m",
        env!("CARGO_MANIFEST_DIR"),
        "-p",
        "x",
        "--device",
        "no such card",
    ];
    fails(&file, 1, "Io");
}

/// Would fail: the help of a command names another default.
#[test]
fn help_states_the_context_that_a_command_uses() {
    for (command, said) in [
        ("run", "at most 4096"),
        ("ppl", "512"),
        ("bench", "-p and -n after -d"),
        ("parity", "120"),
    ] {
        let help = run(&[command, "--help"]).stdout;
        let about: Vec<&str> = help
            .lines()
            .skip_while(|line| !line.contains("--ctx"))
            .take(4)
            .collect();
        let about = about
            .join(" ")
            .split("--kv")
            .next()
            .unwrap()
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ");
        assert!(about.contains(said), "{about}");
        assert_eq!(about.contains("4096"), command == "run", "{about}");
    }
}

/// Would fail: the error names other flags than those that set the context.
#[test]
fn a_benchmark_that_does_not_fit_names_its_own_flags() {
    let message = run(&["bench", model(), "-p", "50000000", "--vram-mb", "64"]).fails(1, "OutOfMemory");
    assert!(message.contains("-p 50000000"), "{message}");
}

/// Would fail: the error for a directory or a misspelt name does not list the models there.
#[test]
fn a_path_that_is_no_model_names_the_models_beside_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let message = run(&["run", "-m", &path(""), "-p", "x"]).fails(1, "Io");
    assert!(message.contains("no .cmf, .gguf or .ninfer file"), "{message}");
    std::fs::write(path("model.safetensors"), "").unwrap();
    let message = run(&["run", "-m", &path(""), "-p", "x"]).fails(1, "Bounds");
    assert!(!message.contains("no .cmf"), "{message}");
    std::fs::remove_file(path("model.safetensors")).unwrap();
    std::fs::write(path("config.json"), "{}").unwrap();
    let message = run(&["run", "-m", &path(""), "-p", "x"]).fails(1, "Io");
    assert!(message.contains("neither model.safetensors nor"), "{message}");
    for name in [
        "one.cmf",
        "two-00001-of-00002.cmf",
        "two-00002-of-00002.cmf",
        "three.gguf",
    ] {
        std::fs::write(path(name), "").unwrap();
    }
    for no_model in ["", "ones.cmf"] {
        for command in ["info", "run", "bench", "verify"] {
            let message = fails(&[command, "-m", &path(no_model)], 1, "Io");
            assert!(
                message.contains("one.cmf, three.gguf, two-00001-of-00002.cmf"),
                "{message}"
            );
            assert!(!message.contains("two-00002"), "{message}");
        }
    }
}

#[test]
fn unusable_files_are_named() {
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
    let stats = ["convert", model(), "-o", "/tmp/x", "--quant", "vbit", "--router-stats"];
    assert!(fails(&[&stats[..], &[missing]].concat(), 1, "Io").contains(missing));
    assert!(fails(&[&stats[..], &[text]].concat(), 1, "Parse").contains(text));
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
fn missing_devices_are_no_adapter() {
    for device in ["99", "no such card"] {
        let message = fails(&["run", model(), "-p", "x", "--device", device], 1, "NoAdapter");
        assert!(message.contains(device));
    }
}

/// Would fail: a software adapter is used instead of a GPU, without an error or a note.
#[test]
fn hardware_is_not_replaced_silently() {
    let all = run(&["devices", "--json"]).json();
    let kinds = all["devices"].as_array().unwrap().iter();
    let kinds: Vec<&str> = kinds.map(|device| device["kind"].as_str().unwrap()).collect();
    // Best first, the CPU reference last.
    let rank = |kind: &&str| {
        ["discrete", "integrated", "other", "software", "cpu"]
            .iter()
            .position(|k| k == kind)
    };
    assert!(kinds.iter().map(rank).is_sorted(), "{kinds:?}");
    let hardware = !["software", "cpu"].contains(&kinds[0]);
    let on = |device: &str| run(&["run", model(), "-p", "x", "-n", "1", "--json", "--device", device]);
    match hardware {
        true => assert_eq!(on("gpu").json()["device"]["kind"], kinds[0]),
        false => assert!(on("gpu").fails(1, "NoAdapter").contains("no hardware GPU")),
    }
    let auto = on("auto");
    assert_eq!(auto.json()["device"]["kind"], kinds[0]);
    assert_eq!(auto.stderr.contains("no GPU was found"), !hardware, "{}", auto.stderr);
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

/// Would fail: a model with a damaged weight answers despite `--verify`.
#[test]
fn run_checks_every_weight_when_asked() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("damaged.cmf");
    let mut bytes = std::fs::read(model()).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let damaged = ["run", path.to_str().unwrap(), "-p", "x", "-n", "1"];
    fails(&[&damaged[..], &["--verify"]].concat(), 1, "HashMismatch");
    assert_eq!(run(&["run", model(), "-p", "x", "-n", "1", "--verify"]).code, Some(0));
}

/// Would fail: an output replaces a link instead of the file that it points to.
#[cfg(unix)]
#[test]
fn outputs_are_written_through_links() {
    use std::os::unix::fs::symlink;
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    std::fs::create_dir(path("there")).unwrap();
    for (link, to) in [("a", "there/a"), ("b", "there/b"), ("nowhere", "there/missing")] {
        if link != "nowhere" {
            std::fs::write(path(to), "old").unwrap();
        }
        symlink(path(to), path(link)).unwrap();
    }
    assert_eq!(
        run(&["convert", model(), "-o", &path("a"), "--quant", "q8"]).code,
        Some(0)
    );
    let logits = ["logits", model(), "--tokens", "1,2", "--device", "cpu", "--out"];
    assert_eq!(run(&[&logits[..], &[&path("b")]].concat()).code, Some(0));
    for name in ["a", "b"] {
        assert!(std::fs::symlink_metadata(path(name)).unwrap().is_symlink(), "{name}");
        assert!(
            std::fs::metadata(path(&format!("there/{name}"))).unwrap().len() > 1000,
            "{name}"
        );
    }
    for command in [&["convert", model(), "-o"][..], &logits] {
        let message = fails(&[command, &[&path("nowhere")]].concat(), 1, "Io");
        assert!(message.contains("dangling link"), "{message}");
    }
    assert_eq!(std::fs::read_dir(path("there")).unwrap().count(), 2);
}

/// Would fail: an output replaces its input, or something that is not a file.
#[test]
fn logits_replace_neither_their_input_nor_a_directory() {
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

/// Would fail: an invalid template also prevents prompts that do not use it.
#[test]
fn prompts_without_a_template_work_with_an_invalid_one() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    std::fs::create_dir(&source).unwrap();
    for file in std::fs::read_dir(crate::golden::dir("llama_tied")).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), source.join(file.file_name())).unwrap();
    }
    let config = source.join("tokenizer_config.json");
    let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    json["chat_template"] = "{% for".into();
    std::fs::write(&config, json.to_string()).unwrap();
    let path = dir.path().join("broken.cmf");
    let path = path.to_str().unwrap();
    let made = run(&["convert", source.to_str().unwrap(), "-o", path, "-q"]);
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    let short = ["-n", "2", "-c", "64", "--json"];
    run(&[&["run", path, "-p", "x"], &short[..]].concat()).fails(1, "Template");
    for prompt in [&["-p", "x", "--raw"][..], &["--prompt-tokens", "1,2"]] {
        assert_eq!(
            run(&[&["run", path], prompt, &short].concat()).json()["finish"],
            "length"
        );
    }
}

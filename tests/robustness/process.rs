//! The program: output, files and errors under unusual conditions.

use crate::permutation::{END, FIRST, PROMPT, Permutation};
use cmf_gpu::dtype::Dtype;
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// The program, without the environment variables that configure it.
pub fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cmf-gpu"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("CMF_GPU_") {
            command.env_remove(name);
        }
    }
    command.stdin(Stdio::null());
    command
}

/// Exit code, stdout, stderr.
pub fn output_of(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let stderr = text(&output.stderr);
    assert!(
        !stderr.contains("panicked") && !stderr.contains("RUST_BACKTRACE"),
        "{stderr}"
    );
    (output.status.code(), text(&output.stdout), stderr)
}

fn run(path: &Path, flags: &[&str]) -> (Option<i32>, String, String) {
    let mut command = program();
    command
        .arg("run")
        .arg(path)
        .args(["-p", "p", "--greedy", "-q"])
        .args(flags);
    output_of(&command.output().unwrap())
}

/// Guards against exit code 0 after an error, and against losing the text before the error.
#[test]
fn logits_that_are_nan_are_exit_1_after_the_text() {
    let mut model = Permutation::answering(&[b"good ", b"until", b"here"]);
    model.broken = Some(FIRST + 1);
    let (_dir, path) = model.file();
    for device in ["cpu", "0"] {
        let (code, stdout, stderr) = run(&path, &["--device", device]);
        assert_eq!((code, stdout.as_str()), (Some(1), "good until\n"));
        assert!(
            stderr.starts_with("error: NonFinite: ") && stderr.lines().count() == 1,
            "{stderr}"
        );
    }
}

/// Guards against differences between the plain output and the JSON output.
#[test]
fn plain_and_json_output_have_the_same_text() {
    let pieces: [&[u8]; 5] = [b"a\"\\", b"\xe2\x82", b"\xac\n", b"ST", b"OP!"];
    let (_dir, path) = Permutation::answering(&pieces).file();
    for flags in [&[][..], &["--stop", "STOP"], &["-n", "2"]] {
        let (code, plain, _) = run(&path, flags);
        let (_, json, _) = run(&path, &[flags, &["--json"]].concat());
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(code, Some(0));
        let text = json["text"].as_str().unwrap();
        assert!(text.starts_with("a\"\\"));
        assert_eq!(plain.trim_end_matches('\n'), text.trim_end_matches('\n'));
        assert_eq!(text.contains("ST"), flags.is_empty());
    }
}

/// Guards against processes that block each other or destroy shared files.
#[test]
fn two_runs_at_once() {
    let (_dir, path) = Permutation::repeating(&[b"a", b"b"]).file();
    let mut both: Vec<_> = (0..3)
        .map(|_| {
            let mut command = program();
            command
                .arg("run")
                .arg(&path)
                .args(["-p", "p", "--greedy", "-q", "-n", "40"]);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    for child in both.drain(..) {
        let (code, stdout, stderr) = output_of(&child.wait_with_output().unwrap());
        assert_eq!(
            (code, stdout.trim_end()),
            (Some(0), "ab".repeat(20).as_str()),
            "{stderr}"
        );
    }
}

/// Guards against failures with paths that contain non-ASCII letters, spaces or emoji.
#[test]
fn paths_that_are_not_ascii_or_long() {
    let dir = tempfile::tempdir().unwrap();
    let mut folder = dir.path().join("модель \u{1f999}");
    // Longer than 260 characters, a common limit of paths.
    for _ in 0..8 {
        folder.push("ein ziemlich langer Name für einen Ordner");
    }
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("模型 é.cmf");
    Permutation::answering(&[b"ok"]).write(&path);
    let (code, stdout, stderr) = run(&path, &[]);
    assert_eq!((code, stdout.as_str()), (Some(0), "ok\n"), "{stderr}");
    let copy = folder.join("ɕopy 'of' \"it\".cmf");
    let mut convert = program();
    convert
        .arg("convert")
        .arg(&path)
        .arg("-o")
        .arg(&copy)
        .args(["--quant", "q8"]);
    assert_eq!(output_of(&convert.output().unwrap()).0, Some(0));
    for command in ["info", "verify"] {
        let (code, _, stderr) = output_of(&program().arg(command).arg(&copy).output().unwrap());
        assert_eq!(code, Some(0), "{stderr}");
    }
    assert_eq!(run(&copy, &[]).1, "ok\n");
}

/// Guards against a panic on a path that is not valid UTF-8.
#[cfg(target_os = "linux")]
#[test]
fn paths_that_are_not_utf_8() {
    use std::os::unix::ffi::OsStrExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(std::ffi::OsStr::from_bytes(b"caf\xe9.cmf"));
    Permutation::answering(&[b"ok"]).write(&path);
    assert_eq!(run(&path, &[]).1, "ok\n");
    let (code, stdout, stderr) = output_of(&program().arg("info").arg(&path).arg("--json").output().unwrap());
    assert_eq!(code, Some(0), "{stderr}");
    assert!(serde_json::from_str::<serde_json::Value>(&stdout).is_ok());
}

/// Guards against integer overflow with the largest possible arguments.
#[test]
fn extreme_numbers_are_refused_or_used_as_given() {
    let (_dir, path) = Permutation::answering(&[b"ok"]).file();
    let (code, _, stderr) = run(&path, &["-c", "4294967295", "--device", "cpu", "--vram-mb", "1024"]);
    assert_eq!(code, Some(1));
    assert!(stderr.starts_with("error: OutOfMemory: "), "{stderr}");
    let (code, _, stderr) = run(&path, &["-c", "4294967295"]);
    assert_eq!(code, Some(1));
    assert!(stderr.starts_with("error: OutOfMemory: "), "{stderr}");
    for flags in [
        &["-n", "18446744073709551615"][..],
        &["--seed", "18446744073709551615", "--top-k", "4294967295"],
        &["--vram-mb", "18446744073709551615"],
        &["--min-p", "1", "--top-p", "0.0000001"],
    ] {
        let (code, stdout, stderr) = run(&path, flags);
        assert_eq!((code, stdout.as_str()), (Some(0), "ok\n"), "{flags:?} {stderr}");
    }
}

/// Guards against endless answers without a warning for files without a stop token.
#[test]
fn a_model_without_a_stop_token_gets_a_warning() {
    let mut model = Permutation::repeating(&[b"a"]);
    for ends in [true, false] {
        if !ends {
            model.eos.clear();
        }
        let (_dir, path) = model.file();
        let mut command = program();
        command.arg("run").arg(&path).args(["-p", "p", "--greedy", "-n", "3"]);
        let (code, stdout, stderr) = output_of(&command.output().unwrap());
        assert_eq!((code, stdout.as_str()), (Some(0), "aaa\n"));
        assert_eq!(stderr.contains("no token that ends an answer"), !ends, "{stderr}");
    }
}

/// Guards against ignoring an end-of-turn token of the vocabulary that the header does not list.
#[test]
fn an_end_of_turn_token_ends_answers_of_files_without_stop_tokens() {
    for (special, wanted) in [(true, "ok\n"), (false, "ok<|im_end|>!\n")] {
        let mut model = Permutation::answering(&[b"ok", b"<|im_end|>", b"!"]);
        model.eos = vec![END];
        if special {
            model.eos.clear();
            model.special.push(FIRST + 1);
        }
        let (_dir, path) = model.file();
        let (code, stdout, stderr) = run(&path, &["-n", "8"]);
        assert_eq!((code, stdout.as_str()), (Some(0), wanted), "{stderr}");
        let info = |flags: &[&str]| output_of(&program().arg("info").arg(&path).args(flags).output().unwrap()).1;
        let object: Value = serde_json::from_str(&info(&["--json"])).unwrap();
        assert_eq!(object["eos_token_ids"], json!(model.eos));
        let stop = [END, FIRST + 1][usize::from(special)];
        assert_eq!(object["stop_token_ids"], json!([stop]));
        assert!(
            info(&[]).contains(&format!("\nstop tokens  [{stop}]\n")),
            "{}",
            info(&[])
        );
    }
}

/// Guards against a crash when the header declares a draft head without tensors.
#[test]
fn a_model_runs_without_a_draft_head_whose_tensors_are_missing() {
    let mut model = Permutation::walking(Dtype::F16);
    model.header = |header| {
        header["arch"]["mtp"] = json!({"num_layers": 1, "share_lm_head": true, "share_embed": true});
    };
    let (_dir, path) = model.file();
    let (_, text, _) = output_of(&program().arg("info").arg(&path).output().unwrap());
    assert!(
        text.contains("draft head   declared, but its tensors are missing"),
        "{text}"
    );
    let (_, info, _) = output_of(&program().arg("info").arg(&path).arg("--json").output().unwrap());
    let info: Value = serde_json::from_str(&info).unwrap();
    assert_eq!(
        (&info["mtp"]["num_layers"], &info["draft_head"], &info["runs"]),
        (&json!(1), &json!(false), &json!(true))
    );
    let (code, stdout, stderr) = run(&path, &["-n", "20", "--json"]);
    assert_eq!(code, Some(0), "{stderr}");
    let answer: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(answer["tokens"], json!(model.path(PROMPT, 20)));
    assert_eq!(answer["speculation"]["mode"], "off");
}

/// Guards against wrong answers with a context that the rotary embedding of the file does not support.
#[test]
fn a_context_without_rotation_is_refused() {
    let mut model = Permutation::answering(&[b"ok"]);
    model.header = |header| {
        header["arch"]["rope_freq_factors"] = json!([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]);
        header["arch"]["yarn"] = json!({
            "factor": 1.0, "original_max_position_embeddings": 256, "beta_fast": 32.0, "beta_slow": 1.0,
            "attention_factor": 1.19
        });
        // The training context does not matter here.
        header["arch"]["max_position_embeddings"] = json!(1024);
    };
    let (_dir, path) = model.file();
    let (code, stdout, stderr) = run(&path, &["-c", "256"]);
    assert_eq!((code, stdout.as_str()), (Some(0), "ok\n"), "{stderr}");
    for flags in [&[][..], &["-c", "0"]] {
        assert_eq!(run(&path, flags).1, "ok\n");
    }
    for ctx in ["257", "1024"] {
        let (code, stdout, stderr) = run(&path, &["-c", ctx]);
        assert_eq!((code, stdout.as_str()), (Some(2), ""), "{ctx}: {stderr}");
        assert!(
            stderr.starts_with("error: Usage: ") && stderr.contains("contexts of up to 256 only"),
            "{stderr}"
        );
    }
    // With a YaRN factor above 1 the rotation is valid for any context.
    model.header = |header| {
        header["arch"]["yarn"] = json!({"factor": 4.0, "original_max_position_embeddings": 128});
    };
    let (_dir, path) = model.file();
    assert_eq!(run(&path, &["-c", "512"]).1, "ok\n");
}

/// Guards against ignoring the sampling defaults of the file, or preferring them to flags.
#[test]
fn the_sampling_defaults_of_the_file_apply_unless_a_flag_overrides_them() {
    let mut model = Permutation::walking(Dtype::F16);
    // The logits are close, so that sampling decides.
    model.logits = [0.2, 0.0];
    let path = json!(model.path(PROMPT, 30));
    let drawn = |model: &Permutation, flags: &[&str]| {
        let (_dir, file) = model.file();
        let mut info = program();
        let (_, info, _) = output_of(&info.arg("info").arg(&file).arg("--json").output().unwrap());
        let mut command = program();
        command
            .arg("run")
            .arg(&file)
            .args(["-p", "p", "-n", "30", "--json", "--seed", "3"]);
        let (code, stdout, stderr) = output_of(&command.args(flags).output().unwrap());
        assert_eq!(code, Some(0), "{stderr}");
        let [info, answer] = [info, stdout].map(|text| serde_json::from_str::<Value>(&text).unwrap());
        (info["sampling"]["temperature"].clone(), answer["tokens"].clone())
    };
    let (built_in, tokens) = drawn(&model, &[]);
    assert!(built_in.as_f64().unwrap() > 0.0 && tokens != path);
    model.header = |header| header["provenance"] = json!({"generation_config": {"temperature": 0.0}});
    assert_eq!(drawn(&model, &[]), (json!(0.0), path.clone()));
    assert_ne!(drawn(&model, &["--temp", "1"]).1, path);
}

/// Guards against an error when the header declares a draft head without tensors.
#[test]
fn a_draft_head_without_tensors_is_reported_in_info_and_not_used() {
    let mut model = Permutation::answering(&[b"ok"]);
    model.header = |header| header["arch"]["mtp"] = json!({"num_layers": 1});
    let (_dir, path) = model.file();
    let info = |flags: &[&str]| output_of(&program().arg("info").arg(&path).args(flags).output().unwrap()).1;
    let object: Value = serde_json::from_str(&info(&["--json"])).unwrap();
    assert_eq!(
        (&object["mtp"]["num_layers"], &object["draft_head"]),
        (&json!(1), &json!(false))
    );
    assert!(info(&[]).contains("draft head   declared, but its tensors are missing"));
    let (code, stdout, _) = run(&path, &["--json"]);
    let answer: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(code, Some(0));
    assert_eq!(
        (&answer["text"], &answer["speculation"]["mode"]),
        (&json!("ok"), &json!("off"))
    );
}

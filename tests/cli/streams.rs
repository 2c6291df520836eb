//! Streams, signals, and the environment.

use crate::build::{Ran, golden, ids, model, program, run, run_env};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[test]
fn the_environment_is_read_and_the_flag_wins() {
    let (prompt, greedy) = golden(1);
    let prompt = ids(&prompt);
    let env = [
        ("CMF_GPU_MODEL", model()),
        ("CMF_GPU_PROMPT_TOKENS", &prompt),
        ("CMF_GPU_MAX_TOKENS", "5"),
        ("CMF_GPU_GREEDY", "1"),
        ("CMF_GPU_KV", "f32"),
        ("CMF_GPU_CTX", "64"),
        ("CMF_GPU_JSON", "1"),
    ];
    let answer = run_env(&["run"], &env).json();
    assert_eq!(answer["tokens"], serde_json::json!(greedy[..5]));
    assert_eq!(answer["ctx"], 64);
    let answer = run_env(&["run", "-n", "3", "-c", "128"], &env).json();
    assert_eq!(answer["tokens"], serde_json::json!(greedy[..3]));
    assert_eq!(answer["ctx"], 128);
    // Flags that exclude each other: the one on the command line wins, of prompts too.
    let text = run_env(&["run", "-p", "x", "--temp", "0.7", "--seed", "1"], &env).json();
    assert_ne!(text["prompt_tokens"], answer["prompt_tokens"]);
    run_env(&["run"], &[env[0], ("CMF_GPU_PROMPT", "x"), ("CMF_GPU_FILE", "y")]).fails(2, "Usage");
    run_env(&["run", "-p", "x"], &[env[0], ("CMF_GPU_TEMP", "warm")]).fails(2, "Usage");
    run_env(&["nonsense"], &[("CMF_GPU_JSON", "1")]).fails(2, "Usage");
    let off = run_env(&["run", "-p", "x", "-n", "1"], &[env[0], ("CMF_GPU_JSON", "0")]);
    assert!(serde_json::from_str::<Value>(&off.stdout).is_err());
}

#[test]
fn the_model_of_a_tokenizer_comes_from_anywhere() {
    let ids = run(&["tokenize", model(), "Hello there"]).stdout;
    let text = run(&["detokenize", model(), ids.trim()]).stdout;
    assert!(text.contains("Hello"), "{text}");
    let env = [("CMF_GPU_MODEL", model())];
    for (command, what, wanted) in [("tokenize", "Hello there", &ids), ("detokenize", ids.trim(), &text)] {
        assert_eq!(&run(&[command, "-m", model(), what]).stdout, wanted);
        assert_eq!(&run(&[command, what, "-m", model()]).stdout, wanted);
        assert_eq!(&run_env(&[command, what], &env).stdout, wanted);
        assert_eq!(
            &run_env(&[command, model(), what], &[("CMF_GPU_MODEL", "/no/such")]).stdout,
            wanted
        );
        run(&[command, what]).fails(2, "Usage");
        run(&[command]).fails(2, "Usage");
        run(&[command, "-m", model()]).fails(2, "Usage");
        run(&[command, model(), what, "-m", model()]).fails(2, "Usage");
    }
}

/// One token has no rate, a context beyond the training no silence.
#[test]
fn what_is_said_about_an_answer_means_something() {
    let one = run(&["run", model(), "-p", "x", "-n", "1", "--greedy"]).stderr;
    assert!(one.contains("| gen 1 tok | ttft"), "{one}");
    let three = run(&["run", model(), "-p", "x", "-n", "3", "--greedy"]).stderr;
    assert!(
        three.contains("| gen 3 tok ") && three.contains(" tok/s | ttft"),
        "{three}"
    );
    assert!(!three.contains("trained"), "{three}");
    let long = run(&["run", model(), "-p", "x", "-n", "1", "-c", "2049"]).stderr;
    assert!(
        long.contains("trained for 2048 positions") && long.contains("2049"),
        "{long}"
    );
}

#[test]
fn a_prompt_may_come_from_stdin_or_a_file() {
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("prompt é.txt");
    std::fs::write(&path, "Hello there\n").unwrap();
    let path = path.to_str().unwrap();
    let flags = ["run", model(), "--greedy", "-n", "6", "--json"];
    let text = run(&[&flags[..], &["-p", "Hello there"]].concat()).json();
    let file = run(&[&flags[..], &["-f", path]].concat()).json();
    assert_eq!(file["tokens"], text["tokens"]);
    for from in [&[][..], &["-f", "-"]] {
        let mut child = program()
            .args(flags)
            .args(from)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(b"Hello there\r\n").unwrap();
        let piped = Ran::of(child.wait_with_output().unwrap()).json();
        assert_eq!(piped["tokens"], text["tokens"]);
    }
}

#[test]
fn an_empty_stdin_ends_the_program() {
    let ran = run(&["run", model()]);
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), ""));
    run(&["run", model(), "--json"]).fails(2, "Usage");
}

#[test]
fn a_prompt_that_is_not_utf8_is_an_error() {
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("latin1.txt");
    std::fs::write(&path, b"caf\xe9").unwrap();
    let message = run(&["run", model(), "-f", path.to_str().unwrap()]).fails(1, "Parse");
    assert!(message.contains("byte 3"), "{message}");
}

/// Runs the program with its stdout closed after the first byte.
fn cut_short(arguments: &[&str]) -> (Option<i32>, String) {
    let mut child = program()
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut byte = [0];
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut byte).unwrap();
    drop(stdout);
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    (child.wait().unwrap().code(), stderr)
}

#[test]
fn a_closed_pipe_ends_the_program_quietly() {
    // More than a pipe holds, and an answer that would take very long: with other seeds some end at once.
    for arguments in [
        &["shaders"][..],
        &["shaders", "--json"],
        &["run", model(), "-p", "x", "-n", "1900", "--temp", "2", "--seed", "2"],
    ] {
        let start = Instant::now();
        let (code, stderr) = cut_short(arguments);
        assert_eq!(code, Some(0), "{stderr}");
        assert!(!stderr.contains("error:") && !stderr.contains("panicked"), "{stderr}");
        assert!(start.elapsed() < Duration::from_secs(60));
    }
}

#[cfg(target_os = "linux")]
#[test]
fn an_answer_that_cannot_be_written_is_a_failure() {
    for arguments in [
        &["info", model()][..],
        &["devices"],
        &["--help"],
        &["--version"],
        &["run", model(), "-p", "x", "-n", "3", "--json"],
        &["run", model(), "-p", "x", "-n", "30"],
        &["verify", model()],
    ] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let ran = Ran::of(program().args(arguments).stdout(full).output().unwrap());
        assert!(ran.fails(1, "Io").starts_with("stdout: "), "{arguments:?}");
    }
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_the_answer_and_keeps_the_text() {
    // Greedy, this one goes on until the context is full.
    let prompt = ids(&golden(1).0);
    for json in [false, true] {
        let mut command = program();
        command.args(["run", model(), "--prompt-tokens", &prompt, "-n", "100000", "--greedy"]);
        if json {
            command.arg("--json");
        }
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        // The last line before the answer begins.
        while !said.contains("loaded in") {
            assert!(stderr.read_line(&mut said).unwrap() > 0, "{said}");
        }
        let mut stdout = child.stdout.take().unwrap();
        let mut text = vec![0; if json { 0 } else { 1 }];
        stdout.read_exact(&mut text).unwrap();
        if json {
            std::thread::sleep(Duration::from_millis(500));
        }
        let killed = Command::new("kill")
            .args(["-INT", &child.id().to_string()])
            .status()
            .unwrap();
        assert!(killed.success());
        stdout.read_to_end(&mut text).unwrap();
        stderr.read_to_string(&mut said).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(130), "{said}");
        assert!(said.trim_end().ends_with("| finish: interrupted]"), "{said}");
        let text = String::from_utf8(text).unwrap();
        if json {
            let answer: Value = serde_json::from_str(&text).unwrap();
            assert_eq!(answer["finish"], "interrupted");
        } else {
            assert!(text.len() > 1);
        }
    }
}

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
        ("CMF_GPU_DEVICE", "cpu"),
        ("CMF_GPU_KV", "f32"),
        ("CMF_GPU_CTX", "64"),
        ("CMF_GPU_VRAM_MB", "1000"),
    ];
    let flags = ["run", "--prompt-tokens", &prompt, "--greedy", "--json", "-n"];
    let ran = run_env(&[&flags[..], &["5"]].concat(), &env);
    assert!(ran.stderr.contains("the memory limit"), "{}", ran.stderr);
    let answer = ran.json();
    assert_eq!(answer["tokens"], serde_json::json!(greedy[..5]));
    assert_eq!((&answer["ctx"], &answer["device"]["kind"]), (&64.into(), &"cpu".into()));
    let answer = run_env(&[&flags[..], &["3", "-c", "128", "--device", "auto"]].concat(), &env).json();
    assert_eq!(answer["tokens"], serde_json::json!(greedy[..3]));
    assert_eq!(answer["ctx"], 128);
    assert_ne!(answer["device"]["kind"], "cpu");
    run_env(&["run", "-p", "x"], &[env[0], ("CMF_GPU_CTX", "long")]).fails(2, "Usage");
}

#[test]
fn other_environment_variables_have_no_effect() {
    let others = [
        ("CMF_GPU_JSON", "1"),
        ("CMF_GPU_QUIET", "1"),
        ("CMF_GPU_MAX_TOKENS", "5"),
        ("CMF_GPU_TEMP", "warm"),
        ("CMF_GPU_PROMPT_TOKENS", "1"),
        ("CMF_GPU_FORCE", "1"),
        ("CMF_GPU_OUT", "/no/such/directory/out"),
    ];
    let plain = ["run", model(), "-p", "x", "-n", "2", "--greedy"];
    let (set, unset) = (run_env(&plain, &others), run(&plain));
    assert_eq!((set.code, &set.stdout), (Some(0), &unset.stdout));
    assert!(set.stderr.contains("| gen 2 tok "), "{}", set.stderr);
    run_env(&["compact", model()], &others).fails(2, "Usage");
}

#[test]
fn the_model_of_tokenize_is_given_by_position_flag_or_environment() {
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

/// Would fail: a rate for a single token, or no note about a context longer than in training.
#[test]
fn notes_about_an_answer() {
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
    // More than a pipe holds, and a very long answer; with some other seeds it would end at once.
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
    // This greedy answer goes on until the context is full.
    let prompt = ids(&golden(1).0);
    for json in [false, true] {
        let mut command = program();
        command.args(["run", model(), "--prompt-tokens", &prompt, "-n", "100000", "--greedy"]);
        if json {
            command.arg("--json");
        }
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut notes = String::new();
        // The last line before the answer.
        while !notes.contains("loaded in") {
            assert!(stderr.read_line(&mut notes).unwrap() > 0, "{notes}");
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
        stderr.read_to_string(&mut notes).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(130), "{notes}");
        assert!(notes.trim_end().ends_with("| finish: interrupted]"), "{notes}");
        let text = String::from_utf8(text).unwrap();
        if json {
            let answer: Value = serde_json::from_str(&text).unwrap();
            assert_eq!(answer["finish"], "interrupted");
        } else {
            assert!(text.len() > 1);
        }
    }
}

/// Lines that are pasted, or typed while another command runs, arrive together. `script` gives the program a terminal.
#[cfg(target_os = "linux")]
#[test]
fn a_chat_keeps_lines_that_arrive_together() {
    let chat = format!("{} run {} --device cpu", env!("CARGO_BIN_EXE_cmf-gpu"), model());
    let mut script = Command::new("script")
        .args(["-qec", &chat, "/dev/null"])
        .env("TERM", "xterm")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = script.stdin.take().unwrap();
    stdin
        .write_all(b"/set temp 0.1\n/set top-k 7\n/set min-p 0.25\n/set\n")
        .unwrap();
    drop(stdin);
    let output = script.wait_with_output().unwrap();
    let screen = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{screen}");
    let settings = &screen[screen.rfind("top-p").unwrap_or_default()..];
    assert!(settings.contains("min-p 0.25"), "{screen}");
    // Each is echoed by its own command, and again by the last.
    assert!(screen.matches("\ntop-k 7").count() == 2, "{screen}");
}

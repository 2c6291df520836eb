//! The program: what it prints, writes and says when the world is not as it should be.

use crate::permutation::{FIRST, Permutation};
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// The program, without what the environment of the tests says to it.
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
pub fn said(output: &Output) -> (Option<i32>, String, String) {
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
    said(&command.output().unwrap())
}

/// The answer ends in an error and exit 0, or what was said before is gone.
#[test]
fn logits_that_are_no_numbers_are_exit_1_after_the_text() {
    let mut model = Permutation::saying(&[b"good ", b"until", b"here"]);
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

/// Control characters that a model says reach the terminal, or stop texts only work with one of the outputs.
#[test]
fn both_outputs_say_the_same() {
    let pieces: [&[u8]; 5] = [b"a\"\\", b"\xe2\x82", b"\xac\n", b"ST", b"OP!"];
    let (_dir, path) = Permutation::saying(&pieces).file();
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

/// Two runs at once wait for each other, or one destroys what the other needs.
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
        let (code, stdout, stderr) = said(&child.wait_with_output().unwrap());
        assert_eq!(
            (code, stdout.trim_end()),
            (Some(0), "ab".repeat(20).as_str()),
            "{stderr}"
        );
    }
}

/// A model in a folder whose name has letters of another language, blanks or emoji is not found.
#[test]
fn paths_that_are_not_ascii_or_long() {
    let dir = tempfile::tempdir().unwrap();
    let mut folder = dir.path().join("модель \u{1f999}");
    // Longer than the 260 characters that used to be all there is.
    for _ in 0..8 {
        folder.push("ein ziemlich langer Name für einen Ordner");
    }
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("模型 é.cmf");
    Permutation::saying(&[b"ok"]).write(&path);
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
    assert_eq!(said(&convert.output().unwrap()).0, Some(0));
    for command in ["info", "verify"] {
        let (code, _, stderr) = said(&program().arg(command).arg(&copy).output().unwrap());
        assert_eq!(code, Some(0), "{stderr}");
    }
    assert_eq!(run(&copy, &[]).1, "ok\n");
}

/// A name that is no text at all makes the program panic.
#[cfg(target_os = "linux")]
#[test]
fn paths_that_are_no_text() {
    use std::os::unix::ffi::OsStrExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(std::ffi::OsStr::from_bytes(b"caf\xe9.cmf"));
    Permutation::saying(&[b"ok"]).write(&path);
    assert_eq!(run(&path, &[]).1, "ok\n");
    let (code, stdout, stderr) = said(&program().arg("info").arg(&path).arg("--json").output().unwrap());
    assert_eq!(code, Some(0), "{stderr}");
    assert!(serde_json::from_str::<serde_json::Value>(&stdout).is_ok());
}

/// The largest context there is overflows something.
#[test]
fn absurd_numbers_are_refused_or_mean_what_they_say() {
    let (_dir, path) = Permutation::saying(&[b"ok"]).file();
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

//! Writing files: a conversion that fails leaves no file and reports why.

use crate::permutation::Permutation;
use crate::process::{output_of, program};
use std::path::Path;

/// Names of the files in a directory, sorted.
pub fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn convert(src: &Path, out: &Path) -> (Option<i32>, String, String) {
    output_of(&program().arg("convert").arg(src).arg("-o").arg(out).output().unwrap())
}

/// Guards against an incomplete output file on a full disk.
///
/// A limit on the file size simulates the full disk: with the signal ignored, writing fails with an error.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_leaves_nothing() {
    let (dir, path) = Permutation::answering(&[b"x"]).file();
    let out = dir.path().join("out.cmf");
    let script = "trap '' XFSZ; ulimit -f $1; shift; exec \"$@\"";
    // In blocks of 512 or 1024 bytes: writing fails at once, within the weights, or within the last section.
    for blocks in ["0", "8", "30"] {
        for old in [None, Some(b"an older file")] {
            if let Some(old) = old {
                std::fs::write(&out, old).unwrap();
            }
            let mut command = std::process::Command::new("sh");
            command
                .args(["-c", script, "sh", blocks])
                .arg(env!("CARGO_BIN_EXE_cmf-gpu"));
            command
                .arg("convert")
                .arg(&path)
                .arg("-o")
                .arg(&out)
                .args(["--quant", "f32"]);
            let (code, stdout, stderr) = output_of(&command.output().unwrap());
            assert_eq!((code, stdout.as_str()), (Some(1), ""), "{stderr}");
            assert!(
                stderr.starts_with("error: Io: ") && stderr.contains("out.cmf"),
                "{stderr}"
            );
            match old {
                None => assert_eq!(names(dir.path()), ["model.cmf"]),
                Some(old) => {
                    assert_eq!(names(dir.path()), ["model.cmf", "out.cmf"]);
                    assert_eq!(std::fs::read(&out).unwrap(), old);
                    std::fs::remove_file(&out).unwrap();
                }
            }
        }
    }
}

/// Guards against unwritable outputs that are detected late, or that replace devices and directories.
#[cfg(unix)]
#[test]
fn outputs_that_cannot_be_written_are_refused_by_name() {
    let (dir, path) = Permutation::answering(&[b"x"]).file();
    let long = dir.path().join("x".repeat(300));
    let folder = dir.path().join("folder");
    std::fs::create_dir(&folder).unwrap();
    let missing = dir.path().join("missing/out.cmf");
    let below_a_file = path.join("out.cmf");
    for out in [
        Path::new("/dev/full"),
        Path::new("/dev/null"),
        &long,
        &folder,
        &missing,
        &below_a_file,
    ] {
        let (code, stdout, stderr) = convert(&path, out);
        assert_eq!((code, stdout.as_str()), (Some(1), ""), "{out:?} {stderr}");
        assert!(
            stderr.starts_with("error: Io: ") && stderr.lines().count() == 1,
            "{stderr}"
        );
        assert!(stderr.contains(out.to_str().unwrap()), "{stderr}");
    }
    use std::os::unix::fs::FileTypeExt;
    assert!(std::fs::metadata("/dev/full").unwrap().file_type().is_char_device());
    assert_eq!(names(dir.path()), ["folder", "model.cmf"]);
}

/// Guards against refusing unusual but valid file names.
#[cfg(unix)]
#[test]
fn unusual_file_names_are_valid() {
    let (dir, path) = Permutation::answering(&[b"x"]).file();
    for name in ["CON", "a:b", "dot.", "blank ", "\u{1f999}.cmf", "-o", "new\nline"] {
        let out = dir.path().join(name);
        let (code, stdout, stderr) = convert(&path, &out);
        assert_eq!(code, Some(0), "{stderr}");
        assert_eq!(stdout.lines().count(), 1, "a name draws on the terminal: {stdout:?}");
        assert!(out.is_file());
    }
}

/// Guards against overwriting the source through a link or another path.
#[cfg(unix)]
#[test]
fn converting_a_file_onto_itself_is_refused_by_any_name() {
    let (dir, path) = Permutation::answering(&[b"x"]).file();
    let before = std::fs::read(&path).unwrap();
    let link = dir.path().join("link.cmf");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let dotted = dir
        .path()
        .join("../")
        .join(dir.path().file_name().unwrap())
        .join("model.cmf");
    for out in [&path, &link, &dotted] {
        let (code, _, stderr) = convert(&path, out);
        assert_eq!(code, Some(2), "{stderr}");
        assert!(stderr.starts_with("error: Usage: "), "{stderr}");
        assert_eq!(std::fs::read(&path).unwrap(), before);
    }
}

//! Writing: a conversion that cannot be finished leaves nothing, and says why.

use crate::permutation::Permutation;
use crate::process::{program, said};
use std::path::Path;

/// Files of a directory, by name.
pub fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn convert(src: &Path, out: &Path) -> (Option<i32>, String, String) {
    said(&program().arg("convert").arg(src).arg("-o").arg(out).output().unwrap())
}

/// A full disk leaves half a file under the name of a whole one.
///
/// The limit on the size of files stands for the disk; a program that ignores the signal gets an error, as from a disk.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_leaves_nothing() {
    let (dir, path) = Permutation::saying(&[b"x"]).file();
    let out = dir.path().join("out.cmf");
    let script = "trap '' XFSZ; ulimit -f $1; shift; exec \"$@\"";
    // In blocks of 512 or 1024 bytes: nothing at all, within the weights, within the last section.
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
            let (code, stdout, stderr) = said(&command.output().unwrap());
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

/// An output that cannot be written is found out after an hour, or replaces what it must not replace.
#[cfg(unix)]
#[test]
fn outputs_that_cannot_be_written_are_refused_by_name() {
    let (dir, path) = Permutation::saying(&[b"x"]).file();
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

/// Names that are odd, but names.
#[cfg(unix)]
#[test]
fn odd_names_are_names() {
    let (dir, path) = Permutation::saying(&[b"x"]).file();
    for name in ["CON", "a:b", "dot.", "blank ", "\u{1f999}.cmf", "-o", "new\nline"] {
        let out = dir.path().join(name);
        let (code, stdout, stderr) = convert(&path, &out);
        assert_eq!(code, Some(0), "{stderr}");
        assert_eq!(stdout.lines().count(), 1, "a name draws on the terminal: {stdout:?}");
        assert!(out.is_file());
    }
}

/// The target is a link, and the link is replaced instead of being refused or followed by half a file.
#[cfg(unix)]
#[test]
fn converting_a_file_onto_itself_is_refused_by_any_name() {
    let (dir, path) = Permutation::saying(&[b"x"]).file();
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

//! Signing files and checking signatures.

use super::fixture;
use cmf_gpu::Kind;
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::tools::sign::{PublicKey, Verdict, check, path_beside, sign};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Copies of the given fixtures, and two keys, `a` and `b`.
fn copies(names: &[&str]) -> (TempDir, Vec<PathBuf>) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a"), "01".repeat(32)).unwrap();
    std::fs::write(dir.path().join("b"), "02".repeat(32)).unwrap();
    let copy = |name: &&str| {
        let to = dir.path().join(name);
        std::fs::copy(fixture("interop").join(name), &to).unwrap();
        to
    };
    let paths = names.iter().map(copy).collect();
    (dir, paths)
}

fn signed(model: &Path, key: &Path) -> PublicKey {
    let signed = sign(model, key, &mut |_, _| ControlFlow::Continue(())).unwrap();
    signed[0].key
}

fn checked(paths: &[PathBuf], pinned: Option<PublicKey>) -> Result<Verdict, String> {
    check(paths, pinned, &mut |_, _| ControlFlow::Continue(())).map_err(|err| {
        assert_eq!(err.kind, Kind::SignatureInvalid, "{err}");
        err.message
    })
}

#[test]
fn a_signature_is_valid_for_one_file_and_one_key() {
    let (dir, paths) = copies(&["qwen2-q4tp-gfx-skillfile.cmf"]);
    assert_eq!(checked(&paths, None), Ok(Verdict::Unsigned));
    let key = signed(&paths[0], &dir.path().join("a"));
    assert!(checked(&paths, None) == Ok(Verdict::Valid { key, pinned: false }));
    assert!(checked(&paths, Some(key)) == Ok(Verdict::Valid { key, pinned: true }));
    assert_eq!(PublicKey::from_hex(&key.to_hex()), Ok(key));

    let other = signed(&paths[0], &dir.path().join("b"));
    assert_ne!(other, key);
    assert!(
        checked(&paths, Some(key)).unwrap_err().contains("expected"),
        "another signer than the pinned one"
    );
    signed(&paths[0], &dir.path().join("a"));
    let mut bytes = std::fs::read(&paths[0]).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&paths[0], bytes).unwrap();
    assert!(checked(&paths, None).unwrap_err().contains("for a file with SHA-256"));
    std::fs::remove_file(path_beside(&paths[0])).unwrap();
    assert!(
        checked(&paths, Some(key))
            .unwrap_err()
            .contains("the model is not signed")
    );
}

#[test]
fn only_regular_files_are_read_as_signatures() {
    let (_dir, paths) = copies(&["qwen2-q4tp-gfx-skillfile.cmf"]);
    let beside = path_beside(&paths[0]);
    std::fs::create_dir(&beside).unwrap();
    assert!(checked(&paths, None).unwrap_err().contains("expected a regular file"));
    std::fs::remove_dir(&beside).unwrap();
    std::fs::write(&beside, vec![b' '; 10 << 20]).unwrap();
    assert!(checked(&paths, None).unwrap_err().contains("more than"));
    #[cfg(unix)]
    {
        std::fs::remove_file(&beside).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &beside).unwrap();
        assert!(checked(&paths, None).unwrap_err().contains("expected a regular file"));
    }
}

#[test]
fn every_shard_is_signed() {
    let name = |no: u32| format!("llama_tied-q8_row-sharded-0000{no}-of-00003.cmf");
    let (dir, _) = copies(&[&name(1), &name(2), &name(3)]);
    let key = signed(&dir.path().join(name(2)), &dir.path().join("a"));
    let paths = CmfContainer::open(&dir.path().join(name(1)))
        .unwrap()
        .shard_paths()
        .to_vec();
    assert_eq!(checked(&paths, Some(key)), Ok(Verdict::Valid { key, pinned: true }));
    let third = path_beside(&dir.path().join(name(3)));
    let good = std::fs::read(&third).unwrap();
    std::fs::copy(path_beside(&paths[1]), &third).unwrap();
    assert!(
        checked(&paths, None).unwrap_err().contains(&name(3)),
        "that of another shard"
    );
    std::fs::remove_file(&third).unwrap();
    assert!(checked(&paths, None).unwrap_err().contains("not signed"));
    std::fs::write(&third, good).unwrap();
    assert!(checked(&paths, None).is_ok());
}

/// Errors name the signature file exactly once.
#[test]
fn an_invalid_signature_file_is_named_once() {
    let (dir, paths) = copies(&["qwen2-q4tp-gfx-skillfile.cmf"]);
    let beside = path_beside(&paths[0]);
    let once = |what: &str| {
        let message = checked(&paths, None).unwrap_err();
        let name = beside.display().to_string();
        assert_eq!(message.matches(&name).count(), 1, "{what}: {message}");
    };
    signed(&paths[0], &dir.path().join("a"));
    let good = std::fs::read_to_string(&beside).unwrap();
    std::fs::write(&beside, " ".repeat(20_000)).unwrap();
    once("too long");
    std::fs::write(&beside, "{}").unwrap();
    once("empty");
    std::fs::write(&beside, good.replace("\"sha256\":\"", "\"sha256\":\"0")).unwrap();
    once("no digest");
    std::fs::write(&beside, good).unwrap();
    let mut file = std::fs::OpenOptions::new().append(true).open(&paths[0]).unwrap();
    std::io::Write::write_all(&mut file, b"x").unwrap();
    once("of other bytes");
    std::fs::remove_file(&beside).unwrap();
    std::fs::create_dir(&beside).unwrap();
    once("a directory");
}

#[test]
fn a_cancelled_signature_leaves_nothing() {
    let (dir, paths) = copies(&["qwen2-q4tp-gfx-skillfile.cmf"]);
    let err = sign(&paths[0], &dir.path().join("a"), &mut |_, _| ControlFlow::Break(())).unwrap_err();
    assert_eq!(err.kind, Kind::Interrupted);
    assert!(!path_beside(&paths[0]).exists());
}

//! CMF files: parsing, validation, writing, and the tools that write them.

#[path = "../golden/mod.rs"]
mod golden;
mod interop;
mod lazy;
mod malformed;
mod malformed_header;
mod masks;
mod ninfer;
mod pipelines;
mod raw;
mod read;
mod shards;
mod sign;
mod skills;
mod ternary;
mod tools;
mod write;

use cmf_gpu::Error;
use cmf_gpu::format::cmf::CmfContainer;
use std::path::PathBuf;
use tempfile::TempDir;

/// `bytes` as a file in a directory of its own.
fn on_disk(bytes: &[u8]) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.cmf");
    std::fs::write(&path, bytes).unwrap();
    (dir, path)
}

/// The error of opening `bytes`; `Err` if they open.
fn refusal(bytes: &[u8]) -> Result<Error, String> {
    let (_dir, path) = on_disk(bytes);
    match CmfContainer::open(&path) {
        Err(err) => Ok(err),
        Ok(_) => Err("was opened".into()),
    }
}

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

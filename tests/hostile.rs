//! Sizes in a file that no file can have: refused at once, without memory for them. A test program of its own, so that only
//! these files are measured.
#![cfg(target_os = "linux")]

use cmf_gpu::source;
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

/// The longest time and the most memory for one file.
const TIME: Duration = Duration::from_secs(1);
const MEMORY_KIB: u64 = 64 << 10;
/// The length of the files, most of which is a hole: so sizes are not refused because the file is short.
const LENGTH: u64 = 1 << 32;

/// The most memory that this process has used, in KiB.
fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn ninfer(json_bytes: Option<u64>, directory: &str) -> Vec<u8> {
    let mut bytes = b"NINFER\0\x02".to_vec();
    bytes.extend(json_bytes.unwrap_or(directory.len() as u64).to_le_bytes());
    bytes.extend(directory.as_bytes());
    bytes
}

/// A directory with one tensor of these members.
fn tensor(shape: &str, format: &str, layout: &str, offset: u64, bytes: u64) -> Vec<u8> {
    let entry = format!(
        r#"{{"name":"a","kind":"tensor","shape":{shape},"format":"{format}","layout":"{layout}","offset":{offset},"bytes":{bytes}}}"#
    );
    let identity = r#"{"model_id":"qwen3.6-27b","weights_id":"b"}"#;
    ninfer(None, &format!(r#"{{"identity":{identity},"objects":[{entry}]}}"#))
}

/// A GGUF file with these counts and bytes after them.
fn gguf(tensors: u64, keys: u64, rest: &[&[u8]]) -> Vec<u8> {
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend(tensors.to_le_bytes());
    bytes.extend(keys.to_le_bytes());
    rest.iter().for_each(|part| bytes.extend(*part));
    bytes
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// A tensor record of a GGUF file.
fn record(dims: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let mut bytes = text("a");
    bytes.extend((dims.len() as u32).to_le_bytes());
    dims.iter().for_each(|dim| bytes.extend(dim.to_le_bytes()));
    bytes.extend(kind.to_le_bytes());
    bytes.extend(offset.to_le_bytes());
    bytes
}

/// A key with an array of `len` values of a type.
fn array(of: u32, len: u64) -> Vec<u8> {
    [
        &text("k")[..],
        &9u32.to_le_bytes(),
        &of.to_le_bytes(),
        &len.to_le_bytes(),
    ]
    .concat()
}

fn cases() -> Vec<(&'static str, Vec<u8>)> {
    let (words, planes) = ("contiguous-le-v1", "row-split-k128-v1");
    let most = u64::MAX;
    vec![
        ("x.ninfer", ninfer(Some(most), "{}")),
        ("x.ninfer", ninfer(Some(most - 4096), "{}")),
        ("x.ninfer", ninfer(Some(LENGTH - 8192), "{}")),
        ("x.ninfer", ninfer(Some(1 << 63), "{}")),
        ("x.ninfer", ninfer(None, &"[".repeat(4 << 20))),
        ("x.ninfer", tensor("[18446744073709551615,2]", "FP32", words, 0, 8)),
        ("x.ninfer", tensor("[4294967296,4294967296]", "BF16", words, 0, 8)),
        (
            "x.ninfer",
            tensor("[1099511627776,1048576]", "PTQ1_0_G128", planes, 0, 8),
        ),
        (
            "x.ninfer",
            tensor("[18446744073709551615,1]", "PQ2_0_G128", planes, 0, most),
        ),
        ("x.ninfer", tensor("[1]", "FP32", words, most - 255, 4)),
        ("x.ninfer", tensor("[1073741823]", "FP32", words, 0, 4_294_967_292)),
        ("x.gguf", gguf(most, 0, &[])),
        ("x.gguf", gguf(0, most, &[])),
        ("x.gguf", gguf(LENGTH / 33, 0, &[])),
        ("x.gguf", gguf(0, LENGTH / 14, &[])),
        ("x.gguf", gguf(0, 1, &[&most.to_le_bytes()])),
        ("x.gguf", gguf(0, 1, &[&array(8, 1 << 60)])),
        ("x.gguf", gguf(0, 1, &[&array(0, LENGTH / 2)])),
        ("x.gguf", gguf(0, 1, &[&array(10, most / 8)])),
        ("x.gguf", gguf(1, 0, &[&record(&[1 << 62, 4], 0, 0)])),
        ("x.gguf", gguf(1, 0, &[&record(&[1 << 40, 1 << 20], 8, 0)])),
        ("x.gguf", gguf(1, 0, &[&record(&[32], 0, most - 31)])),
        ("x.gguf", gguf(1, 0, &[&record(&[1 << 29, 1], 0, 0)])),
    ]
}

#[test]
fn sizes_that_no_file_has_take_no_time_and_no_memory() {
    let dir = tempfile::tempdir().unwrap();
    // The first error loads what all of them need.
    assert!(source::open(Path::new("no such file.gguf")).is_err());
    for (i, (name, bytes)) in cases().into_iter().enumerate() {
        let path = dir.path().join(format!("{i}{name}"));
        std::fs::write(&path, &bytes).unwrap();
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(LENGTH)
            .unwrap();
        drop(bytes);
        let (before, start) = (peak_kib(), Instant::now());
        let found = source::open(&path).map(drop);
        let took = start.elapsed();
        let used = peak_kib() - before;
        let err = found.expect_err(name);
        assert!(
            took < TIME && used < MEMORY_KIB,
            "case {i}: {took:?}, {used} KiB: {err}"
        );
        assert!(err.kind != cmf_gpu::Kind::Internal, "case {i}: {err}");
    }
}

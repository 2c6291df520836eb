//! Opening a file reads its directory but not its weights.

#![cfg(target_os = "linux")]

use super::raw::{Raw, record, sample};
use cmf_gpu::format::cmf::CmfContainer;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

const TENSORS: usize = 75_000;
const BYTES: u64 = 100 << 30;
/// Bytes of a tensor: 75,000 of them make 100 GB.
const EACH: u64 = BYTES / TENSORS as u64 / 4096 * 4096;

/// A sparse file with 75,000 q8_row tensors, whose weights occupy no disk space.
fn huge(path: &Path) {
    let raw = sample().with(|raw: &mut Raw| {
        (raw.features, raw.masks, raw.vocab, raw.index) = (1, Vec::new(), Vec::new(), Vec::new());
        // rows · (1022 + 2) bytes
        let rows = (EACH / 1024) as u32;
        raw.records = (0..TENSORS)
            .map(|i| {
                let name = format!("model.layers.{}.mlp.experts.{}.gate_proj.weight", i / 512, i % 512);
                let mut record = record(&name, 3, &[rows, 1022], Vec::new());
                (record.off, record.nbytes) = (Some(i as u64 * EACH), Some(EACH));
                record
            })
            .collect();
    });
    let (mut head, _) = raw.head_and_blob();
    head[0x38..0x40].copy_from_slice(&(TENSORS as u64 * EACH).to_le_bytes());
    let mut file = File::create(path).unwrap();
    file.write_all(&head).unwrap();
    file.set_len(head.len() as u64 + TENSORS as u64 * EACH).unwrap();
}

/// Resident bytes of the mapping of `path`.
fn resident(path: &Path) -> u64 {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = maps.lines().skip_while(|line| !line.ends_with(path.to_str().unwrap()));
    let rss = lines
        .find_map(|line| line.strip_prefix("Rss:"))
        .expect("the file is mapped");
    rss.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn a_hundred_gigabytes_open_without_reading_weights() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("huge.cmf");
    huge(&path);
    let start = Instant::now();
    let container = CmfContainer::open(&path).unwrap();
    let took = start.elapsed();
    assert_eq!(container.infos().len(), TENSORS);
    assert!(container.file_bytes() > 99 << 30);
    assert!(took < Duration::from_secs(1), "{took:?}");
    let opened = resident(&path);
    let directory = TENSORS as u64 * (56 + 64);
    // The system may map pages next to those that are touched.
    assert!(
        opened < directory + (1 << 20),
        "{opened} bytes are resident, the directory has {directory}"
    );

    // Reading a weight raises the measurement; releasing it lowers it.
    let id = container
        .find("model.layers.100.mlp.experts.7.gate_proj.weight")
        .unwrap();
    assert!(container.bytes(id).unwrap().iter().all(|&byte| byte == 0));
    assert!(resident(&path) >= opened + EACH);
    container.release(id);
    assert!(resident(&path) < opened + EACH / 2);
}

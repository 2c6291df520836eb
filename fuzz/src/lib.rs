//! Shared parts of the fuzz targets: a limit on memory, temporary files, and correct checksums for mutated CMF files.
//!
//! The offsets in a CMF file are repeated here on purpose: the targets must not rely on the code under test.

pub mod file_tools;
pub mod models;

use cmf_gpu::format::hash64;
use std::alloc::{GlobalAlloc, Layout, System};
use std::path::PathBuf;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use tempfile::TempDir;

/// The system allocator, which counts allocated bytes.
pub struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);

/// Most bytes to allocate for any input, and for each byte of the input in addition.
const BASE: usize = 64 << 20;
const PER_BYTE: usize = 64;

// SAFETY: every call is forwarded to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        // SAFETY: the caller upholds the contract of the same function of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        // SAFETY: the caller upholds the contract of the same function of `System`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of the same function of `System`.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        grown(size);
        // SAFETY: the caller upholds the contract of the same function of `System`.
        unsafe { System.realloc(at, layout, size) }
    }
}

fn grown(by: usize) {
    let live = LIVE.fetch_add(by, Ordering::Relaxed).saturating_add(by);
    if live > LIMIT.load(Ordering::Relaxed) {
        // libFuzzer may allocate while it reports the crash.
        LIMIT.store(usize::MAX, Ordering::Relaxed);
        eprintln!("allocating {by} bytes makes {live} bytes, more than this input may allocate");
        std::process::abort();
    }
}

/// Runs `work` on an input of `len` bytes. Aborts the process if `work` allocates more than the limit for such an
/// input, or if it panics. Panics that the code under test catches are not printed.
pub fn bounded(len: usize, work: impl FnOnce()) {
    static QUIET: LazyLock<()> = LazyLock::new(|| {
        let loud = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if std::env::var_os("FUZZ_LOUD").is_some() {
                loud(info);
            }
        }));
    });
    LazyLock::force(&QUIET);
    let before = LIVE.load(Ordering::Relaxed);
    LIMIT.store(before + BASE + PER_BYTE * len, Ordering::Relaxed);
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    LIMIT.store(usize::MAX, Ordering::Relaxed);
    if done.is_err() {
        eprintln!("a panic was not caught; FUZZ_LOUD=1 prints it");
        std::process::abort();
    }
}

/// A temporary directory, in memory if possible.
pub fn scratch() -> &'static PathBuf {
    static DIR: LazyLock<(TempDir, PathBuf)> = LazyLock::new(|| {
        let dir = tempfile::tempdir_in("/dev/shm")
            .or_else(|_| tempfile::tempdir())
            .expect("a temporary directory");
        let path = dir.path().to_owned();
        (dir, path)
    });
    &DIR.1
}

/// Writes `bytes` to the file `name` in [`scratch`] and returns its path.
pub fn on_disk(name: &str, bytes: &[u8]) -> PathBuf {
    let path = scratch().join(name);
    std::fs::write(&path, bytes).expect("a file in the temporary directory");
    path
}

/// The ranges of header, directory, weights and vocabulary as the envelope declares them; `None` for those outside
/// the file.
pub fn sections(file: &[u8]) -> [Option<std::ops::Range<usize>>; 4] {
    [0x10, 0x20, 0x30, 0x50].map(|at| {
        let (off, len) = (u64_at(file, at)?, u64_at(file, at + 8)?);
        let (off, end) = (usize::try_from(off).ok()?, usize::try_from(off.checked_add(len)?).ok()?);
        (end <= file.len() && off >= 128).then_some(off..end)
    })
}

/// Corrects the checksums of tensors, header and directory.
pub fn fix_container(file: &mut [u8]) {
    let [header, directory, data, _] = sections(file);
    if let (Some(directory), Some(data)) = (&directory, data) {
        let count = u64_at(file, directory.start).unwrap_or(0).min(1024) as usize;
        for record in 0..count {
            let at = directory.start + 16 + 56 * record;
            let span = u64_at(file, at + 32).zip(u64_at(file, at + 40));
            let payload = span.and_then(|(off, len)| {
                let start = data.start.checked_add(usize::try_from(off).ok()?)?;
                file.get(start..start.checked_add(usize::try_from(len).ok()?)?)
            });
            if let Some(hash) = payload.map(hash64) {
                put(file, at + 48, hash);
            }
        }
    }
    for (section, at) in [(header, 0x70), (directory, 0x78)] {
        let hash = section.and_then(|section| file.get(section)).map(hash64);
        if let Some(hash) = hash {
            put(file, at, hash);
        }
    }
}

fn u64_at(file: &[u8], at: usize) -> Option<u64> {
    file.get(at..)?.first_chunk().map(|word| u64::from_le_bytes(*word))
}

fn put(file: &mut [u8], at: usize, word: u64) {
    if let Some(target) = file.get_mut(at..at + 8) {
        target.copy_from_slice(&word.to_le_bytes());
    }
}

/// Replaces the bytes of `range` by `with` and updates the envelope. Header and directory may grow into the free
/// space before the weights, the vocabulary at the end of the file may have any length; other ranges keep their
/// length. `None` if the replacement does not fit.
pub fn splice(file: &[u8], range: std::ops::Range<usize>, with: &[u8]) -> Option<Vec<u8>> {
    let [header, directory, data, vocab] = sections(file);
    let mut out = file.to_vec();
    if Some(&range) == header.as_ref() || Some(&range) == directory.as_ref() {
        let (header, directory, data) = (header?, directory?, data?);
        if header.end > directory.start || directory.end > data.start {
            return None;
        }
        let mut head = file[..header.start].to_vec();
        let (h, d) = match range == header {
            true => (with, &file[directory]),
            false => (&file[header.clone()], with),
        };
        put(&mut head, 0x18, h.len() as u64);
        put(&mut head, 0x20, (header.start + h.len()) as u64);
        put(&mut head, 0x28, d.len() as u64);
        head.extend_from_slice(h);
        head.extend_from_slice(d);
        if head.len() > data.start {
            return None;
        }
        head.resize(data.start, 0);
        head.extend_from_slice(&file[data.start..]);
        return Some(head);
    }
    if Some(&range) == vocab.as_ref() && range.end == file.len() {
        put(&mut out, 0x58, with.len() as u64);
        out.truncate(range.start);
        out.extend_from_slice(with);
        return Some(out);
    }
    (with.len() == range.len()).then(|| {
        out[range].copy_from_slice(with);
        out
    })
}

/// Numbers that often break code: limits of integer types, powers of two and their neighbours, and no number at all.
const VALUES: [&str; 28] = [
    "0",
    "1",
    "2",
    "3",
    "5",
    "7",
    "8",
    "16",
    "31",
    "32",
    "33",
    "64",
    "128",
    "255",
    "256",
    "65535",
    "65536",
    "2147483648",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "-1",
    "0.5",
    "1e-40",
    "1e38",
    "null",
    "[]",
];

/// Replaces one number in a JSON text; `seed` chooses the number and its new value. Mutations of single bytes rarely
/// result in valid JSON.
pub fn other_number(json: &[u8], seed: u32) -> Vec<u8> {
    let in_number = |byte: u8| byte.is_ascii_digit() || matches!(byte, b'.' | b'-' | b'+' | b'e' | b'E');
    let starts = |&at: &usize| {
        json[at].is_ascii_digit() && matches!(at.checked_sub(1).map(|b| json[b]), Some(b':' | b',' | b'[' | b' '))
    };
    let numbers: Vec<usize> = (0..json.len()).filter(starts).collect();
    let Some(&at) = numbers.get(seed as usize % numbers.len().max(1)) else {
        return json.to_vec();
    };
    let len = json[at..].iter().take_while(|&&byte| in_number(byte)).count();
    let value = VALUES[(seed >> 16) as usize % VALUES.len()];
    [&json[..at], value.as_bytes(), &json[at + len..]].concat()
}

/// Splits an input into two files: a u16 length, the first file, the second file.
pub fn split_input(input: &[u8]) -> (&[u8], &[u8]) {
    let Some((len, rest)) = input.split_first_chunk::<2>() else {
        return (input, &[]);
    };
    rest.split_at(usize::from(u16::from_le_bytes(*len)).min(rest.len()))
}

/// The inverse of [`split_input`].
pub fn join_input(first: &[u8], second: &[u8]) -> Vec<u8> {
    [&(first.len() as u16).to_le_bytes()[..], first, second].concat()
}

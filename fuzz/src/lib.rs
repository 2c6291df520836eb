//! What the targets share: a bound on memory, files to open, and checksums that are always right.
//!
//! Knows where checksums lie in a container, written down here once more and not taken from the code under test.

pub mod use_as_files;

use cmf_gpu::container::hash64;
use std::alloc::{GlobalAlloc, Layout, System};
use std::path::PathBuf;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use tempfile::TempDir;

/// The system's allocator, counting.
pub struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);

/// Bytes that any input may cost, and how many more for each of its own.
const BASE: usize = 64 << 20;
const PER_BYTE: usize = 64;

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        grown(size);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(at, layout, size) }
    }
}

fn grown(by: usize) {
    let live = LIVE.fetch_add(by, Ordering::Relaxed).saturating_add(by);
    if live > LIMIT.load(Ordering::Relaxed) {
        // The fuzzer's own report of the crash may allocate.
        LIMIT.store(usize::MAX, Ordering::Relaxed);
        eprintln!("an allocation of {by} bytes makes {live}, more than this input may cost");
        std::process::abort();
    }
}

/// Runs `work` on an input of `len` bytes; allocations far beyond that end the process.
///
/// Panics that the code under test catches are silent; those it does not catch end the process, too.
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
        eprintln!("a panic that nothing caught; FUZZ_LOUD=1 shows it");
        std::process::abort();
    }
}

/// A directory in memory, where there is one.
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

/// `bytes` as the file `name` of [`scratch`].
pub fn on_disk(name: &str, bytes: &[u8]) -> PathBuf {
    let path = scratch().join(name);
    std::fs::write(&path, bytes).expect("a file in the temporary directory");
    path
}

/// Where the header, the directory, the blob and the vocabulary say they are, if that is in the file.
pub fn sections(file: &[u8]) -> [Option<std::ops::Range<usize>>; 4] {
    [0x10, 0x20, 0x30, 0x50].map(|at| {
        let (off, len) = (u64_at(file, at)?, u64_at(file, at + 8)?);
        let (off, end) = (usize::try_from(off).ok()?, usize::try_from(off.checked_add(len)?).ok()?);
        (end <= file.len() && off >= 128).then_some(off..end)
    })
}

/// Makes the checksums of payloads, header and directory those that a reader wants to see.
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
    if let Some(place) = file.get_mut(at..at + 8) {
        place.copy_from_slice(&word.to_le_bytes());
    }
}

/// Replaces a part of a file by `with`. Header and directory may grow into the room before the blob, so that a longer header
/// is still a header.
pub fn splice(file: &[u8], part: std::ops::Range<usize>, with: &[u8]) -> Option<Vec<u8>> {
    let [header, directory, data, vocab] = sections(file);
    let mut out = file.to_vec();
    let delta = with.len() as i64 - part.len() as i64;
    if Some(&part) == header.as_ref() || Some(&part) == directory.as_ref() {
        let (header, directory, data) = (header?, directory?, data?);
        if header.end > directory.start || directory.end > data.start {
            return None;
        }
        let mut head = file[..header.start].to_vec();
        let (h, d) = match part == header {
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
    if Some(&part) == vocab.as_ref() && part.end == file.len() {
        put(&mut out, 0x58, with.len() as u64);
        out.truncate(part.start);
        out.extend_from_slice(with);
        return Some(out);
    }
    (delta == 0).then(|| {
        out[part].copy_from_slice(with);
        out
    })
}

/// Values that sizes, counts and constants go wrong at.
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

/// JSON with one of its numbers, chosen by `seed`, replaced. Bytes alone seldom change into another text that is JSON.
pub fn other_number(json: &[u8], seed: u32) -> Vec<u8> {
    let part_of_number = |byte: u8| byte.is_ascii_digit() || matches!(byte, b'.' | b'-' | b'+' | b'e' | b'E');
    let starts = |&at: &usize| {
        json[at].is_ascii_digit() && matches!(at.checked_sub(1).map(|b| json[b]), Some(b':' | b',' | b'[' | b' '))
    };
    let numbers: Vec<usize> = (0..json.len()).filter(starts).collect();
    let Some(&at) = numbers.get(seed as usize % numbers.len().max(1)) else {
        return json.to_vec();
    };
    let len = json[at..].iter().take_while(|&&byte| part_of_number(byte)).count();
    let value = VALUES[(seed >> 16) as usize % VALUES.len()];
    [&json[..at], value.as_bytes(), &json[at + len..]].concat()
}

/// Two parts in one input: a length, the first part, the second.
pub fn halves(input: &[u8]) -> (&[u8], &[u8]) {
    let Some((len, rest)) = input.split_first_chunk::<2>() else {
        return (input, &[]);
    };
    rest.split_at(usize::from(u16::from_le_bytes(*len)).min(rest.len()))
}

/// What [`halves`] takes apart.
pub fn joined(first: &[u8], second: &[u8]) -> Vec<u8> {
    [&(first.len() as u16).to_le_bytes()[..], first, second].concat()
}

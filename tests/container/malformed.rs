//! Malformed files, as tables: description, kind of the error, part of its text.

use super::raw::{Raw, record, sample};
use super::{on_disk, refusal};
use cmf_gpu::Kind::{self, *};
use cmf_gpu::format::cmf::CmfContainer;

pub(super) struct Case {
    what: String,
    file: Vec<u8>,
    kind: Kind,
    says: &'static str,
}

pub(super) fn case(what: impl Into<String>, file: impl Into<Vec<u8>>, kind: Kind, says: &'static str) -> Case {
    Case {
        what: what.into(),
        file: file.into(),
        kind,
        says,
    }
}

/// The sample file with `bytes` written at `at`.
fn patched(at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut file = sample().build();
    file[at..at + bytes.len()].copy_from_slice(bytes);
    file
}

fn word(at: usize, v: u64) -> Vec<u8> {
    patched(at, &v.to_le_bytes())
}

pub(super) fn changed(change: impl FnOnce(&mut Raw)) -> Vec<u8> {
    sample().with(change).build()
}

fn payload(name: &str, change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    changed(|raw| change(&mut raw.record(name).payload))
}

pub(super) fn check(cases: Vec<Case>) {
    let mut wrong = Vec::new();
    for Case { what, file, kind, says } in cases {
        match refusal(&file) {
            Ok(err) if err.kind == kind && err.message.contains(says) => {}
            Ok(err) => wrong.push(format!("{what}: expected {}: ..{says}.., found {err}", kind.name())),
            Err(found) => wrong.push(format!("{what}: {found}")),
        }
    }
    assert!(wrong.is_empty(), "{} cases:\n{}", wrong.len(), wrong.join("\n"));
}

/// The tables below rely on this.
#[test]
fn the_unchanged_sample_is_valid() {
    let (_dir, path) = on_disk(&sample().build());
    let report = CmfContainer::open(&path).unwrap().verify(&mut |_, _| ());
    assert!(report.ok(), "{:?}", report.failures);
}

#[test]
fn foreign_and_short_files() {
    let whole = sample().build();
    let mut cases: Vec<Case> = [0, 1, 3, 4, 127]
        .map(|len| {
            case(
                format!("{len} bytes"),
                &whole[..len],
                Bounds,
                "envelope needs 128 bytes, the file has",
            )
        })
        .into();
    cases.push(case(
        "an envelope alone",
        &whole[..128],
        Bounds,
        "header section at 0x80",
    ));
    let foreign: [(&[u8], &str); 13] = [
        (b"CMF\x00", "another generation"),
        (b"CMF\x02", "another generation"),
        (b"CMF1", "another generation"),
        (b"GGUF\x03\0\0\0", "GGUF"),
        (b"NINFER\0\x02", ".ninfer"),
        (b"\x1F\x8B\x08", "gzip"),
        (b"PK\x03\x04", "zip archive"),
        (b"<!DOCTYPE html>", "web page"),
        (b"<html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1", "git-lfs pointer"),
        (b"\x28\xB5\x2F\xFD", "zstd"),
        (b"\x40\0\0\0\0\0\0\0{\"a\":", "safetensors"),
        (b"x", "expected magic [43, 4D, 46, 01], found [78]"),
    ];
    for (start, says) in foreign {
        cases.push(case(
            format!("{:?}", start.escape_ascii().to_string()),
            start,
            InvalidMagic,
            says,
        ));
    }
    check(cases);
}

#[test]
fn a_rotation_by_its_feature_bit_only() {
    check(vec![case(
        "bit 7",
        changed(|raw| raw.features |= 1 << 7),
        Parse,
        "feature bit 7 (PRISM_HADAMARD) occur only together",
    )]);
}

#[test]
fn envelope() {
    let len = sample().build().len() as u64;
    let data_off = sample().head_and_blob().0.len() as u64;
    let mut cases = vec![
        case(
            "bit 0 clear",
            changed(|raw| raw.features &= !1),
            UnsupportedFeature,
            "bit 0 (TENSOR_DIR) is clear",
        ),
        case(
            "two unknown bits",
            changed(|raw| raw.features |= 3 << 30),
            UnsupportedFeature,
            "bit 30 (unknown), feature bit 31",
        ),
        case(
            "masks, bit 1 clear",
            changed(|raw| raw.features &= !2),
            Parse,
            "bit 1 (BINARY_MASKS) is clear",
        ),
        case(
            "bit 1, no masks",
            changed(|raw| raw.masks.clear()),
            Parse,
            "BINARY_MASKS) without a masks section",
        ),
        case(
            "bit 5, no masks",
            changed(|raw| {
                raw.features = 0b100101;
                raw.masks.clear();
            }),
            Parse,
            "LOOP_MASKS) without a masks section",
        ),
        case(
            "bit 5, no loops",
            changed(|raw| raw.features |= 1 << 5),
            Parse,
            "num_loops is 1",
        ),
        case(
            "blob not on a page",
            word(0x30, data_off + 64),
            Bounds,
            "multiple of 4096",
        ),
        case("blob at 4095", word(0x30, 4095), Bounds, "multiple of 4096"),
        case(
            "blob in the envelope",
            word(0x30, 0),
            Bounds,
            "weight blob section at 0x0",
        ),
        case(
            "blob empty, tensors not",
            word(0x38, 0),
            Bounds,
            "the weight blob has 0",
        ),
        case(
            "header hash",
            word(0x70, 1),
            HashMismatch,
            "header at 0x80: stored 0000000000000001",
        ),
        case("directory hash", word(0x78, 1), HashMismatch, "directory at"),
        case("a header byte", patched(140, b"X"), HashMismatch, "header"),
        case("empty header", word(0x18, 0), HashMismatch, "header"),
        case("directory of 15 bytes", word(0x28, 15), Bounds, "expected at least 16"),
    ];
    for version in [0u32, 1, 3, u32::MAX] {
        let file = patched(4, &version.to_le_bytes());
        cases.push(case(
            format!("version {version}"),
            file,
            UnsupportedVersion,
            "this program reads version 2",
        ));
    }
    let bits = [
        (3, "bit 3 (DELTA_MASKS)"),
        (4, "bit 4 (HOT_PACKS)"),
        (8, "bit 8 (PRISM_AFFINE)"),
        (9, "bit 9 (SKILLS_V2)"),
        (10, "bit 10 (ROUTER_V2)"),
        (11, "bit 11 (DECISION)"),
        (12, "bit 12 (BOUNDED_STATE)"),
        (13, "bit 13 (GENOME)"),
        (14, "bit 14 (unknown)"),
        (15, "bit 15 (BLOCK_DIFFUSION)"),
        (31, "bit 31 (unknown)"),
    ];
    for (bit, says) in bits {
        cases.push(case(
            format!("bit {bit}"),
            changed(|raw| raw.features |= 1 << bit),
            UnsupportedFeature,
            says,
        ));
    }
    // The index is the last section, of 8 bytes.
    cases.push(case("one byte past the end", word(0x68, 9), Bounds, "index section"));
    cases.push(case(
        "one byte lost",
        &sample().build()[..len as usize - 1],
        Bounds,
        "index section",
    ));
    let sections = [
        (0x10, "header section"),
        (0x20, "directory section"),
        (0x30, "weight blob section"),
        (0x40, "masks section"),
        (0x50, "vocab section"),
        (0x60, "index section"),
    ];
    for (at, name) in sections {
        cases.push(case(format!("{name} past the end"), word(at + 8, len), Bounds, name));
        cases.push(case(
            format!("{name} of 2^64-1 bytes"),
            word(at + 8, u64::MAX),
            Bounds,
            name,
        ));
        cases.push(case(format!("{name} at 2^63"), word(at, 1 << 63), Bounds, name));
        if at != 0x30 {
            cases.push(case(format!("{name} in the envelope"), word(at, 64), Bounds, name));
        }
        if at >= 0x40 {
            cases.push(case(format!("{name} empty"), word(at + 8, 0), Parse, "is empty"));
        }
    }
    for at in [0x10, 0x20] {
        cases.push(case(
            format!("{at:#x}: offset 0"),
            word(at, 0),
            Bounds,
            "section at 0x0",
        ));
    }
    check(cases);
}

#[test]
fn directory() {
    let records = sample().records.len() as u64;
    let first = |change: fn(&mut super::raw::Record)| changed(|raw| change(&mut raw.records[0]));
    let cases = vec![
        case(
            "count 2^64-1",
            changed(|raw| raw.count = Some(u64::MAX)),
            Bounds,
            "too short for 18446744073709551615",
        ),
        case(
            "count wraps",
            changed(|raw| raw.count = Some((1 << 61) + 1)),
            Bounds,
            "too short",
        ),
        case(
            "one record too many",
            changed(|raw| raw.count = Some(records + 2)),
            Bounds,
            "too short",
        ),
        case(
            "pool in the records",
            changed(|raw| raw.pool_off = Some(15 + 56 * records)),
            Bounds,
            "name pool",
        ),
        case(
            "pool past the end",
            changed(|raw| raw.pool_off = Some(1 << 20)),
            Bounds,
            "name pool",
        ),
        case(
            "pool at 2^64-1",
            changed(|raw| raw.pool_off = Some(u64::MAX)),
            Bounds,
            "name pool",
        ),
        case(
            "name past the pool",
            first(|r| r.name_off = Some(1 << 16)),
            Bounds,
            "record 0: name at 65536",
        ),
        case(
            "name at 2^32-1",
            first(|r| r.name_off = Some(u32::MAX)),
            Bounds,
            "record 0: name at",
        ),
        case(
            "name too long",
            first(|r| r.name_len = Some(u16::MAX)),
            Bounds,
            "65535 bytes",
        ),
        case(
            "name empty",
            first(|r| r.name_len = Some(0)),
            Parse,
            "the name is empty",
        ),
        case(
            "name not UTF-8",
            first(|r| r.name = b"\xFF\xFE".into()),
            Parse,
            "record 0: name",
        ),
        case(
            "name twice",
            first(|r| r.name = b"q1".into()),
            Parse,
            "'q1' occurs twice",
        ),
        case(
            "name that draws",
            first(|r| (r.name, r.ndim) = (b"\x1B[2J".into(), 0)),
            Parse,
            "\\u{1b}[2J",
        ),
        case(
            "dtype 5",
            first(|r| r.dtype = 5),
            Parse,
            "tensor 'f32': element type id 5 (mix8_4",
        ),
        case("dtype 6", first(|r| r.dtype = 6), Parse, "id 6 (u8"),
        case("dtype 7", first(|r| r.dtype = 7), Parse, "id 7 (q4_col"),
        case(
            "dtype 16",
            first(|r| r.dtype = 16),
            Parse,
            "tensor 'f32': element type id 16 (q2tp",
        ),
        case("dtype 255", first(|r| r.dtype = 255), Parse, "id 255"),
        case("no dimensions", first(|r| r.ndim = 0), Parse, "0 dimensions"),
        case("7 dimensions", first(|r| r.ndim = 7), Parse, "7 dimensions"),
        case("255 dimensions", first(|r| r.ndim = 255), Parse, "255 dimensions"),
        case("shape behind ndim", first(|r| r.shape[5] = 1), Parse, "is not zero"),
        case("no rows", first(|r| r.shape[0] = 0), Parse, "has no elements"),
        case("no columns", first(|r| r.shape[1] = 0), Parse, "has no elements"),
        case(
            "2^192 elements",
            first(|r| (r.shape, r.ndim) = ([u32::MAX; 6], 6)),
            Bounds,
            "overflows",
        ),
        case(
            "65536 x 65536",
            first(|r| r.shape = [65536, 65536, 0, 0, 0, 0]),
            Parse,
            "expected 17179869184 bytes, found 60",
        ),
        case(
            "q8_row of 1 dimension",
            changed(|raw| raw.record("q8_row").ndim_1(140)),
            Parse,
            "needs a matrix",
        ),
        case(
            "q4tp of 3 dimensions",
            changed(|raw| raw.record("q4tp").ndim_3()),
            Parse,
            "needs a matrix",
        ),
        case(
            "off not 64-aligned",
            first(|r| r.off = Some(32)),
            Bounds,
            "multiple of 64",
        ),
        case(
            "off near 2^64",
            first(|r| r.off = Some(u64::MAX - 10)),
            Bounds,
            "the weight blob has",
        ),
        case(
            "nbytes near 2^64",
            first(|r| r.nbytes = Some(u64::MAX)),
            Bounds,
            "the weight blob has",
        ),
        case(
            "payload past the blob",
            changed(|raw| raw.record("q4tp").nbytes = Some(4096)),
            Bounds,
            "tensor 'q4tp'",
        ),
        case(
            "payloads overlap",
            changed(|raw| {
                // The payload of f32 is the first 60 bytes.
                raw.records.push(record("wide", 1, &[64], vec![0; 128]));
                raw.record("wide").off = Some(0);
            }),
            Bounds,
            "overlap",
        ),
        case(
            "bit 2 clear with q8_2f",
            without("vbit"),
            Parse,
            "tensor 'q8_2f': element type q8_2f, but feature bit 2",
        ),
        case(
            "bit 2 clear with vbit",
            without("q8_2f"),
            Parse,
            "tensor 'vbit': element type vbit, but feature bit 2",
        ),
    ];
    check(cases);
}

/// The sample without one of the tensors that require feature bit 2, and without the bit.
fn without(name: &str) -> Vec<u8> {
    changed(|raw| {
        raw.records.retain(|record| record.name != name.as_bytes());
        raw.features &= !4;
    })
}

impl super::raw::Record {
    fn ndim_1(&mut self, n: u32) {
        (self.ndim, self.shape) = (1, [n, 0, 0, 0, 0, 0]);
    }

    fn ndim_3(&mut self) {
        (self.ndim, self.shape) = (3, [1, 2, 64, 0, 0, 0]);
    }
}

#[test]
fn payloads_of_wrong_length_are_refused() {
    let mut cases = Vec::new();
    for record in sample().records {
        let name = String::from_utf8(record.name).unwrap();
        let len = record.payload.len() as u64;
        for (nbytes, how) in [(len - 1, "short"), (len + 1, "long"), (0, "empty")] {
            let file = changed(|raw| raw.record(&name).nbytes = Some(nbytes));
            cases.push(case(format!("{name} {how}"), file, Parse, "found"));
        }
        if record.dtype >= 8 && record.dtype != 9 {
            let file = changed(|raw| raw.record(&name).shape[1] += 1);
            cases.push(case(
                format!("{name} one column more"),
                file,
                Parse,
                "whole groups of 32",
            ));
        }
    }
    check(cases);
}

#[test]
fn tables_inside_payloads() {
    let mut cases = vec![
        case(
            "vbit_ro first offset",
            payload("vbit_ro", |p| p[6] = 1),
            Parse,
            "row_offsets[0]",
        ),
        case(
            "vbit_ro descending",
            payload("vbit_ro", |p| p[10] = 60),
            Parse,
            "row_offsets[2]",
        ),
        case(
            "vbit_ro last offset",
            payload("vbit_ro", |p| p[14] = 40),
            Parse,
            "packed rows",
        ),
        case(
            "q1s count",
            payload("q1s", |p| p[12] = 3),
            Parse,
            "overlay of 3 entries: expected 18 bytes, found 12",
        ),
        case(
            "q1s count 2^32-1",
            payload("q1s", |p| p[12..16].fill(0xFF)),
            Parse,
            "overlay of 4294967295 entries",
        ),
        case("q1t first pointer", payload("q1t", |p| p[18] = 1), Parse, "row_ptr[0]"),
        case("q1t descending", payload("q1t", |p| p[22] = 9), Parse, "row_ptr[2]"),
        case(
            "q1t last pointer",
            payload("q1t", |p| p[26] = 3),
            Parse,
            "overlay of 3 entries",
        ),
    ];
    for width in [0, 1, 2, 7, 9, 255] {
        for name in ["vbit", "vbit_ro"] {
            let file = payload(name, |p| p[1] = width);
            cases.push(case(
                format!("{name} width {width}"),
                file,
                Parse,
                "row 1: expected a bit width",
            ));
        }
    }
    check(cases);
}

/// Otherwise an incomplete download would open and fail later.
#[test]
fn every_truncation_is_an_error() {
    let whole = sample().build();
    let (_dir, path) = on_disk(&whole);
    assert!(CmfContainer::open(&path).is_ok());
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    for len in (0..whole.len()).rev() {
        file.set_len(len as u64).unwrap();
        let err = CmfContainer::open(&path).map(|_| ()).unwrap_err();
        assert_eq!(err.kind, Bounds, "{len} bytes: {err}");
    }
}

/// The damaged files have valid checksums, so that parsing reaches the damage.
#[test]
fn random_damage_never_panics() {
    let (head, _) = sample().head_and_blob();
    let file = {
        let mut file = sample().build();
        file[0x70..0x80].fill(0);
        file
    };
    let (_dir, path) = on_disk(&file);
    let mut state = 1u64;
    let mut random = |below: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let (mut opened, mut refused) = (0, 0);
    for round in 0..1000 {
        let mut damaged = file.clone();
        for _ in 0..1 + random(3) {
            let at = 4 + random(if round % 4 == 0 { file.len() - 4 } else { head.len() - 4 });
            damaged[at] = [0, 1, 0x40, 0x80, 0xFF, random(256) as u8][random(6)];
        }
        std::fs::write(&path, &damaged).unwrap();
        match CmfContainer::open(&path) {
            Ok(container) => {
                container.verify(&mut |_, _| ());
                opened += 1;
            }
            Err(_) => refused += 1,
        }
    }
    assert!(
        opened > 100 && refused > 100,
        "{opened} opened, {refused} refused: the damage misses its aim"
    );
}

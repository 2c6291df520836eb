//! Damaged and hostile files: each gives a typed error, never a panic or an allocation of unchecked size.

use crate::build::{Block, Gguf, Meta, gguf_of, with_header};
use cmf_gpu::Kind;
use cmf_gpu::format::{gguf, safetensors};

/// A small valid file with one tensor of 4 × 32.
fn small() -> Gguf {
    let mut file = Gguf::new();
    file.set("general.architecture", Meta::Str("llama".into()));
    file.set("some.list", Meta::Strs(vec!["a".into(), "bc".into()]));
    file.f32("t", &[4, 32], &[1.0; 128]);
    file
}

fn refusal(bytes: &[u8]) -> cmf_gpu::Error {
    gguf::Gguf::parse(bytes).map(|_| ()).expect_err("must be refused")
}

#[test]
fn a_small_file_is_sound() {
    let bytes = small().bytes();
    let file = gguf::Gguf::parse(&bytes).unwrap();
    assert_eq!(file.tensors[0].shape, [4, 32]);
    assert_eq!(file.tensors[0].range, bytes.len() - 512..bytes.len());
    assert_eq!(
        file.metadata.strings("some.list", &bytes).unwrap().unwrap(),
        ["a", "bc"]
    );
}

#[test]
fn every_truncation_is_an_error() {
    let bytes = small().bytes();
    for length in 0..bytes.len() {
        let err = refusal(&bytes[..length]);
        assert!(matches!(err.kind, Kind::InvalidMagic | Kind::Bounds), "{length}: {err}");
    }
}

#[test]
fn no_single_byte_makes_the_reader_panic() {
    let bytes = small().bytes();
    for at in 0..bytes.len() - 512 {
        for value in [0, 1, 0x7f, 0x80, 0xff] {
            let mut bytes = bytes.clone();
            bytes[at] = value;
            if let Ok(file) = gguf::Gguf::parse(&bytes) {
                assert!(file.tensors.iter().all(|tensor| tensor.range.end <= bytes.len()));
            }
        }
    }
}

#[test]
fn counts_and_versions() {
    let bytes = small().bytes();
    let patched = |at: usize, value: &[u8]| {
        let mut bytes = bytes.clone();
        bytes[at..at + value.len()].copy_from_slice(value);
        refusal(&bytes)
    };
    for version in [0u32, 1, 4, 99] {
        let err = patched(4, &version.to_le_bytes());
        assert!(
            err.kind == Kind::UnsupportedVersion && err.message.contains(&version.to_string()),
            "{err}"
        );
    }
    let err = patched(4, &3u32.to_be_bytes());
    assert!(
        err.kind == Kind::UnsupportedVersion && err.message.contains("big-endian"),
        "{err}"
    );
    assert_eq!(patched(0, b"GGML").kind, Kind::InvalidMagic);
    for count in [1 << 20, 1 << 63, u64::MAX] {
        assert_eq!(patched(8, &count.to_le_bytes()).kind, Kind::Bounds, "tensors");
        assert_eq!(patched(16, &count.to_le_bytes()).kind, Kind::Bounds, "keys");
    }
    // The first key: its length, its bytes.
    for length in [0u64, 65_536, 1 << 40, u64::MAX] {
        assert!(matches!(
            patched(24, &length.to_le_bytes()).kind,
            Kind::Bounds | Kind::Parse
        ));
    }
    assert!(patched(32, b"\xff\xfe").message.contains("UTF-8"));
}

#[test]
fn metadata_values() {
    let long = |of: u32, len: u64| [of.to_le_bytes().as_slice(), &len.to_le_bytes()].concat();
    let nested = [9u32.to_le_bytes().as_slice(), &1u64.to_le_bytes(), &long(4, 0)].concat();
    for (value, kind, wanted) in [
        (Meta::Raw(13, vec![0; 8]), Kind::Parse, "value type 13"),
        (Meta::Raw(77, vec![0; 8]), Kind::Parse, "value type 77"),
        (Meta::Raw(7, vec![2]), Kind::Parse, "a bool is 0 or 1"),
        (Meta::Raw(8, u64::MAX.to_le_bytes().to_vec()), Kind::Bounds, "'k'"),
        (Meta::Raw(8, (1u64 << 29).to_le_bytes().to_vec()), Kind::Bounds, "'k'"),
        (Meta::Raw(9, nested), Kind::Parse, "nested arrays"),
        (Meta::Raw(9, long(10, 1 << 61)), Kind::Bounds, "uint64"),
        (Meta::Raw(9, long(8, 1 << 61)), Kind::Bounds, "string"),
        (Meta::Raw(9, long(0, u64::MAX)), Kind::Bounds, "uint8"),
        (Meta::Raw(9, long(13, 1)), Kind::Parse, "value type 13"),
        (
            Meta::Raw(9, [long(7, 1), vec![3]].concat()),
            Kind::Parse,
            "a bool is 0 or 1",
        ),
    ] {
        let mut file = small();
        file.metadata.insert(0, ("k".into(), value));
        let err = refusal(&file.bytes());
        assert!(
            err.kind == kind && err.message.replace("k at", "'k' at").contains(wanted),
            "{wanted}: {err}"
        );
    }
    let mut file = small();
    file.metadata.push(("some.list".into(), Meta::U32(0)));
    assert!(refusal(&file.bytes()).message.contains("'some.list' occurs twice"));
    for value in [
        Meta::U32(0),
        Meta::U32(1),
        Meta::U32(33),
        Meta::U32(1 << 31),
        Meta::Raw(5, 32i32.to_le_bytes().to_vec()),
        Meta::Raw(10, 32u64.to_le_bytes().to_vec()),
        Meta::Str("32".into()),
    ] {
        let mut file = small();
        file.set("general.alignment", value);
        let err = refusal(&file.bytes());
        assert!(
            err.kind == Kind::Parse && err.message.contains("'general.alignment'"),
            "{err}"
        );
    }
}

#[test]
fn tensor_records() {
    type Edit = fn(&mut Block);
    let cases: [(Edit, Kind, &str); 23] = [
        (|t| t.name = "n".repeat(65), Kind::Bounds, "65 bytes"),
        (|t| t.name.clear(), Kind::Parse, "empty tensor name"),
        (|t| t.dims.clear(), Kind::Parse, "0 dimensions"),
        (|t| t.dims = vec![32, 1, 1, 1, 4], Kind::Parse, "5 dimensions"),
        (|t| t.dims = vec![32, 0], Kind::Parse, "no elements"),
        (|t| t.dims = vec![0, 32], Kind::Parse, "no elements"),
        (|t| t.dims = vec![1 << 33, 1 << 33], Kind::Bounds, "overflows"),
        (|t| t.dims = vec![(1 << 42) + 1, 1 << 22], Kind::Bounds, "overflows"),
        (|t| t.dims = vec![u64::MAX / 4 + 1], Kind::Bounds, "overflows"),
        (|t| t.dims = vec![32, 5], Kind::Bounds, "needs 640 bytes"),
        (|t| t.kind = 9, Kind::UnsupportedTensorType, "9 (Q8_1)"),
        (|t| t.kind = 15, Kind::UnsupportedTensorType, "15 (Q8_K)"),
        (
            |t| t.kind = 12,
            Kind::Parse,
            "Q4_K needs rows of whole blocks of 256, found 32 columns",
        ),
        (|t| t.kind = 42, Kind::UnsupportedTensorType, "42 (Q2_0)"),
        (|t| t.kind = 42, Kind::UnsupportedTensorType, "64 and of 128 weights"),
        (|t| t.kind = 40, Kind::UnsupportedTensorType, "40 (NVFP4)"),
        (|t| t.kind = 41, Kind::UnsupportedTensorType, "41 (Q1_0)"),
        (|t| t.kind = 4, Kind::UnsupportedTensorType, "4 (an unknown type)"),
        (|t| t.kind = u32::MAX, Kind::UnsupportedTensorType, "4294967295"),
        (
            |t| (t.kind, t.dims) = (8, vec![33, 2]),
            Kind::Parse,
            "Q8_0 needs rows of whole blocks of 32, found 33 columns",
        ),
        (|t| t.offset = Some(4), Kind::Parse, "offset 4"),
        (|t| t.offset = Some(32), Kind::Bounds, "data offset 32"),
        (|t| t.offset = Some(u64::MAX - 31), Kind::Bounds, "data offset"),
    ];
    for (edit, kind, wanted) in cases {
        let mut file = small();
        edit(&mut file.tensors[0]);
        let err = refusal(&file.bytes());
        assert!(err.kind == kind && err.message.contains(wanted), "{wanted}: {err}");
    }
    let mut file = small();
    file.f32("t", &[8], &[0.0; 8]);
    assert!(refusal(&file.bytes()).message.contains("'t' occurs twice"));
    let mut file = small();
    file.f32("u", &[32], &[0.0; 32]);
    file.tensors[1].offset = Some(480);
    let err = refusal(&file.bytes());
    assert!(
        err.kind == Kind::Bounds && err.message.contains("'t' and 'u' overlap"),
        "{err}"
    );
}

#[test]
fn a_long_vocabulary_is_read_in_no_time() {
    let mut file = gguf_of("qwen2");
    file.set(
        "tokenizer.ggml.tokens",
        Meta::Strs((0..250_000).map(|id| format!("token{id}")).collect()),
    );
    let bytes = file.bytes();
    let start = std::time::Instant::now();
    let parsed = gguf::Gguf::parse(&bytes).unwrap();
    assert_eq!(
        parsed
            .metadata
            .strings("tokenizer.ggml.tokens", &bytes)
            .unwrap()
            .unwrap()
            .len(),
        250_000
    );
    assert!(start.elapsed().as_secs_f32() < 1.0);
}

#[test]
fn safetensors_headers() {
    let sound = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F16","shape":[2,2],"data_offsets":[8,16]}}"#;
    let table = safetensors::parse(&with_header(sound, &[0; 16])).unwrap();
    assert_eq!(table.len(), 2);
    assert_eq!(
        (table[1].shape.as_slice(), table[1].range.len()),
        ([2, 2].as_slice(), 8)
    );
    let refusal = |bytes: &[u8]| safetensors::parse(bytes).map(|_| ()).expect_err("must be refused");
    let bytes = with_header(sound, &[0; 16]);
    for length in 0..bytes.len() {
        let err = refusal(&bytes[..length]);
        assert!(matches!(err.kind, Kind::Bounds | Kind::Parse), "{length}: {err}");
    }
    for length in [0u64, 1 << 20, 1 << 63, u64::MAX] {
        let mut bytes = bytes.clone();
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        assert!(matches!(refusal(&bytes).kind, Kind::Bounds | Kind::Parse), "{length}");
    }
    for (from, to) in [
        ("\"b\"", "\"a\""),
        ("[8,16]", "[16,8]"),
        ("[8,16]", "[4,12]"),
        ("[8,16]", "[8,24]"),
        ("[8,16]", "[8,12]"),
        ("[8,16]", "[0,8]"),
        ("[8,16]", "[9,17]"),
        ("[8,16]", "[8,18446744073709551615]"),
        ("[2,2]", "[2,3]"),
        ("[2,2]", "[4294967296,4294967296]"),
        ("[2,2]", "[-2,-2]"),
        ("\"F16\"", "5"),
        ("\"shape\":[2,2]", "\"shape\":[2,2],\"shape\":[4]"),
        ("{\"a\"", "{\"__metadata__\":{\"k\":5},\"a\""),
        ("{\"a\"", "{\"__metadata__\":{},\"__metadata__\":{},\"a\""),
    ] {
        assert!(sound.contains(from));
        let err = refusal(&with_header(&sound.replacen(from, to, 1), &[0; 16]));
        assert_eq!(err.kind, Kind::Parse, "{from} -> {to}: {err}");
    }
    let deep = format!("{{\"a\":{}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
    assert_eq!(refusal(&with_header(&deep, &[])).kind, Kind::Parse);
    let err = refusal(&with_header(&sound.replace("F16", "I4"), &[0; 16]));
    assert!(
        err.kind == Kind::UnsupportedTensorType && err.message.contains("'b' has type 'I4'"),
        "{err}"
    );
    assert_eq!(refusal(&with_header("\u{feff}{}", &[])).kind, Kind::Parse);
    // A duplicate name whose second record replaces the first: there is no gap and no overlap.
    let twice = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    let err = refusal(&with_header(twice, &[0; 8]));
    assert!(
        err.kind == Kind::Parse && err.message.contains("'a' appears twice"),
        "{err}"
    );
}

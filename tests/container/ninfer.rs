//! `.ninfer` files: what is refused, sizes and values of all formats, and writing.

use crate::fixture;
use cmf_gpu::Kind;
use cmf_gpu::format::ninfer::{Decoder, Format, NewObject, Ninfer, RowSplit, write};
use serde_json::Value;

fn read(name: &str) -> Vec<u8> {
    std::fs::read(fixture("ternary").join(name)).unwrap()
}

/// `base` with edits `[offset, hex]`, cut or extended to `len` bytes.
pub fn edited(base: &[u8], edits: &Value, len: usize) -> Vec<u8> {
    let mut bytes = base.to_vec();
    bytes.resize(len, 0);
    for edit in edits.as_array().unwrap() {
        let at = edit[0].as_u64().unwrap() as usize;
        let hex = edit[1].as_str().unwrap();
        for (i, pair) in hex.as_bytes().chunks(2).enumerate() {
            bytes[at + i] = u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
        }
    }
    bytes
}

#[test]
fn broken_files_have_their_errors_and_harmless_oddities_open() {
    let base = read("ok.ninfer");
    let cases: Vec<Value> = serde_json::from_slice(&read("ninfer_edits.json")).unwrap();
    assert_eq!(cases.len(), 57);
    for case in &cases {
        let len = case["bytes"].as_u64().unwrap() as usize;
        let found = Ninfer::parse(&edited(&base, &case["edits"], len));
        let kind = found.as_ref().err().map(|err| err.kind.name());
        assert_eq!(
            kind.as_deref(),
            case["error"].as_str(),
            "{}: {:?}",
            case["name"],
            found.err()
        );
    }
}

#[test]
fn errors_name_the_object_with_expected_and_found() {
    let base = read("ok.ninfer");
    let cases: Vec<Value> = serde_json::from_slice(&read("ninfer_edits.json")).unwrap();
    for (name, text) in [
        ("v1_magic", ".ninfer version 1, supported: 2"),
        ("bytes_small", "tensor a stores 258 bytes; layout requires 260"),
        ("duplicate_name", "duplicate object name: a"),
        ("short_prefix", "shorter than the v2 prefix"),
        ("format_unknown", "tensor a: format"),
    ] {
        let case = cases.iter().find(|case| case["name"] == name).unwrap();
        let bytes = edited(&base, &case["edits"], case["bytes"].as_u64().unwrap() as usize);
        let message = Ninfer::parse(&bytes).unwrap_err().message;
        assert!(message.contains(text), "{name}: {message}");
    }
}

#[test]
fn a_directory_of_hostile_length_is_refused_before_it_is_parsed() {
    let mut bytes = read("ok.ninfer");
    bytes[8..16].copy_from_slice(&(5u64 << 20).to_le_bytes());
    bytes.resize(6 << 20, b'[');
    assert_eq!(Ninfer::parse(&bytes).unwrap_err().kind, Kind::Parse);
}

#[test]
fn sizes_of_large_matrices() {
    assert_eq!(Format::Pq2_0.size(&[248_320, 5120]).unwrap(), 337_715_200);
    assert_eq!(Format::Ptq1_0.size(&[248_320, 5120]).unwrap(), 278_118_400);
    assert_eq!(Format::Ptq1_0.size(&[12_288, 5120]).unwrap(), 12_288 * 1120);
    assert_eq!(
        Format::Nvfp4.size(&[u64::MAX / 128 * 128, 64]).unwrap_err().kind,
        Kind::Bounds
    );
    assert_eq!(Format::Nvfp4.size(&[127, 64]).unwrap_err().kind, Kind::Parse);
    assert_eq!(Format::Q5G64.size(&[u64::MAX, 1]).unwrap_err().kind, Kind::Bounds);
}

/// Every tensor of the file with all formats, in the recorded values' bits.
#[test]
fn all_formats_decode_to_the_recorded_values() {
    let bytes = read("formats.ninfer");
    let file = Ninfer::parse(&bytes).unwrap();
    let recorded = read("formats.safetensors");
    let recorded = safetensors::SafeTensors::deserialize(&recorded).unwrap();
    let mut formats = Vec::new();
    for object in &file.objects {
        let Some(tensor) = &object.tensor else { continue };
        formats.push(tensor.format.name());
        let decoder = Decoder::new(object, &bytes).unwrap();
        let (rows, cols) = decoder.shape();
        let mut values = vec![0.0; rows * cols];
        for (row, out) in values.chunks_mut(cols).enumerate() {
            decoder.row(row, out).unwrap();
        }
        let view = recorded.tensor(&object.name).unwrap();
        let value = |&word: &[u8; 4]| match view.dtype() {
            safetensors::Dtype::I32 => i32::from_le_bytes(word) as f32,
            _ => f32::from_le_bytes(word),
        };
        let expected: Vec<f32> = view.data().as_chunks().0.iter().map(value).collect();
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&values), bits(&expected), "{}", object.name);
    }
    for format in Format::ALL {
        assert!(formats.contains(&format.name()), "{}", format.name());
    }
}

#[test]
fn scales_and_codes_that_the_formats_forbid_are_refused() {
    let bytes = read("formats.ninfer");
    let file = Ninfer::parse(&bytes).unwrap();
    let refused = |name: &str, at: usize, with: &[u8], kind: Kind| {
        let object = file.find(name).unwrap();
        let mut bytes = bytes.clone();
        let at = object.range.start + at;
        bytes[at..at + with.len()].copy_from_slice(with);
        let decoder = Decoder::new(object, &bytes).unwrap();
        let mut out = vec![0.0; decoder.shape().1];
        assert_eq!(decoder.row(0, &mut out).unwrap_err().kind, kind, "{name}");
    };
    refused("quant/W8G32_F16S/3x256", 5, &[0x80], Kind::Parse);
    refused("quant/Q4G64_F16S/3x256", 512, &[0, 0x7C], Kind::NonFinite);
    refused("ternary/PQ2_0/3x640", 512, &[0, 0xFC], Kind::NonFinite);
    refused("fp4/nvfp4", 4608, &[0; 4], Kind::NonFinite);
    refused("fp4/nvfp4", 4096, &[0x7F], Kind::NonFinite);
    refused("fp8/row", 3, &[0xFF], Kind::Parse);
}

#[test]
fn ternary_planes_become_blocks_and_blocks_planes() {
    let bytes = read("formats.ninfer");
    let file = Ninfer::parse(&bytes).unwrap();
    for (name, format) in [
        ("ternary/PQ2_0/3x640", Format::Pq2_0),
        ("ternary/PTQ1_0/2x200", Format::Ptq1_0),
    ] {
        let object = file.find(name).unwrap();
        let shape = &object.tensor.as_ref().unwrap().shape;
        let planes = RowSplit::new(format, shape[0], shape[1]).unwrap();
        let payload = &bytes[object.range.clone()];
        let mut again = vec![0; payload.len()];
        for row in 0..planes.rows {
            let mut blocks = vec![0; planes.block_row_bytes()];
            planes.blocks(payload, row, &mut blocks).unwrap();
            planes.set_blocks(&mut again, row, &blocks).unwrap();
        }
        assert_eq!(again, payload, "{name}");
    }
}

#[test]
fn a_file_that_is_read_and_written_again_is_the_same() {
    let bytes = read("formats.ninfer");
    let file = Ninfer::parse(&bytes).unwrap();
    let objects = file.objects.iter().map(|object| NewObject {
        name: object.name.clone(),
        tensor: object.tensor.clone(),
        bytes: object.range.len() as u64,
        payload: Box::new(|| Ok(bytes[object.range.clone()].to_vec())),
    });
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("again.ninfer");
    write(&path, &file.identity, objects.collect()).unwrap();
    let again = std::fs::read(&path).unwrap();
    let written = Ninfer::parse(&again).unwrap();
    assert_eq!(written.identity, file.identity);
    assert_eq!(written.objects, file.objects);
    assert_eq!(again, bytes);
}

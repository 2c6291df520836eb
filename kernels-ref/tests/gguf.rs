//! Block types of GGUF against blocks and values from the format's Python package (`scripts/reference/gguf_blocks.py`).

use cmf_kernels_ref::dtype::gguf::{self, Block, Codes, Levels, types};
use serde_json::Value;

const TYPES: [(&str, &Block); 17] = [
    ("Q4_0", &types::Q4_0),
    ("Q4_1", &types::Q4_1),
    ("Q5_0", &types::Q5_0),
    ("Q5_1", &types::Q5_1),
    ("Q8_0", &types::Q8_0),
    ("Q2_K", &types::Q2_K),
    ("Q3_K", &types::Q3_K),
    ("Q4_K", &types::Q4_K),
    ("Q5_K", &types::Q5_K),
    ("Q6_K", &types::Q6_K),
    ("IQ4_NL", &types::IQ4_NL),
    ("IQ4_XS", &types::IQ4_XS),
    ("MXFP4", &types::MXFP4),
    ("TQ1_0", &types::TQ1_0),
    ("TQ2_0", &types::TQ2_0),
    ("PQ2_0", &types::PQ2_0),
    ("PTQ1_0", &types::PTQ1_0),
];

fn hex(value: &Value) -> Vec<u8> {
    let text = value.as_str().unwrap().as_bytes();
    text.chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

#[test]
fn blocks_decode_to_the_values_of_the_reference_package() {
    // Another file, with more blocks, can be named.
    let path = std::env::var("GGUF_BLOCKS").unwrap_or_else(|_| {
        let dir = env!("CARGO_MANIFEST_DIR");
        format!("{dir}/../tests/fixtures/gguf/blocks.json")
    });
    let cases: serde_json::Map<String, Value> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    assert_eq!(cases.len(), TYPES.len());
    for (name, block) in TYPES {
        let (bytes, values) = (hex(&cases[name]["bytes"]), hex(&cases[name]["values"]));
        let wanted: Vec<u32> = values.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        let rows = bytes.len() / block.bytes;
        assert_eq!(wanted.len(), rows * block.weights);
        let decoder = gguf::decoder(block, &bytes, rows, block.weights).unwrap_or_else(|bad| panic!("{bad:?}"));
        let mut found = vec![f32::NAN; block.weights];
        for (row, wanted) in wanted.chunks(block.weights).enumerate() {
            decoder.row(row, &mut found);
            let found: Vec<u32> = found.iter().map(|value| value.to_bits()).collect();
            assert_eq!(found, wanted, "{name}, block {row}");
        }
        // As one row.
        let decoder = gguf::decoder(block, &bytes, 1, rows * block.weights).unwrap_or_else(|bad| panic!("{bad:?}"));
        let mut found = vec![f32::NAN; rows * block.weights];
        decoder.row(0, &mut found);
        assert!(found.iter().map(|value| value.to_bits()).eq(wanted), "{name}");
        for (bytes, rows, cols) in [
            (&bytes[1..], rows, block.weights),
            (&bytes[..], rows, block.weights / 2),
            (&bytes[..0], 0, block.weights),
            (&bytes[..], usize::MAX, block.weights),
        ] {
            assert!(gguf::decoder(block, bytes, rows, cols).is_err(), "{name}");
        }
    }
}

#[test]
fn codes_are_written_where_they_are_read() {
    for (name, block) in TYPES {
        for seed in 0..50usize {
            let most = match (block.codes, block.code_bits()) {
                (Codes::Base3(_), _) => 3,
                (_, bits) => 1 << bits,
            };
            let code = |i: usize| ((i * 37 + seed * 11 + i * i * seed) % most) as u8;
            let codes: Vec<u8> = (0..block.weights).map(code).collect();
            let (mut bytes, mut again) = (vec![0; block.bytes], vec![0xA5; block.weights]);
            block.codes.write(&codes, &mut bytes);
            block.codes.read(&bytes, &mut again);
            assert_eq!(again, codes, "{name}");
        }
    }
}

#[test]
fn levels_fit_their_codes() {
    for (name, block) in TYPES {
        match (block.levels, block.code_bits()) {
            (Levels::Linear(zero), bits) => assert!((0..1 << bits).contains(&zero), "{name}"),
            (Levels::Signed, bits) => assert_eq!(bits, 8, "{name}"),
            (Levels::Table(_), bits) => assert_eq!(bits, 4, "{name}"),
        }
        if let Some(steps) = block.steps {
            assert!(steps.zero < 1 << steps.bits && block.weights == 256, "{name}");
            assert!(steps.part == 16 || steps.part == 32, "{name}");
        }
    }
}

//! Every element type against payloads and values written by an independent generator, and payloads that must be refused.

use cmf_kernels_ref::dtype::{self, BadPayload, RowDecoder};
use serde_json::Value;

type MakeDecoder = for<'a> fn(&'a [u8], usize, usize) -> Result<Box<dyn RowDecoder + 'a>, BadPayload>;

const DTYPES: [(&str, MakeDecoder); 11] = [
    ("f32", dtype::float::f32),
    ("q8_row", dtype::q8::q8_row),
    ("q4_block", dtype::q4::q4_block),
    ("vbit", dtype::vbit::vbit),
    ("q8_2f", dtype::q8::q8_2f),
    ("vbit_ro", dtype::vbit::vbit_ro),
    ("q4_tiled", dtype::q4::q4_tiled),
    ("q1", dtype::q1::q1),
    ("q1s", dtype::q1::q1s),
    ("q1t", dtype::q1::q1t),
    ("q4tp", dtype::q4::q4tp),
];

struct Fixture {
    json: Value,
    bin: Vec<u8>,
}

impl Fixture {
    fn open(name: &str) -> Fixture {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/quant");
        let json = std::fs::read_to_string(dir.join(format!("{name}.json"))).unwrap();
        Fixture {
            json: serde_json::from_str(&json).unwrap(),
            bin: std::fs::read(dir.join(format!("{name}.bin"))).unwrap(),
        }
    }

    fn cases(&self) -> &[Value] {
        self.json["cases"].as_array().unwrap()
    }

    fn bytes(&self, field: &Value) -> &[u8] {
        let (off, len) = (
            field["off"].as_u64().unwrap() as usize,
            field["len"].as_u64().unwrap() as usize,
        );
        &self.bin[off..off + len]
    }
}

fn shape(case: &Value) -> (usize, usize) {
    let dims: Vec<usize> = case["shape"]
        .as_array()
        .unwrap()
        .iter()
        .map(|d| d.as_u64().unwrap() as usize)
        .collect();
    let cols = *dims.last().unwrap();
    (dims.iter().product::<usize>() / cols, cols)
}

fn decode(make: MakeDecoder, payload: &[u8], rows: usize, cols: usize) -> Vec<f32> {
    let decoder = make(payload, rows, cols).unwrap_or_else(|bad| panic!("refused: {}", bad.0));
    let mut values = vec![f32::NAN; rows * cols];
    // Backwards: no row may depend on the one before.
    for (row, out) in values.chunks_exact_mut(cols).enumerate().rev() {
        decoder.row(row, out);
    }
    values
}

/// Every bit pattern against the definition of a binary floating-point number with so many bits of exponent and mantissa.
#[test]
fn all_16_bit_floats_are_what_their_bits_mean() {
    let payload: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let formats: [(MakeDecoder, u32, u32); 2] = [(dtype::float::f16, 5, 10), (dtype::float::bf16, 8, 7)];
    for (make, exponent_bits, mantissa_bits) in formats {
        let bias = (1 << (exponent_bits - 1)) - 1;
        let found = decode(make, &payload, 256, 256);
        for (bits, found) in (0..=u16::MAX).zip(found) {
            let exponent = i32::from(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
            let fraction = f64::from(bits & ((1 << mantissa_bits) - 1)) / 2f64.powi(mantissa_bits as i32);
            let magnitude = match (exponent == 2 * bias + 1, exponent) {
                (true, _) if fraction == 0.0 => f64::INFINITY,
                (true, _) => f64::NAN,
                (false, 0) => fraction * 2f64.powi(1 - bias),
                (false, _) => (1.0 + fraction) * 2f64.powi(exponent - bias),
            };
            let wanted = if bits >> 15 == 1 { -magnitude } else { magnitude };
            let found = f64::from(found);
            let same = found == wanted && found.is_sign_negative() == wanted.is_sign_negative();
            assert!(
                same || found.is_nan() && wanted.is_nan(),
                "{exponent_bits}+{mantissa_bits} bits {bits:04x}: expected {wanted:e}, found {found:e}"
            );
        }
    }
}

#[test]
fn payloads_decode_to_the_golden_values() {
    for (name, make) in DTYPES {
        let fixture = Fixture::open(name);
        let rtol = match fixture.json["compare"]["mode"].as_str().unwrap() {
            "exact" => 0.0,
            "rel" => fixture.json["compare"]["rtol"].as_f64().unwrap(),
            mode => panic!("{name}: unknown comparison {mode}"),
        };
        assert!(rtol <= 8e-6, "{name}");
        assert!(!fixture.cases().is_empty(), "{name}");
        for case in fixture.cases() {
            let (rows, cols) = shape(case);
            let wanted = fixture.bytes(&case["expected"]).as_chunks().0;
            assert_eq!(wanted.len(), rows * cols);
            // Payloads have no alignment of their own.
            let mut shifted = vec![0xEE];
            shifted.extend_from_slice(fixture.bytes(&case["payload"]));
            let found = decode(make, &shifted[1..], rows, cols);
            for (i, (&found, wanted)) in found.iter().zip(wanted).enumerate() {
                let wanted = f32::from_le_bytes(*wanted);
                let same = found == wanted
                    || found.is_nan() && wanted.is_nan()
                    || (f64::from(found) - f64::from(wanted)).abs() <= rtol * f64::from(wanted).abs();
                assert!(
                    same,
                    "{name} {}: element {i}: expected {wanted:e}, found {found:e}",
                    case["name"]
                );
            }
        }
    }
}

#[test]
fn broken_payloads_are_refused() {
    let fixture = Fixture::open("reject");
    assert_eq!(fixture.cases().len(), 24);
    for case in fixture.cases() {
        let name = case["dtype"].as_str().unwrap();
        let (_, make) = DTYPES.into_iter().find(|(dtype, _)| *dtype == name).unwrap();
        let (rows, cols) = shape(case);
        assert!(
            make(fixture.bytes(&case["payload"]), rows, cols).is_err(),
            "{}: {}",
            case["name"],
            case["reason"]
        );
    }
}

#[test]
fn no_length_but_the_right_one_is_accepted() {
    for (name, make) in DTYPES {
        let fixture = Fixture::open(name);
        let case = &fixture.cases()[0];
        let (rows, cols) = shape(case);
        let payload = fixture.bytes(&case["payload"]);
        assert!(make(payload, rows, cols).is_ok());
        let step = (payload.len() / 200).max(1);
        for len in (0..payload.len()).step_by(step) {
            assert!(make(&payload[..len], rows, cols).is_err(), "{name} cut to {len} bytes");
        }
        assert!(
            make(&[payload, &[0]].concat(), rows, cols).is_err(),
            "{name} with one byte more"
        );
        for (rows, cols) in [
            (0, cols),
            (rows, 0),
            (usize::MAX, cols),
            (rows, usize::MAX & !31),
            (1 << 60, 1 << 60),
        ] {
            assert!(make(payload, rows, cols).is_err(), "{name} as {rows} x {cols}");
        }
    }
}

#[test]
fn group_types_refuse_ragged_rows() {
    for (name, make) in DTYPES {
        let groups = matches!(name, "vbit" | "vbit_ro" | "q4_tiled" | "q1" | "q1s" | "q1t" | "q4tp");
        if groups {
            let refusal = make(&[0; 4096], 1, 33).err().unwrap();
            assert!(refusal.0.contains("33"), "{name}: {}", refusal.0);
        }
    }
}

/// Whatever the bytes, a decoder that accepts them must decode without a panic.
#[test]
fn damaged_payloads_never_panic() {
    for (name, make) in DTYPES {
        if matches!(name, "f32" | "f16" | "bf16") {
            continue;
        }
        let fixture = Fixture::open(name);
        for case in &fixture.cases()[..2.min(fixture.cases().len())] {
            let (rows, cols) = shape(case);
            let mut payload = fixture.bytes(&case["payload"]).to_vec();
            let mut out = vec![0.0; cols];
            for at in 0..payload.len() {
                let kept = payload[at];
                for damage in [0x00, 0x01, 0x07, 0x7F, 0xF3, 0xFF] {
                    payload[at] = damage;
                    if let Ok(decoder) = make(&payload, rows, cols) {
                        (0..rows).for_each(|row| decoder.row(row, &mut out));
                    }
                }
                payload[at] = kept;
            }
        }
    }
}

#[test]
fn the_last_of_two_overlay_entries_counts() {
    let entry = |index: u32, bits: u16| [&index.to_le_bytes()[..], &bits.to_le_bytes()].concat();
    let (one, two) = (0x3C00, 0x4000);
    let payload = [
        vec![0; 12],
        3u32.to_le_bytes().to_vec(),
        entry(33, two),
        entry(1, two),
        entry(33, one),
    ]
    .concat();
    let values = decode(dtype::q1::q1s, &payload, 2, 32);
    assert_eq!((values[1], values[33]), (2.0, 1.0));
    assert!(
        values
            .iter()
            .enumerate()
            .all(|(i, &value)| value == 0.0 || i == 1 || i == 33)
    );
}

#[test]
fn a_bit_width_is_refused_even_if_the_length_fits() {
    for width in 0..=9usize {
        let payload = [vec![width as u8], vec![0; 2 + 4 * width]].concat();
        let allowed = matches!(width, 3..=6 | 8);
        assert_eq!(dtype::vbit::vbit(&payload, 1, 32).is_ok(), allowed, "{width} bits");
        let offsets = [0u32, 4 * width as u32].map(u32::to_le_bytes).concat();
        let payload = [vec![width as u8], vec![0; 2], offsets, vec![0; 4 * width]].concat();
        assert_eq!(dtype::vbit::vbit_ro(&payload, 1, 32).is_ok(), allowed, "{width} bits");
    }
}

#[test]
fn packed_rows_may_not_overlap() {
    let payload = |offsets: [u32; 3]| {
        let table = offsets.map(u32::to_le_bytes).concat();
        [vec![3; 2], vec![0; 4], table, vec![0; offsets[2] as usize]].concat()
    };
    for (offsets, fits) in [
        ([0, 12, 24], true),
        ([0, 13, 25], true),
        ([0, 11, 24], false),
        ([0, 13, 24], false),
        ([1, 13, 25], false),
    ] {
        assert_eq!(
            dtype::vbit::vbit_ro(&payload(offsets), 2, 32).is_ok(),
            fits,
            "{offsets:?}"
        );
    }
}

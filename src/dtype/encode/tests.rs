//! Encoders against the reference decoders: bounds on errors, exactness where it is possible, refusals.

mod low;

use super::{Settings, encode, encode_with, storage_dtype};
use crate::dtype::Dtype;
use crate::dtype::quantise::BLOCK;
use crate::error::{Kind, Result};

/// Types that keep zeros and have small errors.
const QUANTISED: [Dtype; 7] = [
    Dtype::Q8Row,
    Dtype::Q82f,
    Dtype::Q4Block,
    Dtype::Q4Tiled,
    Dtype::Q4tp,
    Dtype::Vbit,
    Dtype::VbitRo,
];

/// A reproducible stream of numbers (splitmix64).
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in 0..below.
    fn below(&mut self, below: u64) -> u64 {
        self.bits() % below
    }

    /// Normal with variance 1, near enough: the sum of twelve uniform numbers.
    fn normal(&mut self) -> f32 {
        (0..12)
            .map(|_| (self.bits() >> 40) as f32 / (1 << 24) as f32)
            .sum::<f32>()
            - 6.0
    }
}

fn gaussian(rows: usize, cols: usize, deviation: f32, seed: u64) -> Vec<f32> {
    let mut random = Random(seed);
    (0..rows * cols).map(|_| random.normal() * deviation).collect()
}

/// Matrices that are hard to encode: with outliers, rows and groups of zeros, columns of very different size, and magnitudes for
/// which f16 scales are subnormal.
fn matrices(rows: usize, cols: usize) -> Vec<(&'static str, Vec<f32>)> {
    let plain = gaussian(rows, cols, 0.02, 1);
    let mut outliers = plain.clone();
    (0..outliers.len()).step_by(97).for_each(|i| outliers[i] *= 50.0);
    let mut zeros = plain.clone();
    zeros[..cols].fill(0.0);
    (cols..zeros.len())
        .filter(|i| i / 32 % 3 == 0)
        .for_each(|i| zeros[i] = 0.0);
    let columns = plain
        .iter()
        .enumerate()
        .map(|(i, v)| v * ((i % cols % 7) as f32 * 0.9).exp2())
        .collect();
    let tiny = gaussian(rows, cols, 1e-6, 2);
    vec![
        ("plain", plain),
        ("outliers", outliers),
        ("zeros", zeros),
        ("columns", columns),
        ("tiny", tiny),
    ]
}

fn write(dtype: Dtype, rows: usize, cols: usize, values: &[f32]) -> Result<Vec<u8>> {
    write_with(dtype, rows, cols, values, &Settings::default())
}

fn write_with(dtype: Dtype, rows: usize, cols: usize, values: &[f32], settings: &Settings) -> Result<Vec<u8>> {
    assert_eq!(values.len(), rows * cols);
    encode_with(dtype, rows, cols, settings, &|first, out| {
        assert!(out.len() <= BLOCK + 32 * cols, "a block of {} values", out.len());
        out.copy_from_slice(&values[first * cols..][..out.len()]);
        Ok(())
    })
}

fn read(dtype: Dtype, rows: usize, cols: usize, payload: &[u8]) -> Vec<f32> {
    let decoder = dtype.decoder(payload, rows, cols).unwrap();
    let mut values = vec![f32::NAN; rows * cols];
    values
        .chunks_exact_mut(cols)
        .enumerate()
        .for_each(|(row, out)| decoder.row(row, out));
    values
}

fn round_trip(dtype: Dtype, rows: usize, cols: usize, values: &[f32]) -> Vec<f32> {
    read(dtype, rows, cols, &write(dtype, rows, cols, values).unwrap())
}

fn squared_error(a: &[f32], b: &[f32]) -> f64 {
    a.iter()
        .zip(b)
        .map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2))
        .sum()
}

/// The sum of squared errors with the weighting by which group scales are chosen.
fn weighed_error(wanted: &[f32], found: &[f32]) -> f64 {
    let groups = wanted.chunks(32).zip(found.chunks(32)).map(|(wanted, found)| {
        let squares: f64 = wanted.iter().map(|w| f64::from(*w).powi(2)).sum();
        let rms = (squares / wanted.len() as f64).sqrt().max(1e-30);
        let errors = wanted
            .iter()
            .zip(found)
            .map(|(&w, &f)| (1.0 + f64::from(w.abs()) / rms) * (f64::from(w) - f64::from(f)).powi(2));
        errors.sum::<f64>()
    });
    groups.sum()
}

fn absmax(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |max, value| max.max(value.abs()))
}

/// The error of a group of 32 with scale = absmax/7, rounded to f16.
fn plain_error(group: &[f32]) -> f64 {
    let scale = half::f16::from_f32(absmax(group) / 7.0).to_f32();
    let rounded: Vec<f32> = group
        .iter()
        .map(|v| {
            if scale == 0.0 {
                0.0
            } else {
                (v / scale).round().clamp(-8.0, 7.0) * scale
            }
        })
        .collect();
    weighed_error(group, &rounded)
}

#[test]
fn floats_that_fit_are_exact() {
    let mut random = Random(3);
    let any: Vec<f32> = (0..640)
        .map(|_| f32::from_bits(random.bits() as u32))
        .filter(|v| v.is_finite())
        .take(600)
        .collect();
    let halves: Vec<f32> = (0..0x7C00)
        .step_by(53)
        .flat_map(|b| [b, b | 0x8000])
        .map(|b| half::f16::from_bits(b).to_f32())
        .collect();
    let brains: Vec<f32> = any.iter().map(|v| f32::from_bits(v.to_bits() & 0xFFFF_0000)).collect();
    for (dtype, values) in [(Dtype::F32, any), (Dtype::F16, halves), (Dtype::Bf16, brains)] {
        let found = round_trip(dtype, 2, values.len() / 2, &values[..values.len() / 2 * 2]);
        assert!(
            found.iter().zip(&values).all(|(f, w)| f.to_bits() == w.to_bits()),
            "{}",
            dtype.name()
        );
    }
}

#[test]
fn floats_round_to_the_nearest() {
    // 1 + 2^-11 is halfway between 1 and 1 + 2^-10; anything above rounds up.
    let values = [1.0 + 0.5 / 1024.0, 1.0 + 0.51 / 1024.0, -(1.0 + 0.49 / 1024.0)];
    assert_eq!(round_trip(Dtype::F16, 1, 3, &values), [1.0, 1.0 + 1.0 / 1024.0, -1.0]);
    let values = [1.0 + 0.5 / 128.0, 1.0 + 0.51 / 128.0, -(1.0 + 0.49 / 128.0)];
    assert_eq!(round_trip(Dtype::Bf16, 1, 3, &values), [1.0, 1.0 + 1.0 / 128.0, -1.0]);
}

#[test]
fn q8_row_loses_half_a_step() {
    for (name, values) in matrices(24, 96) {
        let found = round_trip(Dtype::Q8Row, 24, 96, &values);
        for (row, (found, wanted)) in found.chunks(96).zip(values.chunks(96)).enumerate() {
            // The scale is rounded up to an f16, which has 11 bits, or 2^-24 where it is subnormal.
            let scale = (absmax(wanted) / 127.0 * 1.001).max(absmax(wanted) / 127.0 + 2f32.powi(-24));
            for (found, wanted) in found.iter().zip(wanted) {
                assert!(
                    (found - wanted).abs() <= scale * 0.5001,
                    "{name}, row {row}: {wanted:e} became {found:e}"
                );
            }
        }
    }
}

#[test]
fn q8_2f_follows_columns_that_q8_row_cannot() {
    for (name, values) in matrices(64, 96) {
        let two = squared_error(&values, &round_trip(Dtype::Q82f, 64, 96, &values));
        let one = squared_error(&values, &round_trip(Dtype::Q8Row, 64, 96, &values));
        // Ratios of squared errors: columns of different size must gain, nothing may lose much.
        let limit = if name == "columns" { 0.4 } else { 1.1 };
        assert!(two <= limit * one, "{name}: q8_2f loses {two:e}, q8_row {one:e}");
    }
}

#[test]
fn four_bit_groups_lose_no_more_than_absmax_sevenths() {
    for (name, values) in matrices(24, 96) {
        for dtype in [Dtype::Q4Block, Dtype::Q4Tiled] {
            let found = round_trip(dtype, 24, 96, &values);
            let mut total = (0.0, 0.0);
            for (index, (found, wanted)) in found.chunks(32).zip(values.chunks(32)).enumerate() {
                let (lost, plain) = (weighed_error(wanted, found), plain_error(wanted));
                assert!(
                    lost <= plain * 1.00001,
                    "{} {name}, group {index}: {lost:e} against {plain:e}",
                    dtype.name()
                );
                total = (total.0 + lost, total.1 + plain);
            }
            // If one outlier fills the range of a group, no scale helps the other weights much.
            let limit = if name == "plain" { 0.70 } else { 1.0 };
            assert!(total.0 < limit * total.1, "{} {name}: {total:?}", dtype.name());
        }
    }
}

#[test]
fn q4tp_loses_less_than_absmax_sevenths() {
    // Rows of one group have a ladder to themselves, rows of eight share one.
    for (rows, cols) in [(192, 32), (24, 256)] {
        for (name, values) in matrices(rows, cols) {
            let found = round_trip(Dtype::Q4tp, rows, cols, &values);
            let lost = weighed_error(&values, &found);
            let plain: f64 = values.chunks(32).map(plain_error).sum();
            let limit = if name == "plain" { 0.82 } else { 1.0 };
            assert!(
                lost < limit * plain,
                "{name}, {cols} columns: {lost:e} against {plain:e}"
            );
        }
    }
}

#[test]
fn one_huge_group_does_not_ruin_its_row() {
    let mut values = gaussian(1, 1024, 0.02, 4);
    values[..32].iter_mut().for_each(|v| *v *= 200.0);
    values[32..64].iter_mut().for_each(|v| *v *= 1e-12);
    let found = round_trip(Dtype::Q4tp, 1, 1024, &values);
    let plain: f64 = values[64..].chunks(32).map(plain_error).sum();
    assert!(weighed_error(&values[64..], &found[64..]) < 1.05 * plain);
    assert_eq!(found[32..64], [0.0; 32]);
}

#[test]
fn zeros_stay_zeros() {
    for dtype in Dtype::all().filter(|dtype| dtype.has_encoder()) {
        for rows in [1, 3] {
            let payload = write(dtype, rows, 64, &vec![0.0; rows * 64]).unwrap();
            assert!(
                read(dtype, rows, 64, &payload).iter().all(|&v| v == 0.0),
                "{}",
                dtype.name()
            );
        }
    }
    let mut values = gaussian(4, 64, 1.0, 5);
    values[64..160].fill(0.0);
    for dtype in QUANTISED {
        let found = round_trip(dtype, 4, 64, &values);
        assert!(found.iter().all(|v| v.is_finite()), "{}", dtype.name());
        assert!(found[64..160].iter().all(|&v| v == 0.0), "{}", dtype.name());
    }
}

#[test]
fn representable_rows_and_groups_are_exact() {
    let mut random = Random(6);
    let mut q8 = Vec::new();
    let mut q4 = Vec::new();
    for _ in 0..200 {
        // Any positive finite f16: its product with a code is exact in f32.
        let scale = half::f16::from_bits(1 + random.below(0x7BFE) as u16).to_f32();
        q8.extend((0..64).map(|i| (if i == 17 { -127 } else { random.below(255) as i32 - 127 }) as f32 * scale));
        let scale = if random.below(2) == 0 { scale } else { -scale };
        let top = [-8, 7, -7][random.below(3) as usize];
        let span = if top == -8 { 16 } else { 15 };
        q4.extend((0..32).map(|i| {
            (if i == 9 {
                top
            } else {
                random.below(span) as i32 - (span as i32 - 8)
            }) as f32
                * scale
        }));
    }
    assert_eq!(round_trip(Dtype::Q8Row, 200, 64, &q8), q8);
    assert_eq!(round_trip(Dtype::Q4Tiled, 200, 32, &q4), q4);
    assert_eq!(round_trip(Dtype::Q4Block, 80, 80, &q4), q4);
}

#[test]
fn the_smallest_scale_is_used_before_a_group_is_dropped() {
    let values: Vec<f32> = (0..64).map(|i| (i % 7 - 3) as f32 * 2f32.powi(-24)).collect();
    for dtype in [Dtype::Q8Row, Dtype::Q4Block, Dtype::Q4Tiled] {
        assert_eq!(round_trip(dtype, 1, 64, &values), values, "{}", dtype.name());
    }
}

#[test]
fn a_ladder_that_fits_is_found() {
    let mut random = Random(7);
    let mut values = Vec::new();
    for row in 0..40 {
        // Exact in f16 like the payload's: lo in quarters, step in 64ths.
        let (lo, step) = (-12.0 + row as f64 / 4.0, (1 + random.below(16)) as f64 / 64.0);
        for group in 0..8 {
            let rung = [0, 31, random.below(32)][group.min(2)] as f64;
            let scale = (lo + rung * step).exp2();
            values
                .extend((0..32).map(|i| ((if i == 5 { -8.0 } else { random.below(16) as f64 - 8.0 }) * scale) as f32));
        }
    }
    let found = round_trip(Dtype::Q4tp, 40, 256, &values);
    for (found, wanted) in found.iter().zip(&values) {
        assert!(
            (found - wanted).abs() <= 1e-6 * wanted.abs(),
            "{wanted:e} became {found:e}"
        );
    }
}

#[test]
fn the_bytes_do_not_depend_on_threads_or_blocks() {
    let (rows, cols) = (BLOCK * 5 / 2 / 96, 96);
    let values = gaussian(rows, cols, 0.05, 8);
    for dtype in Dtype::all().filter(|dtype| dtype.has_encoder()) {
        let with = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| write(dtype, rows, cols, &values))
        };
        let (one, many) = (with(1), with(5));
        assert!(one == many, "{}", dtype.name());
        let as_a_whole = matches!(
            dtype,
            Dtype::Q82f | Dtype::Vbit | Dtype::VbitRo | Dtype::Q1s | Dtype::Q1t
        );
        let payload = one.unwrap();
        if !as_a_whole {
            // The last 7 rows are encoded as they are alone.
            let alone = round_trip(dtype, 7, cols, &values[(rows - 7) * cols..]);
            assert!(
                read(dtype, rows, cols, &payload)[(rows - 7) * cols..] == alone,
                "{}",
                dtype.name()
            );
        }
    }
}

#[test]
fn groups_across_rows_and_blocks_are_groups_of_the_flat_matrix() {
    let (rows, cols) = (BLOCK / 37 + 1001, 37);
    let values = gaussian(rows, cols, 0.05, 9);
    let flat = encode(Dtype::Q4Block, 1, rows * cols, &|_, out| {
        out.copy_from_slice(&values);
        Ok(())
    });
    assert!(write(Dtype::Q4Block, rows, cols, &values) == flat);
}

#[test]
fn values_that_do_not_fit_are_refused_by_row_and_col() {
    let refuse = |dtype: Dtype, value: f32| {
        let mut values = gaussian(BLOCK / 64 * 3, 64, 0.1, 10);
        // A second, later one must not hide the first.
        let later = values.len() - 1;
        values[BLOCK + 64 * 5 + 40] = value;
        values[later] = value;
        write(dtype, values.len() / 64, 64, &values).map(drop).unwrap_err()
    };
    let place = format!("row {}, col 40", BLOCK / 64 + 5);
    for dtype in Dtype::all().filter(|dtype| dtype.has_encoder()) {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let err = refuse(dtype, value);
            assert_eq!(err.kind, Kind::NonFinite);
            assert!(err.message.contains(&place), "{err}");
        }
        if dtype != Dtype::F32 {
            let err = refuse(dtype, -f32::MAX);
            assert_eq!(err.kind, Kind::UnsupportedTensorType);
            assert!(err.message.contains(&place), "{err}");
        }
    }
    for (dtype, fits) in [
        (Dtype::F16, 65504.0),
        (Dtype::Q8Row, 65504.0 * 127.0),
        (Dtype::Q4Tiled, 65504.0 * 7.0),
    ] {
        assert_eq!(round_trip(dtype, 1, 32, &[fits; 32]), [fits; 32]);
        assert!(write(dtype, 1, 32, &[fits * 1.001; 32]).is_err());
    }
}

#[test]
fn an_error_of_the_source_is_passed_on() {
    let err = encode(Dtype::Q4tp, 4, 32, &|_, _| crate::error::bail!(Io, "gone")).unwrap_err();
    assert_eq!(err.kind, Kind::Io);
}

#[test]
fn shapes_that_a_type_does_not_allow_are_errors() {
    for dtype in Dtype::all().filter(|dtype| dtype.has_encoder() && dtype.row_multiple() > 1) {
        assert_eq!(write(dtype, 1, 33, &[1.0; 33]).unwrap_err().kind, Kind::Parse);
    }
    assert!(write(Dtype::F32, 0, 32, &[]).is_err());
}

#[test]
fn storage_follows_the_shape() {
    let cases: [(Dtype, &[u64], Dtype); 16] = [
        (Dtype::VbitRo, &[64, 33], Dtype::Q82f),
        (Dtype::Q1t, &[2, 1 << 16], Dtype::Q1t),
        (Dtype::Q1t, &[2, (1 << 16) + 32], Dtype::Q82f),
        (Dtype::Q1s, &[2, (1 << 16) + 32], Dtype::Q1s),
        (Dtype::Q4tp, &[64, 64], Dtype::Q4tp),
        (Dtype::Q4tp, &[64, 33], Dtype::Q82f),
        (Dtype::Q4Block, &[64, 33], Dtype::Q4Block),
        (Dtype::Q8Row, &[64, 33], Dtype::Q8Row),
        (Dtype::Q4tp, &[4096], Dtype::F16),
        (Dtype::F32, &[4096], Dtype::F16),
        (Dtype::F32, &[31, 1], Dtype::F16),
        (Dtype::F32, &[32, 1], Dtype::F32),
        (Dtype::Q4tp, &[8, 1, 4], Dtype::F16),
        (Dtype::Q4Block, &[8, 1, 4], Dtype::Q4Block),
        (Dtype::Q8Row, &[8, 1, 4], Dtype::F16),
        (Dtype::Q4tp, &[], Dtype::F16),
    ];
    for (requested, shape, stored) in cases {
        assert_eq!(
            storage_dtype(requested, shape),
            stored,
            "{} of {shape:?}",
            requested.name()
        );
        // The type chosen always has a size for the shape.
        assert!(shape.is_empty() || stored.size(shape).is_ok());
    }
}

//! vbit, q1, q1s and q1t: their choices against brute force, and payloads read back by the reference decoders.

use super::super::spread;
use super::{Random, gaussian, matrices, read, round_trip, squared_error, weighed_error, write_with};
use crate::dtype::Dtype;
use crate::dtype::encode::Settings;
use crate::error::Kind;
use half::f16;

const WIDTHS: [u8; 5] = [3, 4, 5, 6, 8];

fn half(x: f64) -> f32 {
    f16::from_f64(x).to_f32()
}

/// Flat indices of the `count` largest scores.
fn largest(scores: &[f32], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    let mut chosen = order[..count].to_vec();
    chosen.sort_unstable();
    chosen
}

#[test]
fn q1_is_the_sign_times_the_rounded_mean() {
    for (name, values) in matrices(24, 96) {
        let found = round_trip(Dtype::Q1, 24, 96, &values);
        for (found, wanted) in found.chunks(32).zip(values.chunks(32)) {
            let mean = half(wanted.iter().map(|w| f64::from(w.abs())).sum::<f64>() / 32.0);
            for (found, wanted) in found.iter().zip(wanted) {
                assert_eq!(*found, if *wanted < 0.0 { -mean } else { mean }, "{name}: {wanted:e}");
            }
        }
    }
}

#[test]
fn overlays_hold_the_largest_and_leave_the_mean_to_the_others() {
    let (rows, cols) = (40, 96);
    let rms: Vec<f32> = (0..cols).map(|col| 1.0 + (col % 5) as f32).collect();
    for (name, values) in matrices(rows, cols).into_iter().filter(|(name, _)| *name != "tiny") {
        for rms in [None, Some(&rms[..])] {
            for fraction in [0.0, 0.01, 0.25] {
                let settings = Settings {
                    outliers: fraction,
                    rms,
                    ..Settings::default()
                };
                let scores: Vec<f32> = (0..values.len())
                    .map(|i| values[i].abs() * rms.map_or(1.0, |rms| rms[i % cols]))
                    .collect();
                let outliers = largest(&scores, (values.len() as f64 * fraction) as usize);
                let payload = write_with(Dtype::Q1s, rows, cols, &values, &settings).unwrap();
                let (tiles, overlay) = payload.split_at(rows * cols / 32 * 6);
                let count = u32::from_le_bytes(overlay[..4].try_into().unwrap());
                assert_eq!(count as usize, outliers.len(), "{name}");
                let indices: Vec<usize> = overlay[4..]
                    .chunks(6)
                    .map(|entry| u32::from_le_bytes(entry[..4].try_into().unwrap()) as usize)
                    .collect();
                assert_eq!(indices, outliers, "{name}");
                let found = read(Dtype::Q1s, rows, cols, &payload);
                for (group, tile) in tiles.chunks(6).enumerate() {
                    let inside = (group * 32..group * 32 + 32).filter(|i| outliers.binary_search(i).is_err());
                    let inside: Vec<f64> = inside.map(|i| f64::from(values[i].abs())).collect();
                    let scale = f16::from_le_bytes([tile[0], tile[1]]).to_f32();
                    let mean = inside.iter().sum::<f64>() / inside.len().max(1) as f64;
                    assert_eq!(scale, half(mean), "{name}, group {group}");
                }
                for &i in &outliers {
                    assert_eq!(found[i], half(f64::from(values[i])), "{name}");
                }

                let payload = write_with(Dtype::Q1t, rows, cols, &values, &settings).unwrap();
                let (tiles, overlay) = payload.split_at(rows * cols / 32 * 9);
                let (table, entries) = overlay.split_at((rows + 1) * 4);
                let pointers: Vec<usize> = table
                    .chunks(4)
                    .map(|word| u32::from_le_bytes(word.try_into().unwrap()) as usize)
                    .collect();
                let cols_of = |row: usize| {
                    entries[pointers[row] * 4..pointers[row + 1] * 4]
                        .chunks(4)
                        .map(move |entry| row * cols + usize::from(u16::from_le_bytes([entry[0], entry[1]])))
                };
                assert_eq!((0..rows).flat_map(cols_of).collect::<Vec<_>>(), outliers, "{name}");
                for &i in &outliers {
                    let byte = tiles[i / 32 * 9 + 2 + i % 32 / 5];
                    assert_eq!(
                        byte / 3u8.pow((i % 32 % 5) as u32) % 3,
                        0,
                        "{name}: a digit under the overlay"
                    );
                }
                // The last byte of a tile holds two weights.
                assert!(tiles.chunks(9).all(|tile| tile[8] < 9), "{name}: unused digits");
                let found = read(Dtype::Q1t, rows, cols, &payload);
                for &i in &outliers {
                    assert_eq!(found[i], half(f64::from(values[i])), "{name}");
                }
            }
        }
    }
}

#[test]
fn equal_scores_are_outliers_together_or_not() {
    // 60 of 64 weights have the largest magnitude, more than the tenth that may be outliers.
    let mut values = [0.5f32; 64];
    values[..4].fill(0.25);
    let settings = Settings {
        outliers: 0.1,
        ..Settings::default()
    };
    let payload = write_with(Dtype::Q1s, 2, 32, &values, &settings).unwrap();
    assert_eq!(payload.len(), 2 * 6 + 4);
    values[4..9].fill(-0.75);
    let payload = write_with(Dtype::Q1s, 2, 32, &values, &settings).unwrap();
    assert_eq!(payload.len(), 2 * 6 + 4 + 5 * 6);
    // All weights that are not zero.
    values[40] = 0.0;
    let all = Settings {
        outliers: 1.0,
        ..Settings::default()
    };
    for dtype in [Dtype::Q1s, Dtype::Q1t] {
        let payload = write_with(dtype, 2, 32, &values, &all).unwrap();
        assert_eq!(read(dtype, 2, 32, &payload), values, "{}", dtype.name());
    }
}

#[test]
fn no_ternary_scale_loses_less() {
    let settings = Settings {
        outliers: 0.0,
        ..Settings::default()
    };
    for (name, values) in matrices(24, 96).into_iter().filter(|(name, _)| *name != "tiny") {
        let payload = write_with(Dtype::Q1t, 24, 96, &values, &settings).unwrap();
        let found = read(Dtype::Q1t, 24, 96, &payload);
        for (group, (found, wanted)) in found.chunks(32).zip(values.chunks(32)).enumerate() {
            let peak = wanted.iter().fold(0f32, |max, w| max.max(w.abs()));
            let with = |scale: f32| {
                let best = |w: &f32| (w.abs() - scale).powi(2).min(w * w);
                wanted.iter().map(|w| f64::from(best(w))).sum::<f64>()
            };
            let best = (0..=4000)
                .map(|i| with(peak * i as f32 / 4000.0))
                .fold(f64::INFINITY, f64::min);
            let lost = squared_error(found, wanted);
            assert!(
                lost <= best * 1.0005,
                "{name}, group {group}: {lost:e} against {best:e}"
            );
        }
    }
}

#[test]
fn binary_and_ternary_weights_are_exact() {
    let mut random = Random(11);
    let (mut binary, mut ternary) = (Vec::new(), Vec::new());
    for _ in 0..96 {
        let scale = f16::from_bits(1 + random.below(0x7BFE) as u16).to_f32();
        binary.extend((0..32).map(|_| if random.below(2) == 0 { scale } else { -scale }));
        ternary.extend((0..32).map(|_| (random.below(3) as f32 - 1.0) * scale));
    }
    let settings = Settings {
        outliers: 0.0,
        ..Settings::default()
    };
    for (dtype, values) in [(Dtype::Q1, &binary), (Dtype::Q1s, &binary), (Dtype::Q1t, &ternary)] {
        let payload = write_with(dtype, 32, 96, values, &settings).unwrap();
        assert_eq!(read(dtype, 32, 96, &payload), *values, "{}", dtype.name());
    }
}

#[test]
fn every_width_loses_less_than_its_plain_scale() {
    let (rows, cols) = (25, 96);
    let widths: Vec<u8> = (0..rows).map(|row| WIDTHS[row % 5]).collect();
    let settings = Settings {
        widths: Some(&widths),
        ..Settings::default()
    };
    for (name, values) in matrices(rows, cols) {
        let payload = write_with(Dtype::Vbit, rows, cols, &values, &settings).unwrap();
        assert_eq!(payload[..rows], widths);
        let found = read(Dtype::Vbit, rows, cols, &payload);
        let table = write_with(Dtype::VbitRo, rows, cols, &values, &settings).unwrap();
        assert_eq!(table.len(), payload.len() + (rows + 1) * 4);
        assert!(read(Dtype::VbitRo, rows, cols, &table) == found, "{name}");
        for (index, (found, wanted)) in found.chunks(32).zip(values.chunks(32)).enumerate() {
            let width = widths[index / 3];
            let top = f32::from((1u8 << (width - 1)) - 1);
            let peak = wanted.iter().fold(0f32, |max, w| max.max(w.abs()));
            let scale = half(f64::from(peak / top));
            let rounded = |w: &f32| {
                let level = if scale == 0.0 {
                    0.0
                } else {
                    (w / scale).round().clamp(-top, top + 1.0)
                };
                level * scale
            };
            let plain: Vec<f32> = wanted.iter().map(rounded).collect();
            let (lost, plain) = (weighed_error(wanted, found), weighed_error(wanted, &plain));
            assert!(
                lost <= plain * 1.00001,
                "{name}, {width} bits, group {index}: {lost:e} against {plain:e}"
            );
        }
    }
}

#[test]
fn rows_of_vbit_that_fit_are_exact() {
    let mut random = Random(12);
    let widths: Vec<u8> = (0..60).map(|row| WIDTHS[row % 5]).collect();
    let mut values = Vec::new();
    for &width in &widths {
        for _ in 0..2 {
            let scale = f16::from_bits(1 + random.below(0x77FF) as u16).to_f32();
            let scale = if random.below(2) == 0 { scale } else { -scale };
            let (below, low) = (1u64 << width, f32::from((1u8 << (width - 1)) - 1));
            // The furthest level occurs, so only one scale fits.
            values.extend((0..32).map(|i| {
                if i == 7 {
                    (low + 1.0) * scale
                } else {
                    (random.below(below) as f32 - low) * scale
                }
            }));
        }
    }
    let settings = Settings {
        widths: Some(&widths),
        ..Settings::default()
    };
    for dtype in [Dtype::Vbit, Dtype::VbitRo] {
        let payload = write_with(dtype, 60, 64, &values, &settings).unwrap();
        assert_eq!(read(dtype, 60, 64, &payload), values);
    }
}

#[test]
fn rows_of_larger_amplitude_get_more_bits_within_the_mean() {
    let mut random = Random(13);
    for rows in [1, 2, 7, 100, 5000] {
        let amplitudes: Vec<f64> = (0..rows).map(|_| f64::from(random.normal() * 1.5).exp2()).collect();
        for mean in [3.0, 3.1, 4.0, 4.25, 5.5, 7.9, 8.0] {
            let widths = spread(&amplitudes, mean).unwrap();
            let bits: f64 = widths.iter().map(|&bits| f64::from(bits)).sum();
            let budget = (mean * rows as f64).floor();
            assert!(
                bits <= budget && bits >= budget - 1.0,
                "{rows} rows, mean {mean}: {bits} of {budget}"
            );
            let mut order: Vec<usize> = (0..rows).collect();
            order.sort_by(|&a, &b| amplitudes[a].total_cmp(&amplitudes[b]));
            // The last bit may go to a row with too small an amplitude for two.
            let falls = order
                .windows(2)
                .filter(|pair| widths[pair[0]] > widths[pair[1]])
                .count();
            assert!(falls <= 1, "{rows} rows, mean {mean}: {falls} falls");
        }
    }
}

#[test]
fn no_bit_is_better_off_in_another_row() {
    let mut random = Random(14);
    let error = |amplitude: f64, bits: u8| (amplitude / (f64::from(bits).exp2() - 2.0)).powi(2);
    let next = |bits: u8, by: isize| {
        let at = WIDTHS.iter().position(|&width| width == bits).unwrap();
        at.checked_add_signed(by).and_then(|at| WIDTHS.get(at)).copied()
    };
    for mean in [3.3, 4.25, 5.0, 6.5] {
        let amplitudes: Vec<f64> = (0..60).map(|_| f64::from(random.normal() * 2.0).exp2()).collect();
        let widths = spread(&amplitudes, mean).unwrap();
        let mut moves = 0;
        for from in 0..60 {
            for to in (0..60).filter(|&to| to != from) {
                let (Some(less), Some(more)) = (next(widths[from], -1), next(widths[to], 1)) else {
                    continue;
                };
                if widths[from] - less == more - widths[to] {
                    let lost = error(amplitudes[from], less) - error(amplitudes[from], widths[from]);
                    let won = error(amplitudes[to], widths[to]) - error(amplitudes[to], more);
                    assert!(
                        won <= lost * 1.000_001,
                        "mean {mean}: a step from row {from} to row {to}"
                    );
                    moves += 1;
                }
            }
        }
        assert!(moves > 100, "{moves}");
    }
}

#[test]
fn rows_of_zeros_and_odd_requests() {
    assert_eq!(spread(&[0.0, 0.0, 1.0], 8.0).unwrap(), [3, 3, 8]);
    assert_eq!(spread(&[], 4.0).unwrap(), [0u8; 0]);
    assert_eq!(spread(&[1.0; 4], 4.5).unwrap(), [5, 5, 4, 4]);
    for mean in [2.9, 8.1, f64::NAN, f64::INFINITY, -1.0] {
        assert_eq!(spread(&[1.0], mean).unwrap_err().kind, Kind::Usage, "{mean}");
    }
    for amplitude in [-1.0, f64::NAN, f64::INFINITY] {
        assert_eq!(spread(&[1.0, amplitude], 4.0).unwrap_err().kind, Kind::Parse);
    }
    let values = gaussian(2, 32, 1.0, 15);
    let refuse = |dtype, settings: &Settings| write_with(dtype, 2, 32, &values, settings).unwrap_err().kind;
    let with = Settings::default();
    for widths in [&[4u8][..], &[4, 7], &[4, 2], &[4, 4, 4]] {
        let settings = Settings {
            widths: Some(widths),
            ..with
        };
        assert_eq!(refuse(Dtype::VbitRo, &settings), Kind::Parse, "{widths:?}");
    }
    for outliers in [-0.1, 1.1, f64::NAN] {
        assert_eq!(refuse(Dtype::Q1s, &Settings { outliers, ..with }), Kind::Usage);
    }
    for rms in [&[1.0f32; 31][..], &[-1.0; 32], &[f32::NAN; 32]] {
        let settings = Settings { rms: Some(rms), ..with };
        assert_eq!(refuse(Dtype::Q1t, &settings), Kind::Parse);
    }
    let wide = vec![1.0; (1 << 16) + 32];
    let err = write_with(Dtype::Q1t, 1, wide.len(), &wide, &with).unwrap_err();
    assert_eq!(err.kind, Kind::UnsupportedTensorType);
}

#[test]
fn the_mean_is_met_by_default() {
    let (rows, cols) = (400, 64);
    let mut values = gaussian(rows, cols, 0.02, 16);
    for (row, values) in values.chunks_mut(cols).enumerate() {
        values
            .iter_mut()
            .for_each(|value| *value *= (row as f32 / 100.0).exp2());
    }
    for (settings, mean) in [
        (Settings::default(), 4.25),
        (
            Settings {
                mean_bits: 5.6,
                ..Settings::default()
            },
            5.6,
        ),
    ] {
        let payload = write_with(Dtype::VbitRo, rows, cols, &values, &settings).unwrap();
        let found = payload[..rows].iter().map(|&bits| f64::from(bits)).sum::<f64>() / rows as f64;
        assert!(found <= mean && found > mean * 0.99, "{found}");
        assert!(payload[0] < payload[rows - 1]);
        // Compared with the same width for every row: the mean rounded down.
        let flat = vec![mean as u8; rows];
        let flat = Settings {
            widths: Some(&flat),
            ..settings
        };
        let flat = write_with(Dtype::VbitRo, rows, cols, &values, &flat).unwrap();
        let lost = |payload: &[u8]| squared_error(&values, &read(Dtype::VbitRo, rows, cols, payload));
        assert!(lost(&payload) < 0.5 * lost(&flat));
    }
}

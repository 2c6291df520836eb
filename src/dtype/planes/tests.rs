//! The repack and its inverse, for every type.

use super::pack::{self, Width};
use super::*;
use crate::dtype::encode::encode;
use crate::dtype::{Dtype, Size};
use half::f16;

/// Bytes that follow from a seed.
fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed;
    (0..len)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}

/// Any finite f16, some of them subnormal.
fn halves(seed: u64, count: usize) -> Vec<u8> {
    let any = bytes(seed, count * 2);
    let finite = |pair: &[u8]| {
        [
            pair[0],
            if pair[1] & 0x7c == 0x7c {
                pair[1] & 0x83
            } else {
                pair[1]
            },
        ]
    };
    any.chunks_exact(2).flat_map(finite).collect()
}

/// A payload. Types with tables get contents that no encoder would choose. Overlays are ordered by row and column and have no
/// weight twice, as the device holds them.
fn payload(dtype: Dtype, rows: usize, cols: usize) -> Vec<u8> {
    let groups = cols / 32;
    let seed = (rows * 1_000_003 + cols) as u64;
    let scales = halves(seed, rows * groups);
    let tiles = |codes: Vec<u8>, len: usize| -> Vec<u8> {
        let both = scales.chunks_exact(2).zip(codes.chunks_exact(len));
        both.flat_map(|(scale, codes)| [scale, codes].concat()).collect()
    };
    // Row 1 has no entries, row 2 one for every weight.
    let entry = |row: usize, col: usize| match row {
        1 => false,
        2 => true,
        _ => (row * 31 + col * 7).is_multiple_of(11),
    };
    let entries = |row: usize| (0..cols).filter(move |&col| entry(row, col));
    let value = |row: usize, col: usize| f16::from_f32((row as f32 - 3.5) * 0.25 + col as f32).to_le_bytes();
    match dtype {
        Dtype::Q1 => tiles(bytes(seed, rows * groups * 4), 4),
        Dtype::Q1s => {
            let mut all = tiles(bytes(seed, rows * groups * 4), 4);
            let count = (0..rows).map(|row| entries(row).count()).sum::<usize>() as u32;
            all.extend(count.to_le_bytes());
            for row in 0..rows {
                for col in entries(row) {
                    all.extend(((row * cols + col) as u32).to_le_bytes());
                    all.extend(value(row, col));
                }
            }
            all
        }
        Dtype::Q1t => {
            let mut codes = bytes(seed, rows * groups * 7);
            codes.iter_mut().for_each(|byte| *byte %= 243);
            codes.chunks_exact_mut(7).for_each(|group| group[6] %= 9);
            let mut all = tiles(codes, 7);
            let mut at = 0u32;
            all.extend(at.to_le_bytes());
            for row in 0..rows {
                at += entries(row).count() as u32;
                all.extend(at.to_le_bytes());
            }
            for row in 0..rows {
                for col in entries(row) {
                    all.extend((col as u16).to_le_bytes());
                    all.extend(value(row, col));
                }
            }
            all
        }
        Dtype::Vbit | Dtype::VbitRo => {
            let widths: Vec<u8> = (0..rows).map(|row| [5, 3, 8, 4, 6][row % 5]).collect();
            let row_bytes = |width: &u8| groups * 4 * usize::from(*width);
            let mut all = [&widths[..], &scales].concat();
            if dtype == Dtype::VbitRo {
                let mut at = 0;
                all.extend(0u32.to_le_bytes());
                for width in &widths {
                    at += row_bytes(width) as u32;
                    all.extend(at.to_le_bytes());
                }
            }
            all.extend(bytes(seed, widths.iter().map(row_bytes).sum()));
            all
        }
        _ => encode(dtype, rows, cols, &|first, out| {
            for (i, v) in out.iter_mut().enumerate() {
                *v = ((first * cols + i) as f32 * 0.7).sin() * 0.01 * (1 + i % 5) as f32;
            }
            Ok(())
        })
        .unwrap(),
    }
}

/// Both planes, written in blocks of rows to memory that is not zero.
fn repack(source: &Source, geometry: &Geometry) -> (Vec<u8>, Vec<u8>) {
    let rows = geometry.rows;
    let (mut codes, mut scales) = (vec![0xA5; geometry.code_bytes()], vec![0xA5; geometry.scale_bytes()]);
    let origin = Origin {
        first: 0,
        before: geometry.begin(),
    };
    if let Some(header) = geometry.header() {
        scales[..4].copy_from_slice(&header.to_le_bytes());
    }
    // Rows that share a record must be in one block.
    let half = rows / 16 * 8;
    for range in [0..half, half..rows] {
        let before = source.before_row(origin, range.start);
        let at = range.start * geometry.code_row_bytes() + before.vectors * 16;
        let len = source.code_bytes(origin, &range);
        source.codes(origin, range.clone(), &mut codes[at..][..len]).unwrap();
        let len = source.word_bytes(&range);
        if len != 0 {
            source
                .words(range.clone(), &mut codes[before.words * 4..][..len])
                .unwrap();
        }
        let at = geometry.group_scale_offset(before);
        let len = source.group_scale_bytes(origin, &range);
        source
            .group_scales(origin, range.clone(), &mut scales[at..][..len])
            .unwrap();
        let records = &mut scales[geometry.record_offset(range.start)..geometry.record_offset(range.end)];
        if geometry.planes.shares_records() {
            records.fill(0);
            for (i, row) in range.enumerate() {
                let record = &mut records.as_chunks_mut::<12>().0[i / SHARED_ROWS];
                source.shared_record(origin, row, i % SHARED_ROWS, record).unwrap();
            }
        } else {
            source.records(origin, range, records).unwrap();
        }
    }
    if geometry.planes.has_column_scales() {
        source.col_scales(&mut scales[geometry.col_scale_offset(0)..]).unwrap();
    }
    if geometry.planes.has_overlay() {
        let at = geometry.begin().words * 4;
        let mut entries = Vec::new();
        (0..rows).for_each(|row| source.overlay(row, &mut entries).unwrap());
        scales[at..].copy_from_slice(&entries);
        let end = scales.len() as u32 / 4;
        scales[geometry.record_offset(rows)..][..4].copy_from_slice(&end.to_le_bytes());
    }
    (codes, scales)
}

fn word(plane: &[u8], index: usize) -> u32 {
    u32::from_le_bytes(plane[index * 4..][..4].try_into().unwrap())
}

/// The payload from the planes: the inverse of the repack.
fn unpack(dtype: Dtype, geometry: &Geometry, codes: &[u8], scales: &[u8]) -> Vec<u8> {
    let Geometry { rows, cols, .. } = *geometry;
    let stride = geometry.code_row_bytes();
    let code_rows = |len: usize| (0..rows).flat_map(move |row| codes[row * stride..][..len].to_vec());
    let groups = cols / 32;
    let group_scales_at = geometry.group_scale_offset(Amount::default());
    let record = geometry.record_row_bytes();
    let in_records =
        |from: usize, len: usize| (0..rows).flat_map(move |row| scales[row * record + from..][..len].to_vec());
    let half = |row: usize, group: usize| {
        let at = match geometry.planes {
            Planes::Bits1 | Planes::Nib4 => row * record,
            _ => row * record + 4,
        };
        &scales[at + group * 2..][..2]
    };
    // Where a row's overlay entries begin and end, as words of the scale plane.
    let start = |row: usize| word(scales, row * record / 4) as usize;
    let end = |row: usize| word(scales, (row + 1) * record / 4) as usize;
    match dtype {
        Dtype::Q4Block if geometry.planes == Planes::Nib4Flat => {
            let groups = (rows * cols).div_ceil(32);
            let halves = &scales[group_scales_at..][..groups * 2];
            codes[..groups * 16].iter().chain(halves).copied().collect()
        }
        Dtype::Q4Tiled => (0..rows * groups)
            .flat_map(|i| [half(i / groups, i % groups), &codes[i * 16..][..16]].concat())
            .collect(),
        Dtype::Q1 | Dtype::Q1s => {
            let tile = |i: usize| {
                let bits = pack::bits1_inverse(word(codes, i));
                [half(i / groups, i % groups), &bits].concat()
            };
            let mut all: Vec<u8> = (0..rows * groups).flat_map(tile).collect();
            if dtype == Dtype::Q1s {
                all.extend(((end(rows - 1) - start(0)) as u32).to_le_bytes());
                for row in 0..rows {
                    for entry in (start(row)..end(row)).map(|i| word(scales, i)) {
                        all.extend(((row * cols) as u32 + (entry & 0xffff)).to_le_bytes());
                        all.extend(((entry >> 16) as u16).to_le_bytes());
                    }
                }
            }
            all
        }
        Dtype::Q1t => {
            let tile = |i: usize| {
                let trits = pack::bits2_inverse([word(codes, i * 2), word(codes, i * 2 + 1)]);
                [half(i / groups, i % groups), &trits].concat()
            };
            let mut all: Vec<u8> = (0..rows * groups).flat_map(tile).collect();
            all.extend(0u32.to_le_bytes());
            (0..rows).for_each(|row| all.extend(((end(row) - start(0)) as u32).to_le_bytes()));
            (0..rows)
                .flat_map(|row| start(row)..end(row))
                .for_each(|i| all.extend(word(scales, i).to_le_bytes()));
            all
        }
        Dtype::Vbit | Dtype::VbitRo => {
            let widths: Vec<u8> = (0..rows)
                .map(|row| (word(scales, row / 8 * 3 + 2) >> (row % 8 * 4) & 15) as u8)
                .collect();
            let mut halves = Vec::new();
            let mut packed = Vec::new();
            let mut offsets = vec![0u32];
            for (row, &width) in widths.iter().enumerate() {
                let split = Width::of(width).unwrap();
                // By the kernels' arithmetic.
                let before = || widths[row / 8 * 8..row].iter().map(|&width| usize::from(width));
                let vectors =
                    word(scales, row / 8 * 3) as usize + groups * before().map(|width| width / 4).sum::<usize>();
                let others =
                    word(scales, row / 8 * 3 + 1) as usize + groups * before().map(|width| width % 4).sum::<usize>();
                let others = others + row % 8 * groups.div_ceil(2);
                halves.extend_from_slice(&codes[others * 4..][..groups * 2]);
                let others = others + groups.div_ceil(2);
                let amount = split.amount(groups);
                let places = (vectors * 4..)
                    .take(amount.vectors * 4)
                    .chain((others..).take(amount.words));
                let words: Vec<u32> = places.map(|i| word(codes, i)).collect();
                let mut values = vec![0; cols];
                split.read(&words, &mut values);
                // Most significant bit first.
                let bits = values
                    .iter()
                    .flat_map(|&v| (0..width).rev().map(move |bit| v >> bit & 1));
                let bits: Vec<u8> = bits.collect();
                packed.extend(
                    bits.chunks_exact(8)
                        .map(|byte| byte.iter().fold(0, |all, bit| all << 1 | bit)),
                );
                offsets.push(packed.len() as u32);
            }
            let mut all = [widths, halves].concat();
            if dtype == Dtype::VbitRo {
                offsets.iter().for_each(|offset| all.extend(offset.to_le_bytes()));
            }
            all.extend(packed);
            all
        }
        // The first section is the code plane; the records consist of the further sections.
        _ => {
            let sections = dtype.spec().sections.iter();
            let mut lengths = sections.map(|section| section.row_bytes(cols as u64).unwrap() as usize);
            let mut all: Vec<u8> = code_rows(lengths.next().unwrap()).collect();
            let mut from = 0;
            for len in lengths {
                all.extend(in_records(from, len));
                from += len;
            }
            if geometry.planes.has_column_scales() {
                all.extend_from_slice(&scales[geometry.col_scale_offset(0)..][..cols * 2]);
            }
            all
        }
    }
}

fn geometry(source: &Source, rows: usize, cols: usize) -> Geometry {
    Geometry {
        planes: source.planes(),
        rows,
        cols,
        parts: 1,
        amount: source.amount(0..rows),
    }
}

#[test]
fn planes_hold_every_bit_of_the_file() {
    for dtype in Dtype::all().filter(|&dtype| Planes::of(dtype, 32).is_ok()) {
        let ragged = [(1, 33), (9, 36), (5, 7), (70, 50), (3, 1000)];
        let whole = [(1, 32), (7, 96), (64, 160), (21, 64), (5, 1056)];
        let may_be_ragged = dtype.row_multiple() == 1;
        for (rows, cols) in ragged.into_iter().filter(|_| may_be_ragged).chain(whole) {
            let payload = payload(dtype, rows, cols);
            dtype.decoder(&payload, rows, cols).unwrap();
            let source = Source::open(dtype, &payload, rows, cols).unwrap();
            let geometry = geometry(&source, rows, cols);
            let (codes, scales) = repack(&source, &geometry);
            let again = unpack(dtype, &geometry, &codes, &scales);
            assert!(again == payload, "{} {rows}x{cols}", dtype.name());
        }
    }
}

#[test]
fn planes_are_about_as_large_as_the_file() {
    for dtype in Dtype::all().filter(|&dtype| Planes::of(dtype, 32).is_ok()) {
        let limit = if dtype == Dtype::Q1t { 1.12 } else { 1.02 };
        // Widths of small networks are among them.
        for (rows, cols) in [(70, 1024), (33, 4096), (40, 896), (40, 576), (64, 320), (24, 288)] {
            let payload = payload(dtype, rows, cols);
            let source = Source::open(dtype, &payload, rows, cols).unwrap();
            let ratio = geometry(&source, rows, cols).data_bytes() as f64 / payload.len() as f64;
            assert!(ratio <= limit, "{} {rows}x{cols}: {ratio:.3}", dtype.name());
        }
    }
}

/// The numbers in the documentation of this module.
#[test]
fn no_rows_but_narrow_ones_take_more_than_that() {
    let rows = 4096;
    // For any number of columns, and for whole groups.
    for (dtype, any, whole) in [
        (Dtype::F32, 1537, None),
        (Dtype::F16, 1537, None),
        (Dtype::Bf16, 1537, None),
        (Dtype::Q8Row, 1537, None),
        (Dtype::Q82f, 1537, None),
        (Dtype::Q4Block, 355, Some(160)),
        (Dtype::Q4Tiled, 160, Some(160)),
        (Dtype::Q4tp, 256, Some(256)),
        (Dtype::Q1, 0, None),
        (Dtype::Q1s, 1568, Some(1568)),
        (Dtype::Q1t, 544, Some(544)),
        (Dtype::Vbit, 224, Some(224)),
        (Dtype::VbitRo, 0, None),
    ] {
        let limit = if dtype == Dtype::Q1t { 1.12 } else { 1.02 };
        let more = |cols: &usize| {
            let (Size::Exact(file) | Size::AtLeast(file)) = dtype.size(&[rows as u64, *cols as u64]).unwrap();
            let planes = Planes::of(dtype, *cols).unwrap();
            let amount = match planes {
                Planes::BitsN => Measure::Sums(vec![
                    [0; 2],
                    [0, (rows * (cols / 32 * 3 + (cols / 32).div_ceil(2))) as u32],
                ])
                .amount(0..1),
                Planes::Nib4Flat => Measure::Flat(*cols).amount(0..rows),
                _ => Amount::default(),
            };
            let geometry = Geometry {
                planes,
                rows,
                cols: *cols,
                parts: 1,
                amount,
            };
            geometry.data_bytes() as f64 > file as f64 * limit
        };
        assert_eq!((32..8192).step_by(32).rfind(more), whole, "{}", dtype.name());
        if dtype.row_multiple() == 1 {
            assert_eq!((1..8192).rfind(more), Some(any), "{}", dtype.name());
        }
    }
}

#[test]
fn the_last_entry_for_a_weight_counts() {
    let (rows, cols) = (3, 64);
    let entry = |index: u32, value: f32| [&index.to_le_bytes()[..], &f16::from_f32(value).to_le_bytes()].concat();
    let flat = [(70, 1.0), (3, 2.0), (70, 3.0), (191, 4.0), (2, 5.0), (3, 6.0)];
    let mut q1s = payload(Dtype::Q1, rows, cols);
    q1s.extend((flat.len() as u32).to_le_bytes());
    flat.iter().for_each(|&(index, value)| q1s.extend(entry(index, value)));
    let mut q1t = payload(Dtype::Q1t, rows, cols)[..rows * 2 * 9].to_vec();
    [0u32, 3, 5, 6].iter().for_each(|at| q1t.extend(at.to_le_bytes()));
    for (col, value) in [(3u16, 2.0), (2, 5.0), (3, 6.0), (6, 1.0), (6, 3.0), (63, 4.0)] {
        q1t.extend(col.to_le_bytes());
        q1t.extend(f16::from_f32(value).to_le_bytes());
    }
    for (dtype, payload) in [(Dtype::Q1s, q1s), (Dtype::Q1t, q1t)] {
        let source = Source::open(dtype, &payload, rows, cols).unwrap();
        let row = |row: usize| {
            let mut out = Vec::new();
            source.overlay(row, &mut out).unwrap();
            let entry = |e: &[u8]| {
                (
                    e[0] as u16 | (e[1] as u16) << 8,
                    f16::from_le_bytes([e[2], e[3]]).to_f32(),
                )
            };
            out.chunks_exact(4).map(entry).collect::<Vec<_>>()
        };
        assert_eq!(
            [row(0), row(1), row(2)],
            [vec![(2, 5.0), (3, 6.0)], vec![(6, 3.0)], vec![(63, 4.0)]]
        );
        assert_eq!([0..1, 1..2, 0..3].map(|rows| source.amount(rows).words), [2, 1, 4]);
        // The reference agrees about which one counts.
        let mut values = vec![0.0; cols];
        dtype.decoder(&payload, rows, cols).unwrap().row(0, &mut values);
        assert_eq!(values[2..4], [5.0, 6.0]);
    }
}

#[test]
fn a_bad_payload_is_an_error() {
    let origin = Origin {
        first: 0,
        before: Amount::default(),
    };
    let short = Source::open(Dtype::Q8Row, &[0; 40], 2, 32).unwrap();
    let mut out = [0; 64];
    assert!(short.codes(origin, 0..2, &mut out).is_err());
    assert!(short.records(origin, 0..1, &mut out[..2]).is_err());
    for dtype in [Dtype::Vbit, Dtype::VbitRo, Dtype::Q1s, Dtype::Q1t] {
        let good = payload(dtype, 7, 96);
        for len in 0..good.len() {
            // Every shorter payload misses a scale, a code or an entry.
            assert!(
                Source::open(dtype, &good[..len], 7, 96).is_err(),
                "{} {len}",
                dtype.name()
            );
        }
        // No byte makes the repack read past the payload or write past the planes.
        for at in 0..good.len() {
            for value in [0, 2, 7, 0xff] {
                let mut bad = good.clone();
                bad[at] = value;
                let Ok(opened) = Source::open(dtype, &bad, 7, 96) else {
                    continue;
                };
                let mut codes = vec![0; opened.code_bytes(origin, &(0..7))];
                if opened.codes(origin, 0..7, &mut codes).is_ok() {
                    let geometry = geometry(&opened, 7, 96);
                    let (_, scales) = repack(&opened, &geometry);
                    assert_eq!(scales.len(), geometry.scale_bytes());
                }
            }
        }
    }
    let mut bad = payload(Dtype::Q1t, 1, 32);
    bad[3] = 243;
    let opened = Source::open(Dtype::Q1t, &bad, 1, 32).unwrap();
    let err = opened.codes(origin, 0..1, &mut out[..8]).unwrap_err();
    assert!(
        err.message.contains("row 0, group 0") && err.message.contains("243"),
        "{err}"
    );
    let mut bad = payload(Dtype::Q4tp, 1, 32);
    bad[16..18].copy_from_slice(&f16::NAN.to_le_bytes());
    let opened = Source::open(Dtype::Q4tp, &bad, 1, 32).unwrap();
    let err = opened.records(origin, 0..1, &mut out[..8]).unwrap_err();
    assert!(
        err.kind == crate::error::Kind::NonFinite && err.message.contains("row 0"),
        "{err}"
    );
    assert!(Source::open(Dtype::Q1s, &payload(Dtype::Q1s, 1, 65_568), 1, 65_568).is_err());
}

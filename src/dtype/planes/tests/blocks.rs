//! Payloads of GGUF blocks, and the inverse of their repack.

use super::{bytes, halves};
use crate::dtype::Dtype;
use crate::dtype::planes::Geometry;
use cmf_kernels_ref::dtype::gguf::{Block, Codes, Scale, types};

/// The block of a type.
pub fn block(dtype: Dtype) -> &'static Block {
    match dtype {
        Dtype::Q4_0 => &types::Q4_0,
        Dtype::Q4_1 => &types::Q4_1,
        Dtype::Q5_0 => &types::Q5_0,
        Dtype::Q5_1 => &types::Q5_1,
        Dtype::Q8_0 => &types::Q8_0,
        Dtype::Q2_K => &types::Q2_K,
        Dtype::Q3_K => &types::Q3_K,
        Dtype::Q4_K => &types::Q4_K,
        Dtype::Q5_K => &types::Q5_K,
        Dtype::Q6_K => &types::Q6_K,
        Dtype::IQ4_NL => &types::IQ4_NL,
        Dtype::IQ4_XS => &types::IQ4_XS,
        Dtype::TQ1_0 => &types::TQ1_0,
        Dtype::TQ2_0 => &types::TQ2_0,
        Dtype::MXFP4 => &types::MXFP4,
        Dtype::PQ2_0 => &types::PQ2_0,
        Dtype::PTQ1_0 => &types::PTQ1_0,
        _ => panic!("{} has no blocks", dtype.name()),
    }
}

/// Byte offsets of the f16 of a block.
fn places(block: &Block) -> Vec<usize> {
    match block.scale {
        Scale::Half(at) => vec![at],
        Scale::HalfAndMinimum(at, second) | Scale::HalfAndOffset(at, second) => vec![at, second],
        Scale::Power(_) => vec![],
    }
}

/// Random blocks with finite scales. Base-3 bytes are those that an encoder would write.
pub fn payload(dtype: Dtype, rows: usize, cols: usize) -> Vec<u8> {
    let block = block(dtype);
    let count = rows * cols / block.weights;
    let seed = (rows * 1_000_003 + cols) as u64;
    let mut payload = bytes(seed, count * block.bytes);
    let scales = halves(seed + 1, count * 2);
    for (bytes, scales) in payload.chunks_exact_mut(block.bytes).zip(scales.chunks_exact(4)) {
        for (at, half) in places(block).into_iter().zip(scales.chunks_exact(2)) {
            bytes[at..at + 2].copy_from_slice(half);
        }
        match (block.codes, block.scale) {
            (Codes::Base3(_), _) => {
                let mut codes = vec![0; block.weights];
                block.codes.read(bytes, &mut codes);
                let places = places(block);
                (0..block.bytes)
                    .filter(|at| !places.contains(at) && !places.contains(&at.wrapping_sub(1)))
                    .for_each(|at| bytes[at] = 0);
                block.codes.write(&codes, bytes);
            }
            (_, Scale::Power(at)) => bytes[at] = bytes[at].min(254),
            _ => {}
        }
    }
    payload
}

/// Bits of the words of a plane, lowest first.
fn field(plane: &[u8], word: usize, at: usize, bits: usize) -> u32 {
    let word = u32::from_le_bytes(plane[word * 4..][..4].try_into().unwrap());
    word >> at & ((1 << bits) - 1)
}

/// Bit by bit what `read` does is undone: the file's bits are found by setting each of them.
fn write_steps(block: &Block, steps: &[[u8; 2]], bytes: &mut [u8]) {
    let Some(of) = block.steps else { return };
    let empty = vec![0; block.bytes];
    for at in 0..block.bytes * 8 {
        let mut one = empty.clone();
        one[at / 8] = 1 << (at % 8);
        for (part, wanted) in steps.iter().enumerate() {
            let (one, none) = ((of.read)(&one, part), (of.read)(&empty, part));
            for i in 0..2 {
                if one[i] != none[i] {
                    let bit = one[i] ^ none[i];
                    assert!(bit.is_power_of_two());
                    bytes[at / 8] |= u8::from((wanted[i] ^ none[i]) & bit != 0) << (at % 8);
                }
            }
        }
    }
}

/// The payload from the planes, by the arithmetic of `shaders/dtype/block.wgsl`.
pub fn unpack(dtype: Dtype, geometry: &Geometry, codes: &[u8], scales: &[u8]) -> Vec<u8> {
    let block = block(dtype);
    let Geometry { rows, cols, .. } = *geometry;
    let groups = cols / 32;
    let record = geometry.record_row_bytes() / 4;
    let blocks = cols / block.weights;
    let scale_words = match block.scale {
        Scale::Half(_) => blocks.div_ceil(2),
        Scale::Power(_) => blocks.div_ceil(4),
        _ => blocks,
    };
    let part_bits = block.steps.map_or(0, |steps| steps.bits as usize) * if block.has_offset_steps() { 2 } else { 1 };
    let parts = 32 / block.part().min(32);
    let step_words = (groups * part_bits * parts).div_ceil(32);
    let upper_words = match block.code_bits() {
        3 | 5 => 1,
        6 => 2,
        _ => 0,
    };
    let mut payload = Vec::new();
    for row in 0..rows {
        let at = row * record;
        let code = |col: usize| -> u8 {
            let (group, quad, byte) = (row * groups + col / 32, col % 32 / 4, col % 4 * 8);
            let upper = at + scale_words + step_words + col / 32 * upper_words;
            let nibble = || field(codes, group * 4 + quad / 2, byte + quad % 2 * 4, 4);
            let pair = 4 * (quad % 2) + 2 * (quad % 4 / 2);
            let bit = 4 * (quad % 2) + quad / 2;
            (match (dtype, block.code_bits()) {
                (Dtype::Q8_0, _) => u32::from(codes[row * cols + col]),
                (Dtype::Q4_0, _) => u32::from(codes[(row * cols + col) / 2] >> (4 * (col % 2)) & 15),
                (_, 2) => field(codes, group * 2 + quad / 4, byte + pair, 2),
                (_, 3) => field(codes, group * 2 + quad / 4, byte + pair, 2) | field(scales, upper, byte + bit, 1) << 2,
                (_, 4) => nibble(),
                (_, 5) => nibble() | field(scales, upper, byte + bit, 1) << 4,
                _ => nibble() | field(scales, upper + quad / 4, byte + pair, 2) << 4,
            }) as u8
        };
        for index in 0..blocks {
            let mut bytes = vec![0; block.bytes];
            let here: Vec<u8> = (index * block.weights..(index + 1) * block.weights).map(code).collect();
            block.codes.write(&here, &mut bytes);
            let half = |i: usize| &scales[at * 4 + i * 2..][..2];
            match block.scale {
                Scale::Half(to) => bytes[to..to + 2].copy_from_slice(half(index)),
                Scale::HalfAndMinimum(to, second) | Scale::HalfAndOffset(to, second) => {
                    bytes[to..to + 2].copy_from_slice(half(index * 2));
                    bytes[second..second + 2].copy_from_slice(half(index * 2 + 1));
                }
                Scale::Power(to) => bytes[to] = scales[at * 4 + index],
            }
            if let Some(of) = block.steps {
                let steps = |part: usize| {
                    let first = (index * (block.weights / of.part) + part) * part_bits;
                    let bits = |from: usize, count: usize| {
                        let bit = |i: usize| field(scales, at + scale_words + (from + i) / 32, (from + i) % 32, 1) << i;
                        (0..count).map(bit).sum::<u32>() as u8
                    };
                    let bits_of_one = of.bits as usize;
                    [
                        bits(first, bits_of_one),
                        bits(first + bits_of_one, part_bits - bits_of_one),
                    ]
                };
                let steps: Vec<_> = (0..block.weights / of.part).map(steps).collect();
                write_steps(block, &steps, &mut bytes);
            }
            payload.extend(bytes);
        }
    }
    payload
}

//! Rows of GGUF blocks in planes.
//!
//! The codes of a row are in the order of [`pack`](super::pack). The code plane has their nibbles, 16 bytes per group, or of
//! codes of 2 and 3 bits the pairs of bits, 8 bytes per group. Codes of Q4_0 and Q8_0 are in the order of the container's types.
//! Everything else of a row is in its record:
//!
//! - the scales of its blocks: an f16 each, or an f16 and the second one in a word, or a byte with an exponent,
//! - the steps of its groups, least significant bit first: for each part of a group the step of the scale, then the one of the
//!   offset,
//! - the upper bits of codes of 3, 5 and 6 bits, one or two words per group.
//!
//! Each of the three begins with a whole word.

use super::pack::Width;
use crate::dtype::payload::{GROUP, Payload};
use crate::error::{Result, bail};
use cmf_kernels_ref::dtype::gguf::{Block, Scale};
use half::f16;

/// Words of a group's codes in the code plane.
const fn code_words(bits: u32) -> usize {
    match bits {
        2 | 3 => 2,
        8 => 8,
        _ => 4,
    }
}

/// Bytes of a group's codes in the code plane.
pub const fn group_bytes(bits: u32) -> usize {
    code_words(bits) * 4
}

/// Bits of the steps of a group.
fn step_bits(block: &Block) -> usize {
    block.steps.map_or(0, |steps| {
        let each = if block.has_offset_steps() { 2 } else { 1 };
        GROUP / steps.part * each * steps.bits as usize
    })
}

/// Words of a row's scales, of its steps, and of its codes' upper bits.
fn record_words(block: &Block, groups: usize) -> [usize; 3] {
    let blocks = (groups * GROUP).div_ceil(block.weights);
    let scales = match block.scale {
        Scale::Half(_) => blocks.div_ceil(2),
        Scale::HalfAndMinimum(..) | Scale::HalfAndOffset(..) => blocks,
        Scale::Power(_) => blocks.div_ceil(4),
    };
    let upper = Width::of_block(block.code_bits()).words(1) - code_words(block.code_bits());
    [scales, (groups * step_bits(block)).div_ceil(32), groups * upper]
}

/// Bytes of the record of a row.
pub fn record_bytes(block: &Block, groups: usize) -> usize {
    record_words(block, groups).iter().sum::<usize>() * 4
}

/// The blocks of a row.
fn blocks<'a>(block: &Block, payload: &Payload<'a>, row: usize) -> Result<std::slice::ChunksExact<'a, u8>> {
    Ok(payload.row(0, row)?.chunks_exact(block.bytes))
}

/// All codes of a row as words: those of the code plane, then the upper bits.
fn row_words(block: &Block, payload: &Payload, row: usize) -> Result<Vec<u32>> {
    let mut codes = vec![0; payload.cols];
    for (bytes, codes) in blocks(block, payload, row)?.zip(codes.chunks_exact_mut(block.weights)) {
        block.codes.read(bytes, codes);
    }
    let width = Width::of_block(block.code_bits());
    let mut words = vec![0; width.words(payload.groups())];
    width.write(&codes, &mut words);
    Ok(words)
}

/// Writes a row of the code plane.
pub fn codes(block: &Block, payload: &Payload, row: usize, out: &mut [u8]) -> Result<()> {
    put_words(&row_words(block, payload, row)?, out);
    Ok(())
}

/// Writes the record of a row. Errors: `NonFinite` for scales that are not finite numbers.
pub fn record(block: &Block, payload: &Payload, row: usize, out: &mut [u8]) -> Result<()> {
    let [scales, steps, upper] = record_words(block, payload.groups());
    out.fill(0);
    let (scale_bytes, rest) = out.split_at_mut(scales * 4);
    let (step_bytes, upper_bytes) = rest.split_at_mut(steps * 4);
    for (index, bytes) in blocks(block, payload, row)?.enumerate() {
        check_scales(block, bytes).map_err(|err| err.context(format!("row {row}, block {index}")))?;
        match block.scale {
            Scale::Half(at) => scale_bytes[index * 2..][..2].copy_from_slice(&bytes[at..at + 2]),
            Scale::HalfAndMinimum(at, second) | Scale::HalfAndOffset(at, second) => {
                scale_bytes[index * 4..][..2].copy_from_slice(&bytes[at..at + 2]);
                scale_bytes[index * 4 + 2..][..2].copy_from_slice(&bytes[second..second + 2]);
            }
            Scale::Power(at) => scale_bytes[index] = bytes[at],
        }
        if let Some(read) = block.steps {
            let parts = block.weights / read.part;
            let each = if block.has_offset_steps() { 2 } else { 1 };
            for part in 0..parts {
                for (i, step) in (read.read)(bytes, part).into_iter().take(each).enumerate() {
                    put_bits(
                        step_bytes,
                        ((index * parts + part) * each + i) * read.bits as usize,
                        step,
                    );
                }
            }
        }
    }
    if upper != 0 {
        put_words(
            &row_words(block, payload, row)?[payload.groups() * code_words(block.code_bits())..],
            upper_bytes,
        );
    }
    Ok(())
}

/// Sets bits that are 0, from bit `at` on. Those past the end are 0 in `value` as well.
fn put_bits(bytes: &mut [u8], at: usize, value: u8) {
    let value = u16::from(value) << (at % 8);
    for (byte, part) in bytes[at / 8..].iter_mut().zip(value.to_le_bytes()) {
        *byte |= part;
    }
}

fn put_words(words: &[u32], out: &mut [u8]) {
    for (out, word) in out.as_chunks_mut().0.iter_mut().zip(words) {
        *out = word.to_le_bytes();
    }
}

/// Writes codes of 4 bits in the order of the container's types: weight 2k in the low nibble of byte k.
pub fn nibbles(block: &Block, payload: &Payload, row: usize, out: &mut [u8]) -> Result<()> {
    let mut codes = [0; GROUP];
    for (bytes, out) in blocks(block, payload, row)?.zip(out.chunks_exact_mut(GROUP / 2)) {
        block.codes.read(bytes, &mut codes);
        for (byte, pair) in out.iter_mut().zip(codes.as_chunks::<2>().0) {
            *byte = pair[0] | pair[1] << 4;
        }
    }
    Ok(())
}

/// Writes codes of 8 bits as they are.
pub fn bytes(block: &Block, payload: &Payload, row: usize, out: &mut [u8]) -> Result<()> {
    for (bytes, out) in blocks(block, payload, row)?.zip(out.chunks_exact_mut(block.weights)) {
        block.codes.read(bytes, out);
    }
    Ok(())
}

/// Errors: `NonFinite` for a scale that is not a finite number.
pub fn check_scales(block: &Block, bytes: &[u8]) -> Result<()> {
    let (first, second) = match block.scale {
        Scale::Half(at) => (at, None),
        Scale::HalfAndMinimum(at, second) | Scale::HalfAndOffset(at, second) => (at, Some(second)),
        // 255 means NaN.
        Scale::Power(at) if bytes[at] == u8::MAX => bail!(NonFinite, "the scale is NaN"),
        Scale::Power(_) => return Ok(()),
    };
    for at in std::iter::once(first).chain(second) {
        let scale = f16::from_le_bytes([bytes[at], bytes[at + 1]]);
        if !scale.is_finite() {
            bail!(NonFinite, "a scale is {scale}");
        }
    }
    Ok(())
}

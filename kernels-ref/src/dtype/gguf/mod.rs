//! The block types of GGUF. A block holds codes of a few bits for 32, 128 or 256 weights of a row, and what scales them.
//!
//! All types have one form. The weights of a part of 16 or 32 columns are `scale · level − offset`: a level is what a code
//! stands for, a scale is the block's f16 (or power of two), in most types of 256 weights times a small integer, the *step* of
//! the part; the offset, if there is one, is made the same way from a second f16 and a second step. [`types`] says where a
//! block keeps all this. The order of operations is that of the format's Python package `gguf`, so values are the same bits.

mod codes;
pub mod types;

pub use codes::{Codes, Digits, Field};

use super::layout::{Bytes, check_matrix, half, part};
use super::{BadPayload, Decoder};

/// The most weights of a block.
pub const MOST_WEIGHTS: usize = 256;

/// A block type.
#[derive(Debug)]
pub struct Block {
    /// Weights of a block.
    pub weights: usize,
    /// Bytes of a block.
    pub bytes: usize,
    /// Where its codes are.
    pub codes: Codes,
    /// What the codes stand for.
    pub levels: Levels,
    /// The scale of the whole block.
    pub scale: Scale,
    /// The integers that multiply it, in types that have some.
    pub steps: Option<Steps>,
}

/// What codes stand for.
#[derive(Clone, Copy, Debug)]
pub enum Levels {
    /// The code minus this.
    Linear(i32),
    /// The code as a signed byte.
    Signed,
    /// An entry of this table.
    Table(&'static [i8; 16]),
}

/// The scale of a block. Numbers are byte offsets.
#[derive(Clone, Copy, Debug)]
pub enum Scale {
    /// An f16.
    Half(usize),
    /// Two f16: the scale, and a minimum that is added to all weights.
    HalfAndMinimum(usize, usize),
    /// Two f16: the scale, and a second one whose products with the steps of minima are subtracted.
    HalfAndOffset(usize, usize),
    /// A byte e, for the scale 2^(e − 128).
    Power(usize),
}

/// Small integers, one for each part, that multiply the scale. Where the scale has an offset, a second one multiplies that.
#[derive(Clone, Copy, Debug)]
pub struct Steps {
    /// Bits of an integer.
    pub bits: u32,
    /// What is subtracted from that of the scale.
    pub zero: i32,
    /// Weights of a part: 16 or 32.
    pub part: usize,
    /// The bits of a part's integers, without the subtraction; the second is 0 where there is none.
    pub read: fn(block: &[u8], part: usize) -> [u8; 2],
}

impl Block {
    /// Weights with one scale and offset: 16 or 32, or all.
    pub fn part(&self) -> usize {
        self.steps.map_or(self.weights, |steps| steps.part)
    }

    /// Whether a second step follows that of the scale.
    pub fn has_offset_steps(&self) -> bool {
        self.steps.is_some() && matches!(self.scale, Scale::HalfAndOffset(..))
    }

    /// Bits of a code.
    pub fn code_bits(&self) -> u32 {
        self.codes.bits()
    }

    /// Scale and offset of a part of a block.
    pub fn scale_and_offset(&self, block: &[u8], part: usize) -> (f32, f32) {
        let (scale, offset) = match self.scale {
            Scale::Half(at) => (half(&block[at..]), 0.0),
            Scale::HalfAndMinimum(at, minimum) => (half(&block[at..]), -half(&block[minimum..])),
            Scale::HalfAndOffset(at, offset) => (half(&block[at..]), half(&block[offset..])),
            Scale::Power(at) => (power(block[at]), 0.0),
        };
        match self.steps {
            None => (scale, offset),
            Some(steps) => {
                let [step, offset_step] = (steps.read)(block, part);
                let step = (i32::from(step) - steps.zero) as f32;
                let offset = match self.has_offset_steps() {
                    true => offset * f32::from(offset_step),
                    false => offset,
                };
                (scale * step, offset)
            }
        }
    }

    /// The level of a code.
    pub fn level(&self, code: u8) -> f32 {
        match self.levels {
            Levels::Linear(zero) => (i32::from(code) - zero) as f32,
            Levels::Signed => f32::from(code.cast_signed()),
            Levels::Table(table) => f32::from(table[usize::from(code & 15)]),
        }
    }

    /// Writes the weights of one block.
    pub fn decode(&self, block: &[u8], out: &mut [f32]) {
        let mut codes = [0; MOST_WEIGHTS];
        let codes = &mut codes[..self.weights];
        self.codes.read(block, codes);
        let len = self.part();
        for (part, (out, codes)) in out.chunks_mut(len).zip(codes.chunks(len)).enumerate() {
            let (scale, offset) = self.scale_and_offset(block, part);
            for (value, &code) in out.iter_mut().zip(codes) {
                *value = scale * self.level(code) - offset;
            }
        }
    }
}

/// A decoder of rows of blocks. Errors: rows that are not whole blocks, any other length.
pub fn decoder<'a>(block: &'static Block, payload: &'a [u8], rows: usize, cols: usize) -> Decoder<'a> {
    check_matrix(rows, cols)?;
    if !cols.is_multiple_of(block.weights) {
        return Err(BadPayload(format!(
            "expected columns in whole blocks of {}, found {cols}",
            block.weights
        )));
    }
    let blocks = cols / block.weights;
    Bytes::none().plus(&[rows, blocks, block.bytes]).exactly(payload)?;
    Ok(Box::new(move |row: usize, out: &mut [f32]| {
        let bytes = part(payload, row, blocks * block.bytes).chunks_exact(block.bytes);
        for (out, bytes) in out.chunks_exact_mut(block.weights).zip(bytes) {
            block.decode(bytes, out);
        }
    }))
}

/// 2^(exponent − 128), of which the two smallest are subnormal.
fn power(exponent: u8) -> f32 {
    match exponent {
        0 | 1 => f32::from_bits(0x0020_0000 << exponent),
        _ => f32::from_bits((u32::from(exponent) - 1) << 23),
    }
}

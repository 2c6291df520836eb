//! The table of block types. d and m are f16.
//!
//! Sources: the Python package `gguf`; the OCP Microscaling Formats specification 1.0 for MXFP4.

use super::{Block, Codes, Digits, Field, Levels, Scale, Steps};

const fn field(at: usize, bits: u32, run: usize) -> Field {
    Field { at, bits, run }
}

/// `[d][16 bytes]`: (q − 8)·d.
pub const Q4_0: Block = Block {
    weights: 32,
    bytes: 18,
    codes: Codes::Bits(&[field(2, 4, 16)]),
    levels: Levels::Linear(8),
    scale: Scale::Half(0),
    steps: None,
};

/// `[d][m][16 bytes]`: q·d + m.
pub const Q4_1: Block = Block {
    weights: 32,
    bytes: 20,
    codes: Codes::Bits(&[field(4, 4, 16)]),
    levels: Levels::Linear(0),
    scale: Scale::HalfAndMinimum(0, 2),
    steps: None,
};

/// `[d][4 bytes of fifth bits][16 bytes]`: (q − 16)·d.
pub const Q5_0: Block = Block {
    weights: 32,
    bytes: 22,
    codes: Codes::Bits(&[field(6, 4, 16), field(2, 1, 1)]),
    levels: Levels::Linear(16),
    scale: Scale::Half(0),
    steps: None,
};

/// `[d][m][4 bytes of fifth bits][16 bytes]`: q·d + m.
pub const Q5_1: Block = Block {
    weights: 32,
    bytes: 24,
    codes: Codes::Bits(&[field(8, 4, 16), field(4, 1, 1)]),
    levels: Levels::Linear(0),
    scale: Scale::HalfAndMinimum(0, 2),
    steps: None,
};

/// `[d][32 signed bytes]`: q·d.
pub const Q8_0: Block = Block {
    weights: 32,
    bytes: 34,
    codes: Codes::Bits(&[field(2, 8, 1)]),
    levels: Levels::Signed,
    scale: Scale::Half(0),
    steps: None,
};

/// `[16 × (4-bit step, 4-bit step of the offset)][64 bytes][d][d of the offset]`, parts of 16.
pub const Q2_K: Block = Block {
    weights: 256,
    bytes: 84,
    codes: Codes::Bits(&[field(16, 2, 32)]),
    levels: Levels::Linear(0),
    scale: Scale::HalfAndOffset(80, 82),
    steps: Some(Steps {
        bits: 4,
        zero: 0,
        part: 16,
        read: |block, part| [block[part] & 15, block[part] >> 4],
    }),
};

/// `[32 bytes of third bits][64 bytes][16 6-bit steps in 12 bytes][d]`, parts of 16: (q − 4)·d·(step − 32). Step i has its low
/// four bits in byte i mod 8, and its upper two in byte 8 + i mod 4.
pub const Q3_K: Block = Block {
    weights: 256,
    bytes: 110,
    codes: Codes::Bits(&[field(32, 2, 32), field(0, 1, 32)]),
    levels: Levels::Linear(4),
    scale: Scale::Half(108),
    steps: Some(Steps {
        bits: 6,
        zero: 32,
        part: 16,
        read: |block, part| {
            let packed = &block[96..108];
            let low = packed[part % 8] >> (4 * (part / 8)) & 15;
            let top = packed[8 + part % 4] >> (2 * (part / 4)) & 3;
            [low | top << 4, 0]
        },
    }),
};

/// `[d][d of the offset][8 × (6-bit step, 6-bit step of the offset) in 12 bytes][128 bytes]`, parts of 32.
pub const Q4_K: Block = Block {
    weights: 256,
    bytes: 144,
    codes: Codes::Bits(&[field(16, 4, 32)]),
    levels: Levels::Linear(0),
    scale: Scale::HalfAndOffset(0, 2),
    steps: Some(STEPS_AND_OFFSETS),
};

/// As [`Q4_K`], with 32 bytes of fifth bits before the others.
pub const Q5_K: Block = Block {
    weights: 256,
    bytes: 176,
    codes: Codes::Bits(&[field(48, 4, 32), field(16, 1, 32)]),
    levels: Levels::Linear(0),
    scale: Scale::HalfAndOffset(0, 2),
    steps: Some(STEPS_AND_OFFSETS),
};

/// Parts 0 to 3 have step and offset in the low six bits of bytes 0–3 and 4–7. Parts 4 to 7 have the low four bits in bytes
/// 8–11, and the upper two bits in the top bits of bytes 0–7.
const STEPS_AND_OFFSETS: Steps = Steps {
    bits: 6,
    zero: 0,
    part: 32,
    read: |block, part| {
        let packed = &block[4..16];
        let (step, offset) = (packed[part % 4], packed[4 + part % 4]);
        if part < 4 {
            return [step & 63, offset & 63];
        }
        let low = packed[4 + part];
        [low & 15 | step >> 2 & 0x30, low >> 4 | offset >> 2 & 0x30]
    },
};

/// `[128 bytes][64 bytes of upper pairs of bits][16 signed steps][d]`, parts of 16: (q − 32)·d·step. The sign bit of a step is
/// inverted when it is read, which adds 128.
pub const Q6_K: Block = Block {
    weights: 256,
    bytes: 210,
    codes: Codes::Bits(&[field(0, 4, 64), field(128, 2, 32)]),
    levels: Levels::Linear(32),
    scale: Scale::Half(208),
    steps: Some(Steps {
        bits: 8,
        zero: 128,
        part: 16,
        read: |block, part| [block[192 + part] ^ 0x80, 0],
    }),
};

/// The levels of the non-linear types.
const NONLINEAR: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// `[d][16 bytes]`: levels of a table.
pub const IQ4_NL: Block = Block {
    weights: 32,
    bytes: 18,
    codes: Codes::Bits(&[field(2, 4, 16)]),
    levels: Levels::Table(&NONLINEAR),
    scale: Scale::Half(0),
    steps: None,
};

/// `[d][8 × upper 2 bits of a step][8 × lower 4 bits][128 bytes]`, parts of 32: levels of the same table times d·(step − 32).
pub const IQ4_XS: Block = Block {
    weights: 256,
    bytes: 136,
    codes: Codes::Bits(&[field(8, 4, 16)]),
    levels: Levels::Table(&NONLINEAR),
    scale: Scale::Half(0),
    steps: Some(Steps {
        bits: 6,
        zero: 32,
        part: 32,
        read: |block, part| {
            let low = block[4 + part / 2] >> (4 * (part % 2)) & 15;
            let top = block[2 + part / 4] >> (2 * (part % 4)) & 3;
            [low | top << 4, 0]
        },
    }),
};

/// Twice the numbers of four bits: a sign, two bits of exponent, one of mantissa.
const FP4: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// `[e][16 bytes]`: levels are twice the fp4 numbers, and the scale is 2^(e − 128), half of what e stands for.
pub const MXFP4: Block = Block {
    weights: 32,
    bytes: 17,
    codes: Codes::Bits(&[field(1, 4, 16)]),
    levels: Levels::Table(&FP4),
    scale: Scale::Power(0),
    steps: None,
};

/// `[48 bytes of five digits][4 bytes of four digits][d]`: (q − 1)·d.
pub const TQ1_0: Block = Block {
    weights: 256,
    bytes: 54,
    codes: Codes::Base3(&[
        Digits {
            at: 0,
            run: 32,
            digits: 5,
        },
        Digits {
            at: 32,
            run: 16,
            digits: 5,
        },
        Digits {
            at: 48,
            run: 4,
            digits: 4,
        },
    ]),
    levels: Levels::Linear(1),
    scale: Scale::Half(52),
    steps: None,
};

/// `[64 bytes][d]`: (q − 1)·d.
pub const TQ2_0: Block = Block {
    weights: 256,
    bytes: 66,
    codes: Codes::Bits(&[field(0, 2, 32)]),
    levels: Levels::Linear(1),
    scale: Scale::Half(64),
    steps: None,
};

/// `[d][32 bytes]`: (q − 1)·d. Number 142, which the package does not have.
pub const PQ2_0: Block = Block {
    weights: 128,
    bytes: 34,
    codes: Codes::Bits(&[field(2, 2, 1)]),
    levels: Levels::Linear(1),
    scale: Scale::Half(0),
    steps: None,
};

/// `[24 bytes of five digits][2 bytes of four digits][d]`: (q − 1)·d. Number 143, which the package does not have.
pub const PTQ1_0: Block = Block {
    weights: 128,
    bytes: 28,
    codes: Codes::Base3(&[
        Digits {
            at: 0,
            run: 16,
            digits: 5,
        },
        Digits {
            at: 16,
            run: 8,
            digits: 5,
        },
        Digits {
            at: 24,
            run: 2,
            digits: 4,
        },
    ]),
    levels: Levels::Linear(1),
    scale: Scale::Half(26),
    steps: None,
};

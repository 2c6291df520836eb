//! Where a block keeps the bits of its codes.
//!
//! Fields of 1, 2 or 4 bits share bytes in runs: in a run of n bytes, weight w has byte w mod n, and in it field number w / n
//! from the lowest bits up. So the bytes of a run hold the fields of 8 n / bits weights, and the next run those of the next.
//! Base-3 digits share bytes the same way, with the first digit as the most significant one.

/// Part of the bits of all codes.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// The byte at which the first run begins.
    pub at: usize,
    /// Bits of a field: 1, 2, 4 or 8.
    pub bits: u32,
    /// Bytes of a run.
    pub run: usize,
}

/// A run of bytes that hold base-3 digits.
#[derive(Clone, Copy, Debug)]
pub struct Digits {
    /// The first byte.
    pub at: usize,
    /// Bytes of the run.
    pub run: usize,
    /// Digits in a byte.
    pub digits: usize,
}

/// The codes of a block.
#[derive(Clone, Copy, Debug)]
pub enum Codes {
    /// The fields of which each code consists, the lowest bits first.
    Bits(&'static [Field]),
    /// Base-3 digits, run after run. A byte b holds ⌈v·256/243⌉ of the number v of its digits, so the first digit is ⌊3b/256⌋.
    Base3(&'static [Digits]),
}

impl Codes {
    /// Bits of a code.
    pub fn bits(&self) -> u32 {
        match self {
            Codes::Bits(fields) => fields.iter().map(|field| field.bits).sum(),
            Codes::Base3(_) => 2,
        }
    }

    /// Reads the codes of a block.
    pub fn read(&self, block: &[u8], codes: &mut [u8]) {
        match self {
            Codes::Bits(fields) => {
                codes.fill(0);
                let mut below = 0;
                for field in *fields {
                    let mask = u8::MAX >> (8 - field.bits);
                    let runs = codes.chunks_mut(field.run_weights());
                    for (codes, bytes) in runs.zip(block[field.at..].chunks(field.run)) {
                        for (codes, shift) in codes.chunks_mut(field.run).zip((0..8).step_by(field.bits as usize)) {
                            for (code, byte) in codes.iter_mut().zip(bytes) {
                                *code |= (byte >> shift & mask) << below;
                            }
                        }
                    }
                    below += field.bits;
                }
            }
            Codes::Base3(runs) => {
                let mut rest = codes;
                for run in *runs {
                    let (here, after) = rest.split_at_mut(run.run * run.digits);
                    for (w, code) in here.iter_mut().enumerate() {
                        // The digits before this one are the upper ones; the product keeps those from this one on.
                        let from = block[run.at + w % run.run].wrapping_mul(3u8.pow((w / run.run) as u32));
                        *code = (u16::from(from) * 3 >> 8) as u8;
                    }
                    rest = after;
                }
            }
        }
    }

    /// The inverse of [`Codes::read`]: writes codes to a block whose code bytes are 0. Base-3 digits become the bytes that the
    /// package `gguf` writes; others can decode to the same digits.
    pub fn write(&self, codes: &[u8], block: &mut [u8]) {
        match self {
            Codes::Bits(fields) => {
                let mut below = 0;
                for field in *fields {
                    let mask = u8::MAX >> (8 - field.bits);
                    let runs = codes.chunks(field.run_weights());
                    for (codes, bytes) in runs.zip(block[field.at..].chunks_mut(field.run)) {
                        for (codes, shift) in codes.chunks(field.run).zip((0..8).step_by(field.bits as usize)) {
                            for (code, byte) in codes.iter().zip(&mut *bytes) {
                                *byte |= (code >> below & mask) << shift;
                            }
                        }
                    }
                    below += field.bits;
                }
            }
            Codes::Base3(runs) => {
                let mut rest = codes;
                for run in *runs {
                    let (here, after) = rest.split_at(run.run * run.digits);
                    for byte in 0..run.run {
                        let digits = here.iter().skip(byte).step_by(run.run);
                        let number = digits.fold(0, |number, &digit| number * 3 + u32::from(digit));
                        // The last run of a block has four digits, as the upper ones of five.
                        let number = number * 3u32.pow(5 - run.digits as u32);
                        block[run.at + byte] = (number * 256).div_ceil(243) as u8;
                    }
                    rest = after;
                }
            }
        }
    }
}

impl Field {
    /// Weights of a run.
    fn run_weights(self) -> usize {
        self.run * (8 / self.bits as usize)
    }
}

//! The order of narrow codes in a group of 32 columns: pure functions from the file's bits to the device's words, and back.
//!
//! A kernel takes four codes out of a word at once, one from each byte. So the columns of a group form eight quads of four
//! neighbours, quad q being columns 4q to 4q + 3, and column 4q + j is in byte j of its word:
//!
//! - 1 bit: one word, quad q at bit q of each byte.
//! - 2 bits: two words, word p holds quads 4p to 4p + 3, quad 4p + k at bit 2k; 0, 1 and -1 as signed numbers of two bits.
//! - Other widths, and blocks of GGUF, are split, from the lowest bits up: 4, 5, 6 and 8 bits have a nibble, 8 bits a second
//!   one, 2, 3 and 6 bits a pair of bits, 3 and 5 bits a single bit. A word of nibbles i holds quad 2i in the low nibbles of
//!   its bytes and quad 2i + 1 in the high ones. Pairs and single bits of more quads share a word, so placed that one shift and
//!   one mask give the nibbles of two quads.

use super::amount::Amount;
use crate::error::{Result, bail};

/// The lowest bit of every byte.
const QUAD_BITS: u32 = 0x0101_0101;

/// The word that a byte of the first eight weights of a group becomes. The bits of the next eight weights are 2 bits higher.
const SPREAD: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut bit = 0;
        while bit < 8 {
            table[byte] |= ((byte as u32 >> bit) & 1) << (8 * (bit % 4) + bit / 4);
            bit += 1;
        }
        byte += 1;
    }
    table
};

/// Both words that each byte of a base-3 group becomes, as one number: `[index of the byte][byte]`. A digit 0, 1 or 2 means 0,
/// +1 or -1, and is stored as that number in two bits. Only two digits of the seventh byte are used.
const TRITS: [[u64; 243]; 7] = {
    let mut table = [[0; 243]; 7];
    let mut place = 0;
    while place < 7 {
        let mut byte = 0;
        while byte < 243 {
            let mut rest = byte;
            let mut digit = 0;
            while digit < 5 && place * 5 + digit < 32 {
                let col = place * 5 + digit;
                let code = [0u64, 1, 3][rest % 3];
                table[place][byte] |= code << (32 * (col / 16) + 8 * (col % 4) + 2 * (col % 16 / 4));
                rest /= 3;
                digit += 1;
            }
            byte += 1;
        }
        place += 1;
    }
    table
};

/// 32 bits, weight i at bit i, as the device's word.
pub fn bits1(file: [u8; 4]) -> u32 {
    let [a, b, c, d] = file.map(|byte| SPREAD[usize::from(byte)]);
    a | b << 2 | c << 4 | d << 6
}

/// The inverse of [`bits1`].
pub fn bits1_inverse(word: u32) -> [u8; 4] {
    let bit = |col: usize| word >> (8 * (col % 4) + col / 4) & 1;
    std::array::from_fn(|byte| (0..8).fold(0, |all, i| all | (bit(8 * byte + i) as u8) << i))
}

/// A base-3 group as the device's two words. Errors: `Parse` for a byte above 242, which is not five digits.
pub fn bits2(file: [u8; 7]) -> Result<[u32; 2]> {
    let mut both = 0;
    for (table, byte) in TRITS.iter().zip(file) {
        match table.get(usize::from(byte)) {
            Some(codes) => both |= codes,
            None => bail!(Parse, "expected base-3 bytes up to 242, found {byte}"),
        }
    }
    Ok([both as u32, (both >> 32) as u32])
}

/// The inverse of [`bits2`], with zeros for the unused digits of the last byte.
pub fn bits2_inverse(words: [u32; 2]) -> [u8; 7] {
    let digit = |col: usize| match words[col / 16] >> (8 * (col % 4) + 2 * (col % 16 / 4)) & 3 {
        3 => 2,
        code => code as u8,
    };
    let cols = |byte: usize| 5 * byte..(5 * byte + 5).min(32);
    std::array::from_fn(|byte| cols(byte).rev().fold(0, |value, col| value * 3 + digit(col)))
}

/// The place of the 2 bits of quad q in each byte of their word: in the same nibble as the quad's own nibble.
fn pair_at(q: usize) -> usize {
    4 * (q % 2) + 2 * (q % 4 / 2)
}

/// The place of the 1 bit of quad q.
fn bit_at(q: usize) -> usize {
    4 * (q % 2) + q / 2
}

/// How codes of some width are split: per group vectors of nibbles, two words of bit pairs, one word of single bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Width {
    /// Vectors of nibbles per group: 0, 1 or 2.
    pub nibbles: usize,
    /// The lower bit of the pair in the code, where there is a pair.
    pub pair: Option<u32>,
    /// The single bit in the code, where there is one.
    pub bit: Option<u32>,
}

impl Width {
    /// The split of codes of `width` bits. Errors: `Parse` for a width that the format does not have.
    pub fn of(width: u8) -> Result<Width> {
        match width {
            3..=6 | 8 => Ok(Width::of_block(width.into())),
            _ => bail!(Parse, "expected a bit width of 3, 4, 5, 6 or 8, found {width}"),
        }
    }

    /// The split of codes of 2, 3, 4, 5, 6 or 8 bits.
    pub fn of_block(bits: u32) -> Width {
        let (nibbles, pair, bit) = match bits {
            2 => (0, Some(0), None),
            3 => (0, Some(0), Some(2)),
            4 => (1, None, None),
            5 => (1, None, Some(4)),
            6 => (1, Some(4), None),
            _ => (2, None, None),
        };
        Width { nibbles, pair, bit }
    }

    /// Vectors of nibbles and other words of a row.
    pub fn amount(self, groups: usize) -> Amount {
        let words = usize::from(self.pair.is_some()) * 2 + usize::from(self.bit.is_some());
        Amount {
            vectors: groups * self.nibbles,
            words: groups * words,
        }
    }

    /// All words of a row, those of its vectors included.
    pub fn words(self, groups: usize) -> usize {
        let Amount { vectors, words } = self.amount(groups);
        vectors * 4 + words
    }

    /// Where the pairs and the single bits of a row begin, in words.
    fn places(self, groups: usize) -> [usize; 2] {
        let pairs = groups * self.nibbles * 4;
        [pairs, pairs + groups * 2 * usize::from(self.pair.is_some())]
    }

    /// Writes a row of codes, one per column, as the device's words: the low nibbles of all groups, the high nibbles of 8-bit
    /// codes, the pairs, the single bits.
    pub fn write(self, codes: &[u8], words: &mut [u32]) {
        words.fill(0);
        let groups = codes.len() / 32;
        let [pairs, bits] = self.places(groups);
        for (q, quad) in codes.chunks_exact(4).enumerate() {
            let (group, q) = (q / 8, q % 8);
            let quad = u32::from_le_bytes([quad[0], quad[1], quad[2], quad[3]]);
            for half in 0..self.nibbles {
                let nibbles = quad >> (4 * half) & (QUAD_BITS * 15);
                words[(half * groups + group) * 4 + q / 2] |= nibbles << (4 * (q % 2));
            }
            if let Some(at) = self.pair {
                words[pairs + group * 2 + q / 4] |= (quad >> at & (QUAD_BITS * 3)) << pair_at(q);
            }
            if let Some(at) = self.bit {
                words[bits + group] |= (quad >> at & QUAD_BITS) << bit_at(q);
            }
        }
    }

    /// The inverse of [`Parts::write`].
    pub fn read(self, words: &[u32], codes: &mut [u8]) {
        let groups = codes.len() / 32;
        let [pairs, bits] = self.places(groups);
        for (q, quad) in codes.chunks_exact_mut(4).enumerate() {
            let (group, q) = (q / 8, q % 8);
            let mut all = 0;
            for half in 0..self.nibbles {
                let word = words[(half * groups + group) * 4 + q / 2];
                all |= (word >> (4 * (q % 2)) & (QUAD_BITS * 15)) << (4 * half);
            }
            if let Some(at) = self.pair {
                all |= (words[pairs + group * 2 + q / 4] >> pair_at(q) & (QUAD_BITS * 3)) << at;
            }
            if let Some(at) = self.bit {
                all |= (words[bits + group] >> bit_at(q) & QUAD_BITS) << at;
            }
            quad.copy_from_slice(&all.to_le_bytes());
        }
    }
}

/// Reads codes of `width` bits from the file, most significant bit first; 8 of them fill `width` bytes.
pub fn read_msb_first(width: u8, file: &[u8], codes: &mut [u8]) {
    let width = usize::from(width);
    let mask = u8::MAX >> (8 - width);
    for (eight, bytes) in codes.chunks_exact_mut(8).zip(file.chunks_exact(width)) {
        let word = bytes.iter().fold(0u64, |word, &byte| word << 8 | u64::from(byte));
        for (k, code) in eight.iter_mut().enumerate() {
            *code = (word >> (width * (7 - k))) as u8 & mask;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_go_where_a_kernel_looks_and_come_back() {
        for col in 0..32 {
            let file = (1u32 << col).to_le_bytes();
            assert_eq!(bits1(file), 1 << (8 * (col % 4) + col / 4));
            assert_eq!(bits1_inverse(bits1(file)), file);
        }
        for seed in 0..1000u32 {
            let file = seed.wrapping_mul(0x9E37_79B9).to_le_bytes();
            assert_eq!(bits1_inverse(bits1(file)), file);
        }
    }

    #[test]
    fn trits_go_where_a_kernel_looks_and_come_back() {
        // All zeros, then one digit at a time.
        assert_eq!(bits2([0; 7]).unwrap(), [0; 2]);
        for col in 0..32 {
            for (digit, code) in [(1, 1), (2, 3)] {
                let mut file = [0; 7];
                file[col / 5] = 3u8.pow(col as u32 % 5) * digit;
                let words = bits2(file).unwrap();
                let found = words[col / 16] >> (8 * (col % 4) + 2 * (col % 16 / 4)) & 3;
                assert_eq!(found, code, "column {col}");
                assert_eq!(bits2_inverse(words), file);
            }
        }
        for byte in 0..=242 {
            // Two digits of the last byte are used.
            let file = [byte, 242 - byte, byte, 7, byte, 121, byte % 9];
            assert_eq!(bits2_inverse(bits2(file).unwrap()), file);
            let ignored = [file[0], file[1], file[2], file[3], file[4], file[5], byte];
            assert_eq!(bits2(ignored).unwrap(), bits2(file).unwrap());
        }
        assert!(bits2([0, 0, 0, 0, 0, 0, 243]).is_err());
        assert!(bits2([255, 0, 0, 0, 0, 0, 0]).is_err());
    }

    #[test]
    fn codes_of_every_width_come_back() {
        for width in [2u8, 3, 4, 5, 6, 8] {
            let split = Width::of_block(width.into());
            for groups in 1..6 {
                let codes: Vec<u8> = (0..groups * 32u32)
                    .map(|i| (i.wrapping_mul(0x9E37_79B9) >> 24) as u8 >> (8 - width))
                    .collect();
                let mut words = vec![!0; split.words(groups as usize)];
                split.write(&codes, &mut words);
                let mut again = vec![0xA5; codes.len()];
                split.read(&words, &mut again);
                assert_eq!(again, codes, "{width} bits, {groups} groups");
            }
        }
        for width in [0, 1, 2, 7, 9, 255] {
            assert!(Width::of(width).is_err(), "{width}");
        }
    }
}

//! Made-up tensors and activations. They depend only on a case's seed.

use crate::dtype::encode::encode;
use crate::dtype::{Dtype, Size};
use crate::error::Result;
use half::f16;

/// How many weights are replaced, for types with an overlay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Overlay {
    Empty,
    Sparse,
    Dense,
}

/// The values of made-up weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Values {
    /// Largest magnitude.
    pub amplitude: f32,
    pub overlay: Overlay,
}

impl Values {
    pub const PLAIN: Values = Values {
        amplitude: 1.0,
        overlay: Overlay::Sparse,
    };
    /// So small that every f16 scale is subnormal, and many f16 weights are.
    pub const SUBNORMAL: Values = Values {
        amplitude: 1e-4,
        ..Values::PLAIN
    };

    pub fn overlay(overlay: Overlay) -> Values {
        Values {
            overlay,
            ..Values::PLAIN
        }
    }
}

/// A stream of numbers that depend only on a seed and a counter (SplitMix64, Steele et al. 2014).
pub(super) struct Random(pub u64);

impl Random {
    pub fn at(seed: u64, index: u64) -> u64 {
        let mut z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number in -1..1.
    pub fn unit(bits: u64) -> f32 {
        (bits >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        Random::at(0, self.0)
    }

    pub fn floats(&mut self, count: usize, amplitude: f32) -> Vec<f32> {
        (0..count).map(|_| Random::unit(self.bits()) * amplitude).collect()
    }

    pub fn words(&mut self, count: usize, amplitude: f32) -> Vec<u32> {
        words(&self.floats(count, amplitude))
    }

    /// A payload of weights. One row in ten is ten times smaller.
    pub fn payload(&mut self, dtype: Dtype, rows: usize, cols: usize, values: Values) -> Result<Vec<u8>> {
        let Values { amplitude, overlay } = values;
        let seed = self.bits();
        // An encoder would not choose all widths of rows, nor overlays in any order.
        match dtype {
            Dtype::Vbit | Dtype::VbitRo => return Ok(self.mixed_bits(dtype, rows, cols, amplitude)),
            Dtype::Q1 => return Ok(self.tiles(rows, cols, amplitude, 4, 255)),
            Dtype::Q1s => {
                let mut payload = self.tiles(rows, cols, amplitude, 4, 255);
                let entries = self.overlay(rows, cols, amplitude, overlay);
                payload.extend((entries.len() as u32).to_le_bytes());
                // In no order, here the last rows first.
                for &(row, col, value) in entries.iter().rev() {
                    payload.extend(((row * cols + col) as u32).to_le_bytes());
                    payload.extend(value);
                }
                return Ok(payload);
            }
            Dtype::Q1t => {
                let mut payload = self.tiles(rows, cols, amplitude, 7, 242);
                let entries = self.overlay(rows, cols, amplitude, overlay);
                for row in 0..=rows {
                    let before = entries.partition_point(|entry| entry.0 < row) as u32;
                    payload.extend(before.to_le_bytes());
                }
                for &(_, col, value) in &entries {
                    payload.extend((col as u16).to_le_bytes());
                    payload.extend(value);
                }
                return Ok(payload);
            }
            _ => {}
        }
        if !dtype.has_encoder() {
            return self.blocks(dtype, rows, cols, amplitude);
        }
        encode(dtype, rows, cols, &|first, out| {
            for (i, value) in out.iter_mut().enumerate() {
                let index = first * cols + i;
                let factor = if (index / cols) % 10 == 3 { 0.1 } else { 1.0 };
                *value = Random::unit(Random::at(seed, index as u64)) * amplitude * factor;
            }
            Ok(())
        })
    }

    /// The f16 of a number of either sign.
    fn half(&mut self, amplitude: f32) -> [u8; 2] {
        f16::from_f32(Random::unit(self.bits()) * amplitude).to_le_bytes()
    }

    /// A scale that keeps weights below `amplitude`.
    fn scale(&mut self, row: usize, amplitude: f32) -> [u8; 2] {
        let factor = if row % 10 == 3 { 0.05 } else { 0.5 };
        self.half(amplitude * factor)
    }

    /// Groups of a scale and so many random bytes, each at most `most`.
    fn tiles(&mut self, rows: usize, cols: usize, amplitude: f32, bytes: usize, most: u64) -> Vec<u8> {
        let mut payload = Vec::new();
        for group in 0..rows * cols / 32 {
            payload.extend(self.scale(group * 32 / cols, amplitude));
            let bits = self.bits();
            payload.extend((0..bytes).map(|i| ((((bits >> (8 * i)) & 255) * (most + 1)) >> 8) as u8));
        }
        payload
    }

    /// Blocks with scales of their own, of either sign, and random codes and steps. Errors: those of [`Dtype::size`].
    fn blocks(&mut self, dtype: Dtype, rows: usize, cols: usize, amplitude: f32) -> Result<Vec<u8>> {
        let (Size::Exact(bytes) | Size::AtLeast(bytes)) = dtype.size(&[rows as u64, cols as u64])?;
        let mut payload = vec![0; bytes as usize];
        let blocks = rows * cols / dtype.row_multiple();
        for (index, block) in payload.chunks_exact_mut(bytes as usize / blocks).enumerate() {
            let row = index * dtype.row_multiple() / cols;
            let factor = if row % 10 == 3 { 0.05 } else { 0.5 };
            // Not close to 0, which would leave nothing to compare in a row of one block.
            let unit = Random::unit(self.bits());
            let deviation = f64::from((0.2 * unit.signum() + 0.8 * unit) * amplitude * factor);
            let seed = self.bits();
            dtype.fill_random(block, [1, dtype.row_multiple()], deviation, &|bytes| {
                for (i, bytes) in bytes.chunks_mut(8).enumerate() {
                    bytes.copy_from_slice(&Random::at(seed, i as u64).to_le_bytes()[..bytes.len()]);
                }
            });
        }
        Ok(payload)
    }

    /// Rows of all widths in bits.
    fn mixed_bits(&mut self, dtype: Dtype, rows: usize, cols: usize, amplitude: f32) -> Vec<u8> {
        let mut payload: Vec<u8> = (0..rows).map(|_| [3, 4, 5, 6, 8][self.bits() as usize % 5]).collect();
        let widths = payload.clone();
        for (row, &width) in widths.iter().enumerate() {
            for _ in 0..cols / 32 {
                payload.extend(self.scale(row, amplitude / (1u32 << (width - 2)) as f32));
            }
        }
        let row_bytes = |width: &u8| cols / 8 * usize::from(*width);
        if dtype == Dtype::VbitRo {
            let mut at = 0u32;
            payload.extend(at.to_le_bytes());
            for width in &widths {
                at += row_bytes(width) as u32;
                payload.extend(at.to_le_bytes());
            }
        }
        let packed = widths.iter().map(row_bytes).sum::<usize>();
        payload.extend((0..packed).map(|_| self.bits() as u8));
        payload
    }

    /// Rows, columns and f16 values that replace weights: sorted by row, with columns in no order, some of them twice. The
    /// third row has none.
    fn overlay(&mut self, rows: usize, cols: usize, amplitude: f32, overlay: Overlay) -> Vec<(usize, usize, [u8; 2])> {
        let of_16 = match overlay {
            Overlay::Empty => 0,
            Overlay::Sparse => 1,
            Overlay::Dense => 14,
        };
        let mut entries = Vec::new();
        for row in (0..rows).filter(|&row| row != 2) {
            let mut cols: Vec<usize> = (0..cols).filter(|_| self.bits() % 16 < of_16).collect();
            cols.extend(cols.clone().iter().step_by(5));
            let middle = cols.len() / 3;
            cols.rotate_left(middle);
            entries.extend(cols.into_iter().map(|col| (row, col, self.half(amplitude * 2.0))));
        }
        entries
    }
}

/// The bits of floats.
pub(super) fn words(floats: &[f32]) -> Vec<u32> {
    floats.iter().map(|value| value.to_bits()).collect()
}

/// Rows of `len` values, each padded with zeros to `stride`.
pub(super) fn padded(random: &mut Random, rows: usize, len: usize, stride: usize, amplitude: f32) -> Vec<u32> {
    followed(random, rows, len, stride, amplitude, 0.0)
}

/// Rows of `len` activations, each followed up to `stride` by values that another layer may have left there: weights end
/// before them.
pub(super) fn operands(random: &mut Random, rows: usize, len: usize, stride: usize) -> Vec<u32> {
    followed(random, rows, len, stride, 1.0, 7.0)
}

fn followed(random: &mut Random, rows: usize, len: usize, stride: usize, amplitude: f32, rest: f32) -> Vec<u32> {
    let mut all = Vec::new();
    for _ in 0..rows {
        all.extend(random.words(len, amplitude));
        all.resize(all.len() + stride - len, rest.to_bits());
    }
    all
}

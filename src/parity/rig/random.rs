//! The numbers of made-up tensors and buffers: the same everywhere, for a case's seed.

use crate::dtype::Dtype;
use crate::dtype::encode::encode;
use crate::error::Result;

/// Numbers that only depend on a seed and a counter (SplitMix64, Steele et al. 2014).
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

    /// A payload of weights; a tenth of the rows is ten times smaller.
    pub fn payload(&mut self, dtype: Dtype, rows: usize, cols: usize, amplitude: f32) -> Result<Vec<u8>> {
        let seed = self.bits();
        encode(dtype, rows, cols, &|first, out| {
            for (i, value) in out.iter_mut().enumerate() {
                let index = first * cols + i;
                let factor = if (index / cols) % 10 == 3 { 0.1 } else { 1.0 };
                *value = Random::unit(Random::at(seed, index as u64)) * amplitude * factor;
            }
            Ok(())
        })
    }
}

pub(super) fn words(floats: &[f32]) -> Vec<u32> {
    floats.iter().map(|value| value.to_bits()).collect()
}

/// Columns of `len` values, each padded with zeros to `stride`.
pub(super) fn padded(random: &mut Random, columns: usize, len: usize, stride: usize, amplitude: f32) -> Vec<u32> {
    let mut all = Vec::new();
    for _ in 0..columns {
        all.extend(random.words(len, amplitude));
        all.resize(all.len() + stride - len, 0);
    }
    all
}

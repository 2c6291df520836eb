//! The block types of GGUF. They are read and never written. A payload consists of rows of whole blocks; the reference crate
//! says what is in a block.

use super::payload::{Payload, Section};
use super::planes::{Planes, Repack, blocks};
use super::spec::{Encode, Shapes, Spec, Tail};
use crate::error::Result;
use cmf_kernels_ref::dtype::gguf::{self, Block, Levels, Scale, types};
use half::f16;

/// The rows of the type table: number in GGUF, bits of a code, device layout, and the function that writes its codes.
macro_rules! blocks {
    ($($name:ident: $number:literal, $bits:literal, $planes:ident, $codes:ident;)*) => {
        $(pub const $name: Spec = Spec {
            id: None,
            gguf: Some($number),
            name: stringify!($name),
            quant: "",
            code_bits: $bits,
            shapes: Shapes::BlockRows(types::$name.weights as u64),
            max_cols: u64::MAX,
            sections: &[Section::Blocks {
                weights: types::$name.weights as u64,
                bytes: types::$name.bytes as u64,
            }],
            tail: Tail::NONE,
            decoder: |payload, rows, cols| gguf::decoder(&types::$name, payload, rows, cols),
            encode: Encode::Never,
            planes: |_| Ok(Planes::$planes),
            repack: Repack {
                codes: |payload, row, out| blocks::$codes(&types::$name, payload, row, out),
                scales: |payload, row, out| blocks::record(&types::$name, payload, row, out),
                ..Repack::COPY
            },
            verify: |payload| verify(&types::$name, payload),
            random: Some(|payload, _, deviation, random| fill_random(&types::$name, payload, deviation, random)),
        };)*

        const ALL: &[(&Spec, &Block)] = &[$((&$name, &types::$name)),*];
    };
}

blocks! {
    Q4_0: 2, 4, Nib4, nibbles;
    Q4_1: 3, 4, Q41, codes;
    Q5_0: 6, 5, Q50, codes;
    Q5_1: 7, 5, Q51, codes;
    Q8_0: 8, 8, I8Group, bytes;
    Q2_K: 10, 2, Q2K, codes;
    Q3_K: 11, 3, Q3K, codes;
    Q4_K: 12, 4, Q4K, codes;
    Q5_K: 13, 5, Q5K, codes;
    Q6_K: 14, 6, Q6K, codes;
    IQ4_NL: 20, 4, Iq4Nl, codes;
    IQ4_XS: 23, 4, Iq4Xs, codes;
    TQ1_0: 34, 2, Tq2, codes;
    TQ2_0: 35, 2, Tq2, codes;
    MXFP4: 39, 4, Mxfp4, codes;
    PQ2_0: 142, 2, Pq2, codes;
    PTQ1_0: 143, 2, Pq2, codes;
}

/// The block of the type with this number, if its weights are integers times the f16 at the given byte of it.
pub fn plain_scale(number: Option<u32>) -> Option<(&'static Block, usize)> {
    let (_, block) = ALL.iter().find(|(spec, _)| spec.gguf == number)?;
    match (block.scale, block.levels, block.steps) {
        (Scale::Half(at), Levels::Linear(_) | Levels::Signed, None) => Some((block, at)),
        _ => None,
    }
}

/// Errors: `NonFinite` with row and block for a scale that is not a finite number.
fn verify(block: &'static Block, payload: &Payload) -> Result<()> {
    for row in 0..payload.rows {
        for (index, bytes) in payload.row(0, row)?.chunks_exact(block.bytes).enumerate() {
            blocks::check_scales(block, bytes).map_err(|err| err.context(format!("row {row}, block {index}")))?;
        }
    }
    Ok(())
}

/// Fills blocks with random codes and steps under scales that give this standard deviation.
fn fill_random(block: &'static Block, payload: &mut [u8], deviation: f64, random: &dyn Fn(&mut [u8])) {
    random(payload);
    let mut values = vec![0.0; block.weights];
    for bytes in payload.chunks_exact_mut(block.bytes) {
        set_scale(block, bytes, 1.0);
        block.decode(bytes, &mut values);
        let squares: f64 = values.iter().map(|&value| f64::from(value).powi(2)).sum();
        let found = (squares / block.weights as f64).sqrt();
        set_scale(block, bytes, deviation / found.max(0.5));
    }
}

/// Sets the scale of a block, and its second scale so that the mean of the weights is about 0.
fn set_scale(block: &Block, bytes: &mut [u8], scale: f64) {
    let mut put = |at: usize, value: f64| {
        let mut half = f16::from_f64(value);
        if half.to_bits() & 0x7fff == 0 {
            // The smallest scale, so that not all weights are 0.
            half = f16::from_bits(half.to_bits() | 1);
        }
        bytes[at..at + 2].copy_from_slice(&half.to_le_bytes());
    };
    let mean = f64::from((1u32 << block.code_bits()) - 1) / 2.0;
    match block.scale {
        Scale::Half(at) => put(at, scale),
        Scale::HalfAndMinimum(at, minimum) => {
            put(at, scale);
            put(minimum, -scale * mean);
        }
        Scale::HalfAndOffset(at, offset) => {
            put(at, scale);
            put(offset, scale * mean);
        }
        Scale::Power(at) => bytes[at] = (128.0 + scale.abs().log2().round()).clamp(2.0, 250.0) as u8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::planes::{Amount, Origin, Source};
    use crate::dtype::{Dtype, Size};
    use crate::error::Kind;

    #[test]
    fn the_table_agrees_with_the_reference() {
        for (spec, block) in ALL {
            assert_eq!(u32::from(spec.code_bits), block.code_bits(), "{}", spec.name);
            let dtype = Dtype::from_gguf(spec.gguf.unwrap()).unwrap();
            assert_eq!(format!("{dtype:?}"), spec.name);
            let row = dtype.size(&[block.weights as u64]).unwrap();
            assert_eq!(row, Size::Exact(block.bytes as u64));
            let shape = [3, 5, 7 * block.weights as u64];
            assert_eq!(dtype.size(&shape).unwrap(), Size::Exact(15 * 7 * block.bytes as u64));
            let partial = [4, block.weights as u64 + 16];
            assert_eq!(dtype.size(&partial).unwrap_err().kind, Kind::Parse);
        }
    }

    #[test]
    fn scales_that_are_not_finite_are_refused() {
        for (spec, block) in ALL {
            let dtype = Dtype::from_gguf(spec.gguf.unwrap()).unwrap();
            let mut good = vec![0; block.bytes * 6];
            dtype.fill_random(&mut good, [2, block.weights * 3], 0.1, &|bytes| bytes.fill(0x6A));
            dtype.verify_scales(&good, 2, block.weights * 3).unwrap();
            let (places, bad): (Vec<usize>, &[u8]) = match block.scale {
                Scale::Half(at) => (vec![at], &[0, 0x7C]),
                Scale::HalfAndMinimum(at, second) | Scale::HalfAndOffset(at, second) => (vec![at, second], &[1, 0xFC]),
                Scale::Power(at) => (vec![at], &[255]),
            };
            for at in places {
                let mut payload = good.clone();
                payload[block.bytes * 4 + at..][..bad.len()].copy_from_slice(bad);
                let err = dtype.verify_scales(&payload, 2, block.weights * 3).unwrap_err();
                assert_eq!(err.kind, Kind::NonFinite);
                assert!(err.message.contains("row 1, block 1"), "{err}");
                let source = Source::open(dtype, &payload, 2, block.weights * 3).unwrap();
                let mut out = vec![0; source.record_bytes(&(0..2))];
                let origin = Origin {
                    first: 0,
                    before: Amount::default(),
                };
                let err = source.records(origin, 0..2, &mut out).unwrap_err();
                assert_eq!(err.kind, Kind::NonFinite);
                assert!(err.message.contains("row 1, block 1"), "{err}");
            }
        }
    }

    #[test]
    fn random_blocks_have_the_deviation_asked_for() {
        for (spec, block) in ALL {
            let dtype = Dtype::from_gguf(spec.gguf.unwrap()).unwrap();
            let (mut payload, cols) = (vec![0; block.bytes * 32], block.weights * 32);
            dtype.fill_random(&mut payload, [1, cols], 0.05, &|bytes| {
                let byte = |i: usize| (i as u32).wrapping_mul(0x9E37_79B9) >> 21;
                bytes.iter_mut().enumerate().for_each(|(i, b)| *b = byte(i) as u8);
            });
            let mut row = vec![0.0; cols];
            dtype.decoder(&payload, 1, cols).unwrap().row(0, &mut row);
            let squares: f64 = row.iter().map(|&v| f64::from(v).powi(2)).sum();
            let found = (squares / cols as f64).sqrt();
            assert!((0.03..0.08).contains(&found), "{}: {found}", spec.name);
        }
    }
}

//! Weights that are integers times the scale of their block, written with the same integers and the same scales.
//!
//! A group is 32 neighbouring columns of a row, as everywhere in the container's types; the blocks of GGUF are one or more of
//! them. Nothing is rounded here: a code or a scale that a type cannot hold is an error.

pub use super::codes::Codes;
use super::codes::Row;
use super::gguf::plain_scale;
use super::payload::GROUP;
use super::table::Dtype;
use super::{q1, q4, vbit};
use crate::error::{Result, bail};
use cmf_kernels_ref::dtype::RowDecoder;
use half::f16;
use rayon::prelude::*;

/// Returns the groups of a row.
pub type ReadCodes<'a> = dyn Fn(usize) -> Result<Vec<Codes>> + Sync + 'a;

impl Dtype {
    /// Whether every weight is an integer times the f16 scale of its block, in a type of GGUF.
    pub fn has_block_scales(self) -> bool {
        plain_scale(self.gguf()).is_some()
    }

    /// A decoder of the scales, one for each weight.
    ///
    /// Errors: `UnsupportedTensorType` for a type without such scales, `Parse` for a payload of another length.
    pub fn scale_decoder<'a>(self, payload: &'a [u8], rows: usize, cols: usize) -> Result<Box<dyn RowDecoder + 'a>> {
        let Some((block, at)) = plain_scale(self.gguf()) else {
            bail!(UnsupportedTensorType, "{} has no block scales", self.name());
        };
        self.decoder(payload, rows, cols)?;
        let row_bytes = cols / block.weights * block.bytes;
        Ok(Box::new(move |row: usize, out: &mut [f32]| {
            let blocks = payload[row * row_bytes..][..row_bytes].chunks_exact(block.bytes);
            for (out, bytes) in out.chunks_exact_mut(block.weights).zip(blocks) {
                out.fill(f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32());
            }
        }))
    }

    /// The payload of a matrix of `rows` rows with exactly these codes and scales. `bits`: the width of every row, in types
    /// that have widths.
    ///
    /// Errors: those of `read`; `UnsupportedTensorType` for a type that holds no codes of this kind, for a code that it cannot
    /// hold, and for a size that its tables cannot hold.
    pub fn encode_codes(self, bits: u8, rows: usize, read: &ReadCodes) -> Result<Vec<u8>> {
        let pack: fn(&Codes, u8, usize, &mut Row) -> Result<()> = match self {
            Dtype::Q4Tiled => q4::put_tile,
            Dtype::Q4Block => q4::put_block,
            Dtype::Q1t => q1::put_trits,
            Dtype::Vbit | Dtype::VbitRo => vbit::put,
            other => bail!(
                UnsupportedTensorType,
                "{} does not keep codes as they are",
                other.name()
            ),
        };
        let row = |row: usize| {
            let mut parts = Row::default();
            for (group, codes) in read(row)?.iter().enumerate() {
                pack(codes, bits, group * GROUP, &mut parts)
                    .map_err(|err| err.context(format_args!("row {row}, group {group}")))?;
            }
            Ok(parts)
        };
        let parts: Vec<Row> = (0..rows).into_par_iter().map(row).collect::<Result<_>>()?;
        let part = |part: fn(&Row) -> &Vec<u8>| parts.iter().flat_map(part).copied();
        let (packed, scales, overlay) = (
            part(|row| &row.packed),
            part(|row| &row.scales),
            part(|row| &row.overlay),
        );
        Ok(match self {
            Dtype::Q1t => {
                let table = offsets(parts.iter().map(|row| row.overlay.len() / q1::ROW_ENTRY))?;
                packed.chain(table).chain(overlay).collect()
            }
            Dtype::Vbit => vec![bits; rows].into_iter().chain(scales).chain(packed).collect(),
            Dtype::VbitRo => {
                let table = offsets(parts.iter().map(|row| row.packed.len()))?;
                let widths = vec![bits; rows].into_iter();
                widths.chain(scales).chain(table).chain(packed).collect()
            }
            _ => packed.chain(scales).collect(),
        })
    }
}

/// The table of ends, which begins with 0. Errors: `UnsupportedTensorType` for 2^32 and more.
fn offsets(sizes: impl Iterator<Item = usize>) -> Result<Vec<u8>> {
    let mut end = 0usize;
    let mut table = vec![0; 4];
    for size in sizes {
        end = end.saturating_add(size);
        let Ok(end) = u32::try_from(end) else {
            bail!(UnsupportedTensorType, "an offset of {end}, expected less than 2^32");
        };
        table.extend(end.to_le_bytes());
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    fn decoded(dtype: Dtype, payload: &[u8], rows: usize, cols: usize) -> Vec<u32> {
        let decoder = dtype.decoder(payload, rows, cols).unwrap();
        let mut row = vec![0.0; cols];
        let bits = (0..rows).flat_map(|index| {
            decoder.row(index, &mut row);
            row.iter().map(|value| value.to_bits()).collect::<Vec<_>>()
        });
        bits.collect()
    }

    /// Every code from `least` to `most`, under scales of both signs, a zero and the smallest one.
    fn groups(least: i16, most: i16, cols: usize) -> impl Fn(usize) -> Vec<Codes> {
        let scales = [0x3555, 0xB4CD, 0x0000, 0x8000, 0x0001, 0x7BFF].map(f16::from_bits);
        move |row| {
            let group = |group: usize| {
                let scale = scales[(row + group) % scales.len()];
                let span = i32::from(most - least) + 1;
                let code = |k: usize| least + (((row * 5 + group * 32 + k) as i32) % span) as i16;
                let signed = |k: usize| if scale == f16::ZERO { -((k % 2) as i16) } else { code(k) };
                Codes {
                    scale,
                    codes: std::array::from_fn(signed),
                }
            };
            (0..cols / GROUP).map(group).collect()
        }
    }

    #[test]
    fn every_code_and_scale_is_kept() {
        for (dtype, bits, least, most) in [
            (Dtype::Q4Tiled, 0, -8, 7),
            (Dtype::Q4Block, 0, -8, 7),
            (Dtype::Q1t, 0, -1, 1),
            (Dtype::Vbit, 6, -31, 32),
            (Dtype::VbitRo, 6, -16, 15),
            (Dtype::VbitRo, 8, -127, 127),
        ] {
            let (rows, cols) = (12, 256);
            let made = groups(least, most, cols);
            let payload = dtype.encode_codes(bits, rows, &|row| Ok(made(row))).unwrap();
            dtype.check_length(&[rows as u64, cols as u64], &payload).unwrap();
            let wanted = (0..rows).flat_map(&made).flat_map(|group| {
                let scale = group.scale.to_f32();
                group.codes.map(|code| (f32::from(code) * scale).to_bits())
            });
            assert!(
                decoded(dtype, &payload, rows, cols) == wanted.collect::<Vec<_>>(),
                "{}",
                dtype.name()
            );
        }
    }

    #[test]
    fn codes_are_found_again() {
        let made = groups(-8, 7, 256);
        for group in (0..12).flat_map(made) {
            let scale = group.scale.to_f32();
            let weights = group.codes.map(|code| f32::from(code) * scale);
            let found = Codes::of(&weights, &[scale; GROUP]).unwrap();
            let same = |(a, b): (i16, i16)| (f32::from(a) * scale).to_bits() == (f32::from(b) * scale).to_bits();
            assert!(found.scale.to_bits() == group.scale.to_bits());
            assert!(found.codes.into_iter().zip(group.codes).all(same));
        }
        let mut scales = [0.5; GROUP];
        assert!(Codes::of(&[1.5; GROUP], &scales).is_some());
        assert_eq!(Codes::of(&[1.25; GROUP], &scales), None);
        scales[31] = 0.25;
        assert_eq!(Codes::of(&[1.5; GROUP], &scales), None);
    }

    #[test]
    fn overlays_hold_what_digits_cannot() {
        let codes = |scale: f16| Codes {
            scale,
            codes: std::array::from_fn(|k| [0, 2, -1, 1][k % 4]),
        };
        let payload = Dtype::Q1t
            .encode_codes(0, 2, &|_| Ok(vec![codes(f16::ONE); 2]))
            .unwrap();
        let wanted = [0f32, 2.0, -1.0, 1.0].map(f32::to_bits).repeat(32);
        assert!(decoded(Dtype::Q1t, &payload, 2, 64) == wanted);
        let large = Dtype::Q1t.encode_codes(0, 1, &|_| Ok(vec![codes(f16::MAX)]));
        assert_eq!(large.unwrap_err().kind, Kind::UnsupportedTensorType);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let group = |code: i16| Codes {
            scale: f16::ONE,
            codes: [code; GROUP],
        };
        for (dtype, bits, code) in [
            (Dtype::Q4Tiled, 0, 8),
            (Dtype::Q4Block, 0, -9),
            (Dtype::Vbit, 8, -128),
            (Dtype::VbitRo, 6, 33),
            (Dtype::Q8Row, 0, 0),
        ] {
            let err = dtype.encode_codes(bits, 1, &|_| Ok(vec![group(code)])).unwrap_err();
            assert_eq!(err.kind, Kind::UnsupportedTensorType, "{}", dtype.name());
        }
    }
}

//! How a weight lies on the device: planes that a kernel loads as whole vectors, repacked from the file row by row.
//!
//! A row is `units` of 32 columns, padded with zeros. The code plane holds the codes unchanged, the scale plane the scales'
//! own bits: per row first, then per column for each stacked tensor. Only a ladder's two parameters are computed here (as
//! f32 powers of two), once a row. The repack reads each byte of the file once and loses nothing.

use super::Dtype;
use crate::error::{Result, bail};
use half::f16;
use std::ops::Range;

/// A family of device layouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Planes {
    /// f32, 128 bytes a unit.
    F32,
    /// f16, 64 bytes a unit.
    F16,
    /// bf16, 64 bytes a unit.
    Bf16,
    /// Signed bytes, an f16 scale a row.
    I8,
    /// Signed bytes, an f16 scale a row and one a column.
    I8Col,
    /// Nibbles, an f16 scale a unit.
    Nib4,
    /// Nibbles, a 5-bit rung a unit on the row's ladder.
    Nib4Ladder,
}

impl Planes {
    /// Every family.
    pub const ALL: [Planes; 7] = [
        Planes::F32,
        Planes::F16,
        Planes::Bf16,
        Planes::I8,
        Planes::I8Col,
        Planes::Nib4,
        Planes::Nib4Ladder,
    ];

    /// The family's name in shader variants.
    pub fn name(self) -> &'static str {
        match self {
            Planes::F32 => "f32",
            Planes::F16 => "f16",
            Planes::Bf16 => "bf16",
            Planes::I8 => "i8",
            Planes::I8Col => "i8_col",
            Planes::Nib4 => "nib4",
            Planes::Nib4Ladder => "nib4_ladder",
        }
    }

    /// The files of `shaders/dtype` that decode it.
    pub fn shaders(self) -> &'static [&'static str] {
        match self {
            Planes::F32 => &["f32"],
            Planes::F16 => &["f16", "wide16"],
            Planes::Bf16 => &["bf16", "wide16"],
            Planes::I8 => &["i8", "i8_codes"],
            Planes::I8Col => &["i8_col", "i8_codes"],
            Planes::Nib4 => &["nib4_group", "nib4_codes"],
            Planes::Nib4Ladder => &["nib4_ladder", "nib4_codes"],
        }
    }

    /// Whether its kernels decode halves.
    pub fn has_halves(self) -> bool {
        match self {
            Planes::F16 | Planes::I8 | Planes::I8Col | Planes::Nib4 => true,
            Planes::F32 | Planes::Bf16 | Planes::Nib4Ladder => false,
        }
    }

    /// Whether it has scales by column, for each of at most three stacked tensors.
    pub fn has_column_scales(self) -> bool {
        self == Planes::I8Col
    }

    /// The family that serves `dtype` with rows of `cols`. Errors: `UnsupportedTensorType` where there is no kernel yet.
    pub fn of(dtype: Dtype, cols: usize) -> Result<Planes> {
        Ok(match dtype {
            Dtype::F32 => Planes::F32,
            Dtype::F16 => Planes::F16,
            Dtype::Bf16 => Planes::Bf16,
            Dtype::Q8Row => Planes::I8,
            Dtype::Q82f => Planes::I8Col,
            Dtype::Q4Block if cols.is_multiple_of(32) => Planes::Nib4,
            // Groups that straddle rows have no plane; such matrices are rare and small, and are expanded.
            Dtype::Q4Block => Planes::F32,
            Dtype::Q4Tiled => Planes::Nib4,
            Dtype::Q4tp => Planes::Nib4Ladder,
            Dtype::Vbit | Dtype::VbitRo | Dtype::Q1 | Dtype::Q1s | Dtype::Q1t => {
                bail!(
                    UnsupportedTensorType,
                    "{} weights cannot be run yet, only read",
                    dtype.name()
                )
            }
        })
    }

    fn unit_bytes(self) -> usize {
        match self {
            Planes::F32 => 128,
            Planes::F16 | Planes::Bf16 => 64,
            Planes::I8 | Planes::I8Col => 32,
            Planes::Nib4 | Planes::Nib4Ladder => 16,
        }
    }
}

/// Sizes of the planes of one matrix, or of one segment of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// The family.
    pub planes: Planes,
    /// Rows stored, over all stacked tensors.
    pub rows: usize,
    /// Columns of every row.
    pub cols: usize,
    /// Stacked tensors.
    pub parts: usize,
}

impl Geometry {
    /// Units of 32 columns in a row.
    pub fn units(&self) -> usize {
        self.cols.div_ceil(32)
    }

    /// Bytes of one row of the code plane.
    pub fn code_row_bytes(&self) -> usize {
        self.units() * self.planes.unit_bytes()
    }

    /// Bytes of one row's scales.
    pub fn scale_row_bytes(&self) -> usize {
        match self.planes {
            Planes::F32 | Planes::F16 | Planes::Bf16 => 0,
            Planes::I8 | Planes::I8Col => 2,
            Planes::Nib4 => self.units().next_multiple_of(2) * 2,
            Planes::Nib4Ladder => 8 + (self.units() * 5).div_ceil(32) * 4,
        }
    }

    /// Where the column scales of stacked tensor `part` begin in the scale plane.
    pub fn col_scale_offset(&self, part: usize) -> usize {
        (self.rows * self.scale_row_bytes()).next_multiple_of(4) + part * self.units() * 64
    }

    /// Bytes of the code plane.
    pub fn code_bytes(&self) -> usize {
        self.rows * self.code_row_bytes()
    }

    /// Bytes of the scale plane, never 0; a ladder has a spare word, which the last row may look at.
    pub fn scale_bytes(&self) -> usize {
        match self.planes {
            Planes::I8Col => self.col_scale_offset(self.parts),
            Planes::F32 | Planes::F16 | Planes::Bf16 | Planes::I8 | Planes::Nib4 | Planes::Nib4Ladder => {
                (self.rows * self.scale_row_bytes()).next_multiple_of(4) + 4
            }
        }
    }

    /// Bytes of both planes that hold data: what the device reads for one pass over the matrix.
    pub fn data_bytes(&self) -> u64 {
        (self.code_bytes() + self.scale_bytes() - if self.planes == Planes::I8Col { 0 } else { 4 }) as u64
    }
}

/// One tensor of the file, to be repacked.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    /// Its type.
    pub dtype: Dtype,
    /// Its bytes, of the length that type and shape demand.
    pub payload: &'a [u8],
    /// All its rows.
    pub rows: usize,
    /// Its columns.
    pub cols: usize,
}

fn slice(payload: &[u8], at: usize, len: usize) -> Result<&[u8]> {
    match at.checked_add(len).and_then(|end| payload.get(at..end)) {
        Some(bytes) => Ok(bytes),
        None => bail!(Bounds, "payload of {} bytes ends before {at} + {len}", payload.len()),
    }
}

impl Source<'_> {
    /// Writes the code plane's rows for the tensor's rows `range` to `out`.
    pub fn codes(&self, planes: Planes, range: Range<usize>, out: &mut [u8]) -> Result<()> {
        let geometry = Geometry {
            planes,
            rows: range.len(),
            cols: self.cols,
            parts: 1,
        };
        let stride = geometry.code_row_bytes();
        if self.dtype == Dtype::Q4Block && planes == Planes::F32 {
            let decoder = self.dtype.decoder(self.payload, self.rows, self.cols)?;
            let mut values = vec![0f32; self.cols];
            for (row, out) in range.zip(out.chunks_exact_mut(stride)) {
                decoder.row(row, &mut values);
                let (data, padding) = out.split_at_mut(self.cols * 4);
                data.copy_from_slice(bytemuck::cast_slice(&values));
                padding.fill(0);
            }
            return Ok(());
        }
        let (first, row_bytes) = match self.dtype {
            Dtype::F32 => (0, self.cols * 4),
            Dtype::F16 | Dtype::Bf16 => (0, self.cols * 2),
            Dtype::Q8Row | Dtype::Q82f => (0, self.cols),
            Dtype::Q4Block | Dtype::Q4tp => (0, self.cols / 2),
            Dtype::Q4Tiled => {
                for (row, out) in range.zip(out.chunks_exact_mut(stride)) {
                    let tiles = slice(self.payload, row * self.cols / 32 * 18, self.cols / 32 * 18)?;
                    for (tile, out) in tiles.chunks_exact(18).zip(out.chunks_exact_mut(16)) {
                        out.copy_from_slice(&tile[2..]);
                    }
                }
                return Ok(());
            }
            Dtype::Vbit | Dtype::VbitRo | Dtype::Q1 | Dtype::Q1s | Dtype::Q1t => {
                bail!(
                    UnsupportedTensorType,
                    "{} weights cannot be run yet, only read",
                    self.dtype.name()
                )
            }
        };
        for (row, out) in range.zip(out.chunks_exact_mut(stride)) {
            let (data, padding) = out.split_at_mut(row_bytes);
            data.copy_from_slice(slice(self.payload, first + row * row_bytes, row_bytes)?);
            padding.fill(0);
        }
        Ok(())
    }

    /// Writes the row scales for the tensor's rows `range` to `out`; nothing for types without them.
    pub fn row_scales(&self, planes: Planes, range: Range<usize>, out: &mut [u8]) -> Result<()> {
        let geometry = Geometry {
            planes,
            rows: range.len(),
            cols: self.cols,
            parts: 1,
        };
        let stride = geometry.scale_row_bytes();
        let groups = self.cols / 32;
        match planes {
            Planes::F32 | Planes::F16 | Planes::Bf16 => {}
            Planes::I8 | Planes::I8Col => {
                let at = self.rows * self.cols + range.start * 2;
                out[..range.len() * 2].copy_from_slice(slice(self.payload, at, range.len() * 2)?);
            }
            Planes::Nib4 => {
                for (row, out) in range.zip(out.chunks_exact_mut(stride)) {
                    let (data, padding) = out.split_at_mut(groups * 2);
                    if self.dtype == Dtype::Q4Tiled {
                        let tiles = slice(self.payload, row * groups * 18, groups * 18)?;
                        for (tile, scale) in tiles.chunks_exact(18).zip(data.chunks_exact_mut(2)) {
                            scale.copy_from_slice(&tile[..2]);
                        }
                    } else {
                        let at = self.rows * groups * 16 + row * groups * 2;
                        data.copy_from_slice(slice(self.payload, at, groups * 2)?);
                    }
                    padding.fill(0);
                }
            }
            Planes::Nib4Ladder => {
                let ladders = self.rows * groups * 16;
                let code_bytes = (groups * 5).div_ceil(8);
                for (row, out) in range.zip(out.chunks_exact_mut(stride)) {
                    let ladder = slice(self.payload, ladders + row * 4, 4)?;
                    let lo = f16::from_le_bytes([ladder[0], ladder[1]]).to_f64();
                    let step = f16::from_le_bytes([ladder[2], ladder[3]]).to_f64();
                    out[..4].copy_from_slice(&(lo.exp2() as f32).to_le_bytes());
                    out[4..8].copy_from_slice(&(step.exp2() as f32).to_le_bytes());
                    let (data, padding) = out[8..].split_at_mut(code_bytes);
                    data.copy_from_slice(slice(
                        self.payload,
                        ladders + self.rows * 4 + row * code_bytes,
                        code_bytes,
                    )?);
                    padding.fill(0);
                }
            }
        }
        Ok(())
    }

    /// Writes the column scales to `out` (64 bytes a unit); nothing for types without them.
    pub fn col_scales(&self, planes: Planes, out: &mut [u8]) -> Result<()> {
        if planes == Planes::I8Col {
            let at = self.rows * self.cols + self.rows * 2;
            let (data, padding) = out.split_at_mut(self.cols * 2);
            data.copy_from_slice(slice(self.payload, at, self.cols * 2)?);
            padding.fill(0);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::encode::encode;

    /// The file's bytes again, from the planes; the inverse of the repack for every type that keeps its bits.
    fn unpack(dtype: Dtype, planes: Planes, rows: usize, cols: usize, codes: &[u8], scales: &[u8]) -> Vec<u8> {
        let geometry = Geometry {
            planes,
            rows,
            cols,
            parts: 1,
        };
        let (stride, scale_stride) = (geometry.code_row_bytes(), geometry.scale_row_bytes());
        let code_rows = |len: usize| codes.chunks_exact(stride).flat_map(move |row| row[..len].to_vec());
        let scale_rows = |from: usize, len: usize| {
            scales[..rows * scale_stride]
                .chunks_exact(scale_stride)
                .flat_map(move |row| row[from..from + len].to_vec())
        };
        let groups = cols / 32;
        match dtype {
            Dtype::F32 => code_rows(cols * 4).collect(),
            Dtype::F16 | Dtype::Bf16 => code_rows(cols * 2).collect(),
            Dtype::Q8Row => code_rows(cols).chain(scale_rows(0, 2)).collect(),
            Dtype::Q82f => {
                let at = geometry.col_scale_offset(0);
                code_rows(cols)
                    .chain(scale_rows(0, 2))
                    .chain(scales[at..at + cols * 2].to_vec())
                    .collect()
            }
            Dtype::Q4Block => code_rows(cols / 2).chain(scale_rows(0, groups * 2)).collect(),
            Dtype::Q4Tiled => (0..rows * groups)
                .flat_map(|i| {
                    let (row, group) = (i / groups, i % groups);
                    let scale = row * scale_stride + group * 2;
                    let code = row * stride + group * 16;
                    [&scales[scale..scale + 2], &codes[code..code + 16]].concat()
                })
                .collect(),
            Dtype::Q4tp => {
                let log = |at: usize| {
                    let bytes: [u8; 4] = scales[at..at + 4].try_into().unwrap();
                    f16::from_f64((f32::from_le_bytes(bytes) as f64).log2()).to_le_bytes()
                };
                let ladders = (0..rows).flat_map(|row| [log(row * scale_stride), log(row * scale_stride + 4)].concat());
                code_rows(cols / 2)
                    .chain(ladders)
                    .chain(scale_rows(8, (groups * 5).div_ceil(8)))
                    .collect()
            }
            Dtype::Vbit | Dtype::VbitRo | Dtype::Q1 | Dtype::Q1s | Dtype::Q1t => unreachable!(),
        }
    }

    #[test]
    fn planes_hold_every_bit_of_the_file() {
        let runnable = Dtype::all().filter(|&dtype| Planes::of(dtype, 32).is_ok());
        for dtype in runnable {
            for (rows, cols) in [(1, 32), (7, 96), (64, 160), (5, 1056)] {
                let payload = encode(dtype, rows, cols, &|first, out| {
                    for (i, v) in out.iter_mut().enumerate() {
                        *v = ((first * cols + i) as f32 * 0.7).sin() * 0.01 * (1 + i % 5) as f32;
                    }
                    Ok(())
                })
                .unwrap();
                let planes = Planes::of(dtype, cols).unwrap();
                let geometry = Geometry {
                    planes,
                    rows,
                    cols,
                    parts: 1,
                };
                let source = Source {
                    dtype,
                    payload: &payload,
                    rows,
                    cols,
                };
                // Two blocks of rows, into memory that held something else.
                let (mut codes, mut scales) = (vec![0xA5; geometry.code_bytes()], vec![0xA5; geometry.scale_bytes()]);
                for range in [0..rows / 2, rows / 2..rows] {
                    source
                        .codes(
                            planes,
                            range.clone(),
                            &mut codes[range.start * geometry.code_row_bytes()..],
                        )
                        .unwrap();
                    let at = range.start * geometry.scale_row_bytes();
                    source.row_scales(planes, range, &mut scales[at..]).unwrap();
                }
                let at = geometry.col_scale_offset(0).min(scales.len());
                source.col_scales(planes, &mut scales[at..]).unwrap();
                let again = unpack(dtype, planes, rows, cols, &codes, &scales);
                assert!(again == payload, "{} {rows}x{cols}", dtype.name());
            }
        }
    }

    #[test]
    fn a_short_payload_is_an_error() {
        let source = Source {
            dtype: Dtype::Q8Row,
            payload: &[0; 40],
            rows: 2,
            cols: 32,
        };
        let mut out = [0; 64];
        assert!(source.codes(Planes::I8, 0..2, &mut out).is_err());
        assert!(source.row_scales(Planes::I8, 0..2, &mut out).is_err());
    }
}

//! Values of tensors, in f32, row by row.

use super::directory::{Object, Tensor};
use super::format::{Coding, Format, fp8_scales_at, nvfp4_scales_at};
use super::row_split::RowSplit;
use crate::error::{Error, Kind, Result, bail};
use cmf_kernels_ref::dtype::gguf::types::{PQ2_0, PTQ1_0};
use half::{bf16, f16};

/// Decodes the rows of one tensor. A scalar or a vector is one row.
pub struct Decoder<'a> {
    format: Format,
    payload: &'a [u8],
    rows: usize,
    cols: usize,
}

impl<'a> Decoder<'a> {
    /// A decoder of `object`, a tensor in the file `bytes`. Errors: `Parse` for a resource, `Bounds`.
    pub fn new(object: &Object, bytes: &'a [u8]) -> Result<Decoder<'a>> {
        let Some(Tensor { shape, format }) = &object.tensor else {
            bail!(Parse, "object '{}' is a resource, expected a tensor", object.name);
        };
        let cols = shape.last().copied().unwrap_or(1);
        let rows = shape.iter().rev().skip(1).product::<u64>();
        let payload = bytes.get(object.range.clone());
        let payload = payload.ok_or_else(|| {
            let (name, range, len) = (&object.name, &object.range, bytes.len());
            Error::new(
                Kind::Bounds,
                format!("object '{name}' is at bytes {range:?}, the file has {len}"),
            )
        })?;
        Ok(Decoder {
            format: *format,
            payload,
            rows: rows as usize,
            cols: cols as usize,
        })
    }

    /// Rows and columns.
    pub fn shape(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    /// Writes row `row` to `out`, one value per column. Integers become floats.
    ///
    /// Errors: `Parse` for codes that the format forbids, `NonFinite` for scales that are not finite and at least 0 (more
    /// than 0 for the divisor of NVFP4), `Bounds`.
    pub fn row(&self, row: usize, out: &mut [f32]) -> Result<()> {
        match self.format.coding() {
            Coding::Words(_) => self.words(row, out),
            Coding::Groups { columns, .. } => self.groups(row, columns as usize, out),
            Coding::Nvfp4 => self.nvfp4(row, out),
            Coding::Fp8Row => self.fp8_row(row, out),
        }
    }

    fn slice(&self, at: usize, len: usize) -> Result<&'a [u8]> {
        let slice = at.checked_add(len).and_then(|end| self.payload.get(at..end));
        slice.ok_or_else(|| Error::new(Kind::Bounds, format!("{len} bytes at {at} of {}", self.payload.len())))
    }

    fn words(&self, row: usize, out: &mut [f32]) -> Result<()> {
        let size = if self.format == Format::Bf16 { 2 } else { 4 };
        let bytes = self.slice(row * self.cols * size, self.cols * size)?;
        if self.format == Format::Bf16 {
            let words = bytes.as_chunks().0.iter();
            out.iter_mut()
                .zip(words)
                .for_each(|(out, &word)| *out = bf16::from_le_bytes(word).to_f32());
        } else {
            for (out, &word) in out.iter_mut().zip(bytes.as_chunks().0) {
                *out = match self.format {
                    Format::I32 => i32::from_le_bytes(word) as f32,
                    _ => f32::from_le_bytes(word),
                };
            }
        }
        Ok(())
    }

    fn groups(&self, row: usize, columns: usize, out: &mut [f32]) -> Result<()> {
        let overflow = || Error::new(Kind::Internal, "the size of a checked matrix overflows".to_owned());
        let planes = RowSplit::new(self.format, self.rows as u64, self.cols as u64).ok_or_else(overflow)?;
        if matches!(self.format, Format::Pq2_0 | Format::Ptq1_0) {
            return self.ternary(&planes, row, out);
        }
        let [base, high, scales] = planes.row(self.payload, row)?;
        for (group, (out, scale)) in out.chunks_mut(columns).zip(scales.as_chunks().0).enumerate() {
            let scale = scale_of(f16::from_le_bytes(*scale).to_f32())?;
            for (lane, out) in out.iter_mut().enumerate() {
                let code = self.code(base, high, group * columns + lane);
                if self.format == Format::W8G32 && code == -128 {
                    bail!(Parse, "row {row}: code -128, expected -127 to 127");
                }
                *out = code as f32 * scale;
            }
        }
        Ok(())
    }

    /// The code of a column, sign-extended.
    fn code(&self, base: &[u8], high: &[u8], col: usize) -> i32 {
        let low = i32::from(base[col / 2] >> (4 * (col % 2)) & 15);
        match self.format {
            Format::Q4G64 => (low << 28) >> 28,
            Format::Q5G64 => (low | i32::from(high[col / 8] >> (col % 8) & 1) << 4) << 27 >> 27,
            Format::Q6G64 => (low | i32::from(high[col / 4] >> (2 * (col % 4)) & 3) << 4) << 26 >> 26,
            _ => i32::from(base[col] as i8),
        }
    }

    fn ternary(&self, planes: &RowSplit, row: usize, out: &mut [f32]) -> Result<()> {
        let [.., scales] = planes.row(self.payload, row)?;
        for scale in scales.as_chunks().0 {
            scale_of(f16::from_le_bytes(*scale).to_f32())?;
        }
        let mut blocks = vec![0; planes.block_row_bytes()];
        planes.blocks(self.payload, row, &mut blocks)?;
        let mut padded = vec![0.0; planes.groups * 128];
        let block = if self.format == Format::Pq2_0 { &PQ2_0 } else { &PTQ1_0 };
        for (bytes, out) in blocks.chunks_exact(block.bytes).zip(padded.chunks_exact_mut(128)) {
            block.decode(bytes, out);
        }
        out.copy_from_slice(&padded[..out.len()]);
        Ok(())
    }

    /// e2m1(code) · e4m3(scale) / divisor.
    fn nvfp4(&self, row: usize, out: &mut [f32]) -> Result<()> {
        let (rows, cols) = (self.rows, self.cols);
        let overflow = || Error::new(Kind::Internal, "the size of a checked matrix overflows".to_owned());
        let scales_at = nvfp4_scales_at(rows as u64, cols as u64).ok_or_else(overflow)? as usize;
        let codes = self.slice(row * cols / 2, cols / 2)?;
        let scales = self.slice(scales_at, rows * cols / 16)?;
        let divisor = self.slice(scales_at + scales.len(), 4)?;
        let divisor = f32::from_le_bytes(*divisor.first_chunk().unwrap_or(&[0; 4]));
        if !(divisor.is_finite() && divisor > 0.0) {
            bail!(NonFinite, "divisor {divisor}, expected a finite number above 0");
        }
        for (group, (out, codes)) in out.chunks_mut(16).zip(codes.chunks(8)).enumerate() {
            // Scales lie in blocks of 128 rows and 4 groups.
            let block = row / 128 * (cols / 64) + group / 4;
            let at = block * 512 + row % 32 * 16 + row % 128 / 32 * 4 + group % 4;
            let scale = scales.get(at).copied().unwrap_or(0x7F);
            let scale = scale_of(e4m3(scale))? / divisor;
            for (lane, out) in out.iter_mut().enumerate() {
                *out = e2m1(codes[lane / 2] >> (4 * (lane % 2)) & 15) * scale;
            }
        }
        Ok(())
    }

    /// e4m3(code) · scale of the row.
    fn fp8_row(&self, row: usize, out: &mut [f32]) -> Result<()> {
        let overflow = || Error::new(Kind::Internal, "the size of a checked matrix overflows".to_owned());
        let scales_at = fp8_scales_at(self.rows as u64, self.cols as u64).ok_or_else(overflow)? as usize;
        let scale = self.slice(scales_at + row * 2, 2)?;
        let scale = scale_of(bf16::from_le_bytes(*scale.first_chunk().unwrap_or(&[0; 2])).to_f32())?;
        for (out, &code) in out.iter_mut().zip(self.slice(row * self.cols, self.cols)?) {
            if code & 0x7F == 0x7F {
                bail!(Parse, "row {row}: code {code:#04x} is not a number");
            }
            *out = e4m3(code) * scale;
        }
        Ok(())
    }
}

/// Errors: `NonFinite` unless `scale` is finite and at least +0.
fn scale_of(scale: f32) -> Result<f32> {
    if scale.is_finite() && scale.is_sign_positive() {
        return Ok(scale);
    }
    bail!(NonFinite, "scale {scale}, expected a finite number of at least 0")
}

/// A float with a sign bit, two bits of exponent and one of mantissa.
fn e2m1(code: u8) -> f32 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// A float with a sign bit, four bits of exponent (bias 7) and three of mantissa. All ones are NaN; there is no infinity.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 8.0 * 2f32.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

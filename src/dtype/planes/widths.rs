//! Rows of codes with bit widths of their own.

use super::amount::{Amount, Measure};
use super::pack::{self, Width};
use crate::dtype::payload::{Payload, slice};
use crate::error::Result;
use std::ops::Range;

/// The packed rows of a tensor: width, place and codes of each.
pub struct Widths<'a> {
    bits: &'a [u8],
    packed: &'a [u8],
    /// Where each row begins in `packed`.
    starts: Vec<usize>,
    groups: usize,
}

impl<'a> Widths<'a> {
    /// Rows of `bits` bits per weight that begin at `starts` in `packed`.
    ///
    /// Errors: `Parse` for a width that the format does not have, `Bounds` for a row that reaches past the end.
    pub fn open(payload: &Payload, bits: &'a [u8], packed: &'a [u8], starts: Vec<usize>) -> Result<Widths<'a>> {
        let widths = Widths {
            bits,
            packed,
            starts,
            groups: payload.groups(),
        };
        for (row, &bits) in bits.iter().enumerate().take(payload.rows) {
            let check = || Width::of(bits).and_then(|_| widths.packed(row));
            check().map_err(|err| err.context(format!("row {row}")))?;
        }
        Ok(widths)
    }

    fn packed(&self, row: usize) -> Result<&'a [u8]> {
        slice(
            self.packed,
            self.starts[row],
            self.groups * 4 * usize::from(self.bits[row]),
        )
    }

    /// Words of a row's scales.
    fn scale_words(&self) -> usize {
        self.groups.div_ceil(2)
    }

    /// Errors: `Bounds` for more than 32 bits can count.
    pub fn measure(&self) -> Result<Measure> {
        let words = self.scale_words();
        let amount = |&bits: &u8| Ok(Width::of(bits)?.amount(self.groups) + Amount { vectors: 0, words });
        Measure::sums(self.bits.iter().map(amount))
    }

    /// Writes the vectors of these rows.
    pub fn vectors(&self, range: Range<usize>, mut out: &mut [u8]) -> Result<()> {
        let mut buffer = Buffer::default();
        for row in range {
            let Amount { vectors, .. } = Width::of(self.bits[row])?.amount(self.groups);
            let (here, rest) = out.split_at_mut(vectors * 16);
            if vectors != 0 {
                put_words(self.row(row, &mut buffer)?, here);
            }
            out = rest;
        }
        Ok(())
    }

    /// Writes the words of these rows: for each its scales, which `scales(row, out)` writes, then the parts of its codes that
    /// are not vectors.
    pub fn words(
        &self,
        range: Range<usize>,
        scales: impl Fn(usize, &mut [u8]) -> Result<()>,
        mut out: &mut [u8],
    ) -> Result<()> {
        let mut buffer = Buffer::default();
        for row in range {
            let Amount { vectors, words } = Width::of(self.bits[row])?.amount(self.groups);
            let (here, rest) = out.split_at_mut((self.scale_words() + words) * 4);
            let (scale_bytes, code_bytes) = here.split_at_mut(self.scale_words() * 4);
            scales(row, scale_bytes)?;
            if words != 0 {
                put_words(&self.row(row, &mut buffer)?[vectors * 4..], code_bytes);
            }
            out = rest;
        }
        Ok(())
    }

    /// The bit width of a row.
    pub fn bits(&self, row: usize) -> u8 {
        self.bits[row]
    }

    /// The codes of a row as the words of both parts.
    fn row<'b>(&self, row: usize, buffer: &'b mut Buffer) -> Result<&'b [u32]> {
        let width = Width::of(self.bits[row])?;
        buffer.codes.resize(self.groups * 32, 0);
        pack::read_msb_first(self.bits[row], self.packed(row)?, &mut buffer.codes);
        buffer.words.resize(width.words(self.groups), 0);
        width.write(&buffer.codes, &mut buffer.words);
        Ok(&buffer.words)
    }
}

#[derive(Default)]
struct Buffer {
    codes: Vec<u8>,
    words: Vec<u32>,
}

fn put_words(words: &[u32], out: &mut [u8]) {
    for (out, word) in out.as_chunks_mut().0.iter_mut().zip(words) {
        *out = word.to_le_bytes();
    }
}

//! The weights to encode, read in blocks of rows by several threads.

use crate::dtype::payload::GROUP;
use crate::error::{Error, Kind, Result};
use rayon::prelude::*;

/// Weights that a thread holds at a time, unless one row has more.
pub const BLOCK: usize = 1 << 18;

/// Reads rows: `read(first, out)` writes the rows from `first` on to `out`, as many as fit. It is called from several threads
/// and may be asked for a row more than once.
pub type Read<'a> = dyn Fn(usize, &mut [f32]) -> Result<()> + Sync + 'a;

/// The weights to encode.
pub struct Weights<'a> {
    pub rows: usize,
    pub cols: usize,
    pub read: &'a Read<'a>,
}

impl Weights<'_> {
    /// Rows per block. It depends on the shape alone. If rows are not whole groups, blocks are multiples of 32 rows, so that
    /// groups over the flattened matrix never cross blocks.
    fn block_rows(&self) -> usize {
        let multiple = if self.cols.is_multiple_of(GROUP) { 1 } else { GROUP };
        (BLOCK / self.cols).next_multiple_of(multiple).max(multiple)
    }

    /// The finite values of the block that starts at row `first`.
    fn block(&self, first: usize) -> Result<Vec<f32>> {
        let rows = self.block_rows().min(self.rows - first);
        let mut values = vec![0.0; rows * self.cols];
        (self.read)(first, &mut values)?;
        match values.iter().position(|value| !value.is_finite()) {
            Some(at) => Err(self.refuse(Kind::NonFinite, first, at, "expected a finite weight", values[at])),
            None => Ok(values),
        }
    }

    /// An error about the `at`-th value of the block that starts at row `first`.
    pub fn refuse(&self, kind: Kind, first: usize, at: usize, wanted: &str, found: f32) -> Error {
        let (row, col) = (first + at / self.cols, at % self.cols);
        Error::new(kind, format!("row {row}, col {col}: {wanted}, found {found:e}"))
    }

    /// `f(first row, values)` of every block, in order. Errors: that of the first block with one.
    pub fn map<T: Send>(&self, f: impl Fn(usize, &[f32]) -> Result<T> + Sync) -> Result<Vec<T>> {
        let firsts: Vec<usize> = (0..self.rows).step_by(self.block_rows()).collect();
        let results: Vec<Result<T>> = firsts
            .into_par_iter()
            .map(|first| self.block(first).and_then(|values| f(first, &values)))
            .collect();
        results.into_iter().collect()
    }

    /// Writes the payload, which consists of `SECTIONS` sections, block by block: `encode(first row, values, parts)` writes a
    /// block's part of every section. Returns the results in order. Errors: that of the first block with one.
    ///
    /// `section_bytes(rows)` is the size of each section for the first `rows` rows.
    pub fn fill<const SECTIONS: usize, T: Send>(
        &self,
        mut payload: &mut [u8],
        section_bytes: impl Fn(usize) -> [usize; SECTIONS],
        encode: impl Fn(usize, &[f32], [&mut [u8]; SECTIONS]) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let mut sections = section_bytes(self.rows).map(|bytes| {
            let (section, rest) = std::mem::take(&mut payload).split_at_mut(bytes);
            payload = rest;
            section
        });
        let mut blocks: Vec<(usize, [&mut [u8]; SECTIONS])> = Vec::new();
        for first in (0..self.rows).step_by(self.block_rows()) {
            let (start, end) = (
                section_bytes(first),
                section_bytes((first + self.block_rows()).min(self.rows)),
            );
            let mut index = 0;
            let parts = sections.each_mut().map(|section| {
                let (part, rest) = std::mem::take(section).split_at_mut(end[index] - start[index]);
                index += 1;
                *section = rest;
                part
            });
            blocks.push((first, parts));
        }
        let results: Vec<Result<T>> = blocks
            .into_par_iter()
            .map(|(first, parts)| self.block(first).and_then(|values| encode(first, &values, parts)))
            .collect();
        results.into_iter().collect()
    }
}

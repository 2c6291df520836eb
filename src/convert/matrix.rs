//! A tensor of a source, in any encoding and order, readable as rows of f32.
//!
//! Reads from a mapped file, a few rows at a time and from several threads. Knows encodings, not names.

use super::order::{StackedProjections, TiledHeads, interleaved};
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result, bail};
use crate::format::cmf::CmfContainer;
use crate::format::safetensors::Float;
use crate::format::{MappedFile, TensorId, hash64};
use std::collections::HashMap;
use std::ops::Range;

/// Values compared at a time.
const COMPARED: usize = 1 << 18;

/// Source tensors by the container's name.
pub(super) type Found<'a> = HashMap<String, Matrix<'a>>;

/// How a tensor's bytes encode its values.
#[derive(Clone, Copy, Debug)]
pub(super) enum Encoding {
    Float(Float),
    /// Rows that follow each other, in a type of which [`Dtype::row_bytes`] is known.
    Blocks(Dtype),
    Container(Dtype),
}

/// The mapping that the bytes belong to.
#[derive(Clone)]
enum Origin<'a> {
    File(&'a MappedFile, Range<usize>),
    Container(&'a CmfContainer, TensorId),
}

/// The order of rows (of a vector: elements) in the source.
enum RowOrder<'a> {
    /// That of the container.
    Same,
    /// Heads of this many rows, whose two halves are interleaved.
    Interleaved(usize),
    /// Tiled heads.
    Tiled(TiledHeads),
    /// Projections one after another; the last rows are another tensor of the source.
    Stacked(Box<Stacked<'a>>),
}

/// The second tensor of stacked projections.
struct Stacked<'a> {
    lower: Matrix<'a>,
    /// Rows of the first tensor.
    upper_rows: usize,
    projections: StackedProjections,
}

/// The function that the source has applied to every value.
#[derive(Clone, Copy)]
enum Applied {
    /// None.
    Identity,
    /// v + this.
    Plus(f32),
    /// -exp(v).
    NegativeExponential,
}

/// One tensor of a source.
pub(super) struct Matrix<'a> {
    /// Row-major shape.
    pub shape: Vec<u64>,
    bytes: &'a [u8],
    /// An error means that the type cannot be read. It is reported when the tensor is used.
    encoding: Result<Encoding>,
    /// The source's checksum of the bytes.
    hash: Option<u64>,
    rows: RowOrder<'a>,
    /// Heads in tiled order along the columns.
    tiled_cols: Option<TiledHeads>,
    applied: Applied,
    origin: Origin<'a>,
}

/// Writes the rows from the given one on to a slice, as many as fit.
pub(super) type Reader<'a> = Box<dyn Fn(usize, &mut [f32]) -> Result<()> + Sync + 'a>;

impl<'a> Matrix<'a> {
    fn new(shape: Vec<u64>, bytes: &'a [u8], encoding: Result<Encoding>, origin: Origin<'a>) -> Matrix<'a> {
        Matrix {
            shape,
            bytes,
            encoding,
            hash: None,
            rows: RowOrder::Same,
            tiled_cols: None,
            applied: Applied::Identity,
            origin,
        }
    }

    /// The tensor in `range` of a file. Errors: `Bounds` when the range reaches past the end.
    pub fn in_file(
        shape: Vec<u64>,
        file: &'a MappedFile,
        range: Range<usize>,
        encoding: Result<Encoding>,
    ) -> Result<Matrix<'a>> {
        file.check_length()?;
        match file.bytes().get(range.clone()) {
            Some(bytes) => Ok(Matrix::new(shape, bytes, encoding, Origin::File(file, range))),
            None => bail!(Bounds, "{}: bytes {range:?} lie past the end", file.path().display()),
        }
    }

    /// A tensor of a container.
    pub fn in_container(container: &'a CmfContainer, id: TensorId) -> Result<Matrix<'a>> {
        let bytes = container.bytes(id)?;
        let info = &container.infos()[id];
        let encoding = Ok(Encoding::Container(info.dtype));
        let origin = Origin::Container(container, id);
        let matrix = Matrix::new(info.shape.clone(), bytes, encoding, origin);
        Ok(Matrix {
            hash: Some(container.payloads()[id].hash),
            ..matrix
        })
    }

    /// The same tensor, whose rows (of a vector: elements) are heads of `head_dim` with interleaved halves: the source has
    /// rows j and j + head_dim/2 of a head at 2j and 2j+1.
    ///
    /// Errors: `UnsupportedModel` when the rows are not whole heads.
    pub fn interleaved(mut self, head_dim: usize) -> Result<Matrix<'a>> {
        let rotating = self.shape.first().copied().unwrap_or(0);
        if head_dim == 0 || !head_dim.is_multiple_of(2) || !rotating.is_multiple_of(head_dim as u64) {
            bail!(UnsupportedModel, "{rotating} rows are not whole heads of {head_dim}");
        }
        self.rows = RowOrder::Interleaved(head_dim);
        Ok(self)
    }

    /// The same tensor, to every value of which the source has added `excess`.
    pub fn less(mut self, excess: f32) -> Matrix<'a> {
        self.applied = Applied::Plus(excess);
        self
    }

    /// The same tensor, of whose values v the source holds -exp(v).
    pub fn negative_exponentials(mut self) -> Matrix<'a> {
        self.applied = Applied::NegativeExponential;
        self
    }

    /// The same tensor, whose rows (of a vector: elements) are tiled heads. Errors: `UnsupportedModel` when they are not.
    pub fn tiled_rows(mut self, heads: TiledHeads) -> Result<Matrix<'a>> {
        heads.check(self.shape.first().copied().unwrap_or(0))?;
        self.rows = RowOrder::Tiled(heads);
        Ok(self)
    }

    /// The same tensor, whose columns are tiled heads. Errors: `UnsupportedModel` when they are not.
    pub fn tiled_cols(mut self, heads: TiledHeads) -> Result<Matrix<'a>> {
        heads.check(self.shape.last().copied().unwrap_or(0))?;
        self.tiled_cols = Some(heads);
        Ok(self)
    }

    /// The rows of this matrix, then those of `lower`, which together are stacked projections.
    ///
    /// Errors: `UnsupportedModel` when the rows of both are not these heads, or differ in length.
    pub fn stacked(mut self, lower: Matrix<'a>, projections: StackedProjections) -> Result<Matrix<'a>> {
        let ([upper_rows, cols], [lower_rows, lower_cols]) = (&self.shape[..], &lower.shape[..]) else {
            bail!(
                UnsupportedModel,
                "expected two matrices to stack, found shapes {:?} and {:?}",
                self.shape,
                lower.shape
            );
        };
        let (upper_rows, cols) = (*upper_rows, *cols);
        let rows = upper_rows.checked_add(*lower_rows);
        if cols != *lower_cols || rows.is_none() || rows != projections.rows().map(|rows| rows as u64) {
            bail!(
                UnsupportedModel,
                "{:?} and {:?} are not {} heads of {:?} rows",
                self.shape,
                lower.shape,
                projections.heads,
                projections.widths
            );
        }
        self.shape = vec![rows.unwrap_or(0), cols];
        self.rows = RowOrder::Stacked(Box::new(Stacked {
            lower,
            upper_rows: upper_rows as usize,
            projections,
        }));
        Ok(self)
    }

    /// A vector as a matrix of one row; matrices are unchanged.
    pub fn one_row(mut self) -> Matrix<'a> {
        if self.shape.len() == 1 {
            self.shape.insert(0, 1);
        }
        self
    }

    /// `rows` rows from row `first` on, as a matrix of their own. All dimensions but the last count as rows.
    ///
    /// Errors: `Bounds` when there are not so many, `UnsupportedTensorType` for a tensor whose rows cannot be separated.
    pub fn rows(&self, first: usize, rows: usize) -> Result<Matrix<'a>> {
        let in_order = matches!(self.rows, RowOrder::Same) && self.tiled_cols.is_none();
        if !in_order || matches!(self.applied, Applied::NegativeExponential) {
            bail!(UnsupportedTensorType, "rows of a reordered tensor cannot be separated");
        }
        let (all, cols) = self.rows_cols();
        let row_bytes = match self.encoding.clone()? {
            Encoding::Float(float) => cols.checked_mul(float.bytes()),
            Encoding::Blocks(dtype) => dtype.row_bytes(cols),
            Encoding::Container(dtype) => bail!(UnsupportedTensorType, "rows of {} cannot be separated", dtype.name()),
        };
        let Origin::File(file, range) = &self.origin else {
            bail!(
                UnsupportedTensorType,
                "rows of a container's tensor cannot be separated"
            )
        };
        let end = first.checked_add(rows).filter(|&end| end <= all);
        let bytes = end.zip(row_bytes).and_then(|(end, row_bytes)| {
            let start = range.start.checked_add(first.checked_mul(row_bytes)?)?;
            Some(start..range.start.checked_add(end.checked_mul(row_bytes)?)?)
        });
        let Some(bytes) = bytes.filter(|bytes| bytes.end <= range.end) else {
            return Err(past(first));
        };
        let part = Matrix::in_file(vec![rows as u64, cols as u64], file, bytes, self.encoding.clone())?;
        Ok(Matrix {
            applied: self.applied,
            ..part
        })
    }

    /// Errors: `HashMismatch` when the bytes do not have the source's checksum, if it has one.
    pub fn intact(&self) -> Result<()> {
        let Some(stored) = self.hash else { return Ok(()) };
        let found = hash64(self.bytes);
        if found != stored {
            bail!(HashMismatch, "payload: stored {stored:016x}, found {found:016x}");
        }
        Ok(())
    }

    /// Errors: that of a type which cannot be read.
    pub fn readable(&self) -> Result<()> {
        if let RowOrder::Stacked(stacked) = &self.rows {
            stacked.lower.readable()?;
        }
        self.encoding.clone().map(|_| ())
    }

    /// Rows and columns: a vector is one row, of more dimensions all but the last count as rows.
    pub fn rows_cols(&self) -> (usize, usize) {
        let cols = self.shape.last().copied().unwrap_or(0) as usize;
        let rows = self.shape.iter().rev().skip(1).product::<u64>() as usize;
        (rows, cols)
    }

    /// The bytes, if they are a payload of `dtype` already.
    pub fn stored_as(&self, dtype: Dtype) -> Option<&'a [u8]> {
        matches!(self.encoding, Ok(Encoding::Container(stored)) if stored == dtype).then_some(self.bytes)
    }

    /// Gives the mapped pages back: the bytes are not needed any more.
    pub fn release(&self) {
        if let RowOrder::Stacked(stacked) = &self.rows {
            stacked.lower.release();
        }
        match &self.origin {
            Origin::File(file, range) => file.release(range.start, range.len()),
            Origin::Container(container, id) => container.release(*id),
        }
    }

    /// A reader of rows in the container's order. Errors, also those of the reader: `Bounds` when bytes and shape do not fit,
    /// `Parse` for a malformed payload.
    pub fn reader(&self) -> Result<Reader<'a>> {
        let (rows, cols) = self.rows_cols();
        let stored = undo(self.stored_reader(rows, cols)?, self.applied);
        let stored = match self.tiled_cols {
            Some(heads) => in_col_order(stored, cols, heads),
            None => stored,
        };
        match &self.rows {
            RowOrder::Same => Ok(stored),
            RowOrder::Interleaved(head_dim) => {
                let head_dim = *head_dim;
                Ok(self.in_row_order(stored, move |index| interleaved(index, head_dim)))
            }
            RowOrder::Tiled(heads) => {
                let heads = *heads;
                Ok(self.in_row_order(stored, move |index| heads.source(index)))
            }
            RowOrder::Stacked(stacked) => {
                let (lower, upper_rows, projections) =
                    (stacked.lower.reader()?, stacked.upper_rows, stacked.projections);
                Ok(Box::new(move |first, out| {
                    let mut rows = out.chunks_exact_mut(cols.max(1)).enumerate();
                    rows.try_for_each(|(row, out)| {
                        let source = projections.source(first + row);
                        match source.checked_sub(upper_rows) {
                            None => stored(source, out),
                            Some(source) => lower(source, out),
                        }
                    })
                }))
            }
        }
    }

    /// `stored` with row `source(index)` at each index; of a vector, whose row is read as a whole, with that element.
    fn in_row_order(&self, stored: Reader<'a>, source: impl Fn(usize) -> usize + Sync + 'a) -> Reader<'a> {
        let (_, cols) = self.rows_cols();
        if self.shape.len() == 1 {
            return Box::new(move |first, out| {
                let mut values = vec![0.0; out.len()];
                stored(first, &mut values)?;
                permute(&values, out, &source)
            });
        }
        Box::new(move |first, out| {
            let mut rows = out.chunks_exact_mut(cols.max(1)).enumerate();
            rows.try_for_each(|(row, out)| stored(source(first + row), out))
        })
    }

    /// A reader of the values and the order that the source holds.
    fn stored_reader(&self, rows: usize, cols: usize) -> Result<Reader<'a>> {
        let bytes = self.bytes;
        match self.encoding.clone()? {
            Encoding::Float(float) => Ok(Box::new(move |first, out| {
                let values = slice(bytes, first * cols, out.len(), float.bytes())?;
                float.decode(values, out)
            })),
            Encoding::Blocks(dtype) | Encoding::Container(dtype) => {
                let decoder = dtype.decoder(bytes, rows, cols)?;
                Ok(Box::new(move |first, out| {
                    let wanted = out.len() / cols.max(1);
                    if first.checked_add(wanted).is_none_or(|last| last > rows) {
                        return Err(past(first));
                    }
                    out.chunks_exact_mut(cols.max(1))
                        .enumerate()
                        .for_each(|(row, out)| decoder.row(first + row, out));
                    Ok(())
                }))
            }
        }
    }

    /// Whether both hold the same values in the same shape, bit for bit.
    pub fn same(&self, other: &Matrix) -> Result<bool> {
        if self.shape != other.shape {
            return Ok(false);
        }
        let (rows, cols) = self.rows_cols();
        let (this, that) = (self.reader()?, other.reader()?);
        let step = (COMPARED / cols.max(1)).max(1);
        for first in (0..rows).step_by(step) {
            let count = step.min(rows - first) * cols;
            let (mut a, mut b) = (vec![0.0f32; count], vec![0.0f32; count]);
            this(first, &mut a)?;
            that(first, &mut b)?;
            if a.iter().zip(&b).any(|(a, b)| a.to_bits() != b.to_bits()) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Reads the values before the source applied its function.
fn undo(stored: Reader, applied: Applied) -> Reader {
    match applied {
        Applied::Identity => stored,
        Applied::Plus(excess) => Box::new(move |first, out| {
            stored(first, out)?;
            out.iter_mut().for_each(|value| *value -= excess);
            Ok(())
        }),
        Applied::NegativeExponential => Box::new(move |first, out| {
            stored(first, out)?;
            out.iter_mut().for_each(|value| *value = (-*value).ln());
            Ok(())
        }),
    }
}

fn in_col_order(stored: Reader, cols: usize, heads: TiledHeads) -> Reader {
    Box::new(move |first, out| {
        stored(first, out)?;
        let mut row = vec![0.0; cols];
        let mut rows = out.chunks_exact_mut(cols.max(1));
        rows.try_for_each(|out| {
            row.copy_from_slice(out);
            permute(&row, out, |index| heads.source(index))
        })
    })
}

fn permute(values: &[f32], out: &mut [f32], source: impl Fn(usize) -> usize) -> Result<()> {
    for (index, value) in out.iter_mut().enumerate() {
        *value = *values.get(source(index)).ok_or_else(|| past(source(index)))?;
    }
    Ok(())
}

fn past(row: usize) -> Error {
    Error::new(Kind::Bounds, format!("row {row} lies past the end of the tensor"))
}

/// `count` items of `size` bytes from item `first` on.
fn slice(bytes: &[u8], first: usize, count: usize, size: usize) -> Result<&[u8]> {
    let start = first.checked_mul(size);
    let end = start
        .zip(count.checked_mul(size))
        .and_then(|(start, length)| start.checked_add(length));
    let found = start.zip(end).and_then(|(start, end)| bytes.get(start..end));
    found.ok_or_else(|| {
        Error::new(
            Kind::Bounds,
            format!(
                "{count} × {size} bytes from item {first} on lie past {} bytes",
                bytes.len()
            ),
        )
    })
}

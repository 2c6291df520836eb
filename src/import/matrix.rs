//! A tensor of a source, in any encoding and order: rows of f32, or the payload as the file has it.
//!
//! Reads from a mapped file, a few rows at a time and from several threads. Knows encodings, not names.

use super::form::{Applied, Form};
use super::gathered::Gathered;
use super::stacked::StackedProjections;
use crate::dtype::{Dtype, Order, RowDecoder, RowOrder, TiledHeads};
use crate::error::{Error, Result, bail, error};
use crate::format::cmf::CmfContainer;
use crate::format::{MappedFile, TensorId, check_hash};
use cmf_kernels_ref::op::hadamard::rotate_back;
use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// Values compared at a time.
const COMPARED: usize = 1 << 18;

/// Source tensors by the container's name.
pub type Found = HashMap<String, Matrix>;

/// The mapping that the bytes belong to.
#[derive(Clone)]
enum Origin {
    File(Arc<MappedFile>, Range<usize>),
    Container(Arc<CmfContainer>, TensorId),
    /// A file that has the bytes in pieces.
    Gathered(Arc<Gathered>),
}

/// The second tensor of stacked projections, whose last rows it holds.
struct Stacked {
    lower: Matrix,
    /// Rows of the first tensor.
    upper_rows: usize,
    projections: StackedProjections,
}

/// The rotation of the rows that a source holds.
#[derive(Clone)]
struct Rotated {
    signs: Arc<[f32]>,
    block: usize,
}

/// What a reader reads of the payload.
#[derive(Clone, Copy, PartialEq)]
enum Content {
    Values,
    /// The scale of each value.
    Scales,
}

impl Content {
    fn decoder(self, dtype: Dtype, bytes: &[u8], rows: usize, cols: usize) -> Result<Box<dyn RowDecoder + '_>> {
        match self {
            Content::Values => dtype.decoder(bytes, rows, cols),
            Content::Scales => dtype.scale_decoder(bytes, rows, cols),
        }
    }
}

/// One tensor of a source.
pub struct Matrix {
    /// Row-major shape.
    pub shape: Vec<u64>,
    origin: Origin,
    /// An error means that the type cannot be read. It is reported when the tensor is used.
    dtype: Result<Dtype>,
    /// The source's checksum of the bytes.
    hash: Option<u64>,
    form: Form,
    stacked: Option<Box<Stacked>>,
    /// The rotation that is undone when values are read.
    rotated: Option<Rotated>,
}

/// Writes the rows from the given one on to a slice, as many as fit.
pub type Reader<'a> = Box<dyn Fn(usize, &mut [f32]) -> Result<()> + Sync + 'a>;

impl Matrix {
    fn new(shape: Vec<u64>, dtype: Result<Dtype>, origin: Origin) -> Matrix {
        Matrix {
            shape,
            origin,
            dtype,
            hash: None,
            form: Form::default(),
            stacked: None,
            rotated: None,
        }
    }

    /// The tensor in `range` of a file. Errors: `Bounds` when the range reaches past the end, and for a shape with more elements
    /// than can be counted.
    pub(super) fn in_file(
        shape: Vec<u64>,
        file: &Arc<MappedFile>,
        range: Range<usize>,
        dtype: Result<Dtype>,
    ) -> Result<Matrix> {
        if file.bytes().get(range.clone()).is_none() {
            bail!(
                Bounds,
                "{}: bytes {range:?}, the file has {}",
                file.path().display(),
                file.len()
            );
        }
        let elements = shape.iter().try_fold(1u64, |count, &dim| count.checked_mul(dim));
        if elements.is_none_or(|count| usize::try_from(count).is_err()) {
            bail!(
                Bounds,
                "{}: the elements of shape {shape:?} overflow",
                file.path().display()
            );
        }
        Ok(Matrix::new(shape, dtype, Origin::File(file.clone(), range)))
    }

    /// The tensor whose rows are those of `gathered`.
    pub(super) fn gathered(shape: Vec<u64>, gathered: Gathered, dtype: Dtype) -> Matrix {
        Matrix::new(shape, Ok(dtype), Origin::Gathered(Arc::new(gathered)))
    }

    /// A tensor that cannot be read, for the reason `why`, which is reported when the tensor is used.
    pub(super) fn unreadable(shape: Vec<u64>, file: &Arc<MappedFile>, why: Error) -> Matrix {
        Matrix::new(shape, Err(why), Origin::File(file.clone(), 0..0))
    }

    /// A tensor of a container.
    pub fn in_container(container: &Arc<CmfContainer>, id: TensorId) -> Matrix {
        let info = &container.infos()[id];
        let origin = Origin::Container(container.clone(), id);
        Matrix {
            hash: Some(container.payloads()[id].hash),
            ..Matrix::new(info.shape.clone(), Ok(info.dtype), origin)
        }
    }

    /// The payload's type. Errors: that of a type which cannot be read.
    pub fn dtype(&self) -> Result<Dtype> {
        self.dtype.clone()
    }

    /// The payload as the file has it, put together if the file has it in pieces. Errors: `Io` if the file was truncated.
    pub fn bytes(&self) -> Result<Cow<'_, [u8]>> {
        match &self.origin {
            Origin::Gathered(gathered) => gathered.bytes().map(Cow::Owned),
            _ => self.mapped().map(Cow::Borrowed),
        }
    }

    /// The payload in the mapped file; nothing if the file has it in pieces. Errors: as [`Matrix::bytes`].
    fn mapped(&self) -> Result<&[u8]> {
        match &self.origin {
            Origin::File(file, range) => {
                file.check_length()?;
                // The range was checked when the tensor was found.
                Ok(file.bytes().get(range.clone()).unwrap_or_default())
            }
            Origin::Container(container, id) => container.bytes(*id),
            Origin::Gathered(_) => Ok(&[]),
        }
    }

    /// Bytes of the payload. Errors: as [`Matrix::bytes`].
    pub fn nbytes(&self) -> Result<usize> {
        match &self.origin {
            Origin::Gathered(gathered) => Ok(gathered.len()),
            _ => Ok(self.mapped()?.len()),
        }
    }

    /// Where the payload begins in its file, and which file that is.
    pub fn place(&self) -> Option<(&std::path::Path, u64)> {
        match &self.origin {
            Origin::File(file, range) => Some((file.path(), range.start as u64)),
            Origin::Container(..) | Origin::Gathered(_) => None,
        }
    }

    /// The type of the payload and the order of its rows and columns, if the values of the tensor are those of the payload.
    pub fn stored(&self) -> Option<(Dtype, Order)> {
        let as_it_is = self.stacked.is_none() && self.form.applied == Applied::Identity && self.rotated.is_none();
        self.dtype
            .as_ref()
            .ok()
            .filter(|_| as_it_is)
            .map(|&dtype| (dtype, self.form.order))
    }

    /// The same tensor, which the source holds in this form. Errors: as [`Form::check`].
    pub(super) fn in_form(mut self, form: Form) -> Result<Matrix> {
        form.check(&self.shape)?;
        self.form = form;
        Ok(self)
    }

    /// The rows of this matrix, then those of `lower`, which together are stacked projections.
    ///
    /// Errors: `UnsupportedModel` when the rows of both are not these heads, or differ in length.
    pub fn stacked(mut self, lower: Matrix, projections: StackedProjections) -> Result<Matrix> {
        let ([upper_rows, cols], [lower_rows, lower_cols]) = (&self.shape[..], &lower.shape[..]) else {
            bail!(
                UnsupportedModel,
                "expected two matrices to stack, found shapes {:?} and {:?}",
                self.shape,
                lower.shape
            );
        };
        if [&self, &lower].iter().any(|part| !part.form.order.is_same()) {
            bail!(
                UnsupportedModel,
                "expected two matrices in order to stack, found the orders {:?} and {:?}",
                self.form.order,
                lower.form.order
            );
        }
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
        self.stacked = Some(Box::new(Stacked {
            lower,
            upper_rows: upper_rows as usize,
            projections,
        }));
        Ok(self)
    }

    /// The same tensor without its rotation: the source holds rows W' that mean (W'·H) ⊙ s, in blocks of `block` elements of
    /// its own order. Errors: `UnsupportedFeature` for rows that are no whole blocks, and for a tensor of two in the source.
    pub fn unrotated(mut self, signs: Vec<f32>, block: usize) -> Result<Matrix> {
        let (_, cols) = self.rows_cols();
        if self.stacked.is_some() || signs.len() != cols || !block.is_power_of_two() || !cols.is_multiple_of(block) {
            bail!(UnsupportedFeature, "rotation of {cols} columns in blocks of {block}");
        }
        let signs = signs.into();
        self.rotated = Some(Rotated { signs, block });
        Ok(self)
    }

    /// Whether the columns are heads in another order than that of the container.
    pub fn has_tiled_columns(&self) -> bool {
        self.form.order.cols.is_some()
    }

    /// A vector as a matrix of one row; matrices are unchanged.
    pub fn one_row(mut self) -> Matrix {
        if self.shape.len() == 1 {
            self.shape.insert(0, 1);
        }
        self
    }

    /// The payload with its rows in the container's order.
    ///
    /// Errors: `UnsupportedTensorType` for a tensor whose values or columns the source holds in another form; as
    /// [`Matrix::bytes`].
    #[cfg(feature = "tools")]
    pub fn ordered_bytes(&self) -> Result<Cow<'_, [u8]>> {
        let (_, cols) = self.rows_cols();
        let stored = self.stored().filter(|(_, order)| order.cols.is_none());
        let Some((row_bytes, rows)) = stored.and_then(|(dtype, order)| Some((dtype.row_bytes(cols)?, order.rows)))
        else {
            bail!(UnsupportedTensorType, "the source holds its rows in another form");
        };
        let bytes = self.bytes()?;
        if rows == RowOrder::Same {
            return Ok(bytes);
        }
        let row = |row: usize| {
            let first = rows.source(row).checked_mul(row_bytes)?;
            bytes.get(first..first.checked_add(row_bytes)?)
        };
        let mut ordered = Vec::with_capacity(bytes.len());
        for index in 0..bytes.len() / row_bytes.max(1) {
            ordered.extend(row(index).ok_or_else(|| past(index))?);
        }
        Ok(Cow::Owned(ordered))
    }

    /// `rows` rows from row `first` on, as a matrix of their own. All dimensions but the last count as rows.
    ///
    /// Errors: `Bounds` when there are not so many, `UnsupportedTensorType` for a tensor whose rows cannot be separated.
    pub fn rows(&self, first: usize, rows: usize) -> Result<Matrix> {
        let in_order = self.form.order.is_same() && self.stacked.is_none() && self.rotated.is_none();
        if !in_order || self.form.applied == Applied::NegativeExponential {
            bail!(UnsupportedTensorType, "rows of a reordered tensor cannot be separated");
        }
        let (all, cols) = self.rows_cols();
        let row_bytes = self.dtype()?.row_bytes(cols);
        let Origin::File(file, range) = &self.origin else {
            bail!(
                UnsupportedTensorType,
                "rows of a tensor that is no range of a file cannot be separated"
            )
        };
        let bytes = || {
            let end = first.checked_add(rows).filter(|&end| end <= all)?;
            let at = |row: usize| range.start.checked_add(row.checked_mul(row_bytes?)?);
            Some(at(first)?..at(end).filter(|&end| end <= range.end)?)
        };
        let bytes = bytes().ok_or_else(|| past(first))?;
        let part = Matrix::in_file(vec![rows as u64, cols as u64], file, bytes, self.dtype())?;
        Ok(Matrix {
            form: self.form,
            ..part
        })
    }

    /// Errors: `HashMismatch` when the bytes do not have the source's checksum, if it has one.
    pub fn intact(&self) -> Result<()> {
        match self.hash {
            Some(stored) => check_hash("payload", &self.bytes()?, Some(stored)).map(drop),
            None => Ok(()),
        }
    }

    /// Errors: that of a type which cannot be read.
    pub fn readable(&self) -> Result<()> {
        if let Some(stacked) = &self.stacked {
            stacked.lower.readable()?;
        }
        self.dtype().map(drop)
    }

    /// Rows and columns: a vector is one row, of more dimensions all but the last count as rows.
    pub fn rows_cols(&self) -> (usize, usize) {
        let cols = self.shape.last().copied().unwrap_or(0) as usize;
        let rows = self.shape.iter().rev().skip(1).product::<u64>() as usize;
        (rows, cols)
    }

    /// The payload in the container, if it is one of `dtype` already; also the bytes of a text. Errors: as [`Matrix::bytes`].
    pub fn copied(&self, dtype: Dtype) -> Result<Option<&[u8]>> {
        match (&self.origin, &self.dtype) {
            (Origin::File(..), Ok(Dtype::U8)) if dtype == Dtype::U8 => self.mapped().map(Some),
            (Origin::Container(container, id), Ok(stored)) if *stored == dtype && self.rotated.is_none() => {
                container.bytes(*id).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// The type, if it has fewer than 16 bits: then the source's weights are quantised. Of stacked tensors, that of the first.
    pub fn quantised(&self) -> Option<Dtype> {
        self.dtype.as_ref().ok().copied().filter(|dtype| dtype.code_bits() < 16)
    }

    /// Whether the tensor is one of a container.
    pub fn is_contained(&self) -> bool {
        matches!(self.origin, Origin::Container(..))
    }

    /// Bytes in the source. Errors: as [`Matrix::bytes`].
    pub fn source_bytes(&self) -> Result<usize> {
        let lower = self
            .stacked
            .as_ref()
            .map_or(Ok(0), |stacked| stacked.lower.source_bytes())?;
        Ok(self.bytes()?.len().saturating_add(lower))
    }

    /// Gives the mapped pages back: the bytes are not needed any more.
    pub fn release(&self) {
        if let Some(stacked) = &self.stacked {
            stacked.lower.release();
        }
        match &self.origin {
            Origin::File(file, range) => file.release(range.start, range.len()),
            Origin::Container(container, id) => container.release(*id),
            Origin::Gathered(gathered) => gathered.release(),
        }
    }

    /// A reader of rows in the container's order. Errors, also those of the reader: `Bounds` when bytes and shape do not fit,
    /// `Parse` for a malformed payload.
    pub fn reader(&self) -> Result<Reader<'_>> {
        self.ordered_reader(Content::Values)
    }

    /// A reader of the scale of each weight, in the same order; `None` unless every weight is an integer times the f16 scale of
    /// its block. Errors: as [`Matrix::reader`].
    pub fn scales(&self) -> Result<Option<Reader<'_>>> {
        match self.has_scales() {
            true => self.ordered_reader(Content::Scales).map(Some),
            false => Ok(None),
        }
    }

    fn has_scales(&self) -> bool {
        let own = self.stored_dtype().is_some_and(Dtype::has_block_scales);
        let same =
            |stacked: &Stacked| stacked.lower.has_scales() && stacked.lower.stored_dtype() == self.stored_dtype();
        own && self.stacked.as_deref().is_none_or(same)
    }

    /// The type of the payload, if its values are those of the rows.
    fn stored_dtype(&self) -> Option<Dtype> {
        let plain = self.form.applied == Applied::Identity && self.rotated.is_none();
        self.dtype.as_ref().ok().copied().filter(|_| plain)
    }

    fn ordered_reader(&self, content: Content) -> Result<Reader<'_>> {
        let (rows, cols) = self.rows_cols();
        let mut stored = self.stored_reader(content, rows, cols)?;
        if content == Content::Values {
            stored = undo(stored, self.form.applied);
            if let Some(rotated) = &self.rotated {
                stored = rotated_back(stored, cols, rotated);
            }
        }
        let stored = match self.form.order.cols {
            Some(heads) => in_col_order(stored, cols, heads),
            None => stored,
        };
        if let Some(stacked) = &self.stacked {
            let (lower, upper_rows, projections) = (
                stacked.lower.ordered_reader(content)?,
                stacked.upper_rows,
                stacked.projections,
            );
            return Ok(Box::new(move |first, out| {
                let mut rows = out.chunks_exact_mut(cols.max(1)).enumerate();
                rows.try_for_each(|(row, out)| {
                    let source = projections.source(first + row);
                    match source.checked_sub(upper_rows) {
                        None => stored(source, out),
                        Some(source) => lower(source, out),
                    }
                })
            }));
        }
        Ok(match self.form.order.rows {
            RowOrder::Same => stored,
            rows => self.in_row_order(stored, rows),
        })
    }

    /// `stored` with each row where the tensor has it; of a vector, whose row is read as a whole, with each element.
    fn in_row_order<'a>(&self, stored: Reader<'a>, rows: RowOrder) -> Reader<'a> {
        let (_, cols) = self.rows_cols();
        if self.shape.len() == 1 {
            return Box::new(move |first, out| {
                let mut values = vec![0.0; out.len()];
                stored(first, &mut values)?;
                permute(&values, out, |index| rows.source(index))
            });
        }
        // The first dimension is reordered; a row of it may be several rows of the matrix.
        let each = self.shape.iter().skip(1).rev().skip(1).product::<u64>().max(1) as usize;
        Box::new(move |first, out| {
            let mut all = out.chunks_exact_mut(cols.max(1)).enumerate();
            all.try_for_each(|(row, out)| {
                let index = first + row;
                stored(rows.source(index / each) * each + index % each, out)
            })
        })
    }

    /// A reader of the values and the order that the source holds.
    fn stored_reader(&self, content: Content, rows: usize, cols: usize) -> Result<Reader<'_>> {
        // Of stacked projections, these are the rows of the first tensor.
        let rows = self.stacked.as_ref().map_or(rows, |stacked| stacked.upper_rows);
        let dtype = self.dtype()?;
        if let Origin::Gathered(gathered) = &self.origin {
            return Ok(Box::new(move |first, out| {
                let count = out.len() / cols.max(1);
                let bytes = gathered.rows(first, count)?;
                let decoder = content.decoder(dtype, &bytes, count, cols)?;
                let rows = out.chunks_exact_mut(cols.max(1)).enumerate();
                rows.for_each(|(row, out)| decoder.row(row, out));
                Ok(())
            }));
        }
        let decoder = content.decoder(dtype, self.mapped()?, rows, cols)?;
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
    Box::new(move |first, out| {
        stored(first, out)?;
        if applied != Applied::Identity {
            for value in out {
                *value = applied.undo(*value)?;
            }
        }
        Ok(())
    })
}

/// Reads rows in f64 before they were rotated.
fn rotated_back<'a>(stored: Reader<'a>, cols: usize, rotated: &'a Rotated) -> Reader<'a> {
    Box::new(move |first, out| {
        stored(first, out)?;
        for row in out.chunks_exact_mut(cols.max(1)) {
            let wide: Vec<f64> = row.iter().map(|&value| value.into()).collect();
            let plain = rotate_back(&wide, &rotated.signs, rotated.block);
            row.iter_mut()
                .zip(plain)
                .for_each(|(value, plain)| *value = plain as f32);
        }
        Ok(())
    })
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
    error!(Bounds, "row {row} lies past the end of the tensor")
}

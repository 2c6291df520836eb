//! A source tensor as rows of f32, whatever it is stored as.
//!
//! Reads from a map, a few rows at a time and from several threads. Knows encodings, not names.

use crate::container::gguf::BlockType;
use crate::container::safetensors::Float;
use crate::container::{Container, MappedFile, TensorId, TensorInfo, Tensors, hash64};
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result, bail};
use std::ops::Range;

/// Values compared at a time.
const COMPARED: usize = 1 << 18;

/// How a tensor's bytes encode its values.
#[derive(Clone, Copy, Debug)]
pub(super) enum Encoding {
    Float(Float),
    Blocks(BlockType),
    Container(Dtype),
}

/// Whose pages the bytes are.
#[derive(Clone)]
enum Origin<'a> {
    File(&'a MappedFile, Range<usize>),
    Container(&'a Container, TensorId),
}

/// Heads that share a key head lie apart in the source: first the first of every key head, then the second of each, and so
/// on, where they belong side by side.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiles {
    /// What lies before the heads and stays.
    pub first: usize,
    pub key_heads: usize,
    pub heads: usize,
    /// Rows or columns of a head.
    pub width: usize,
}

impl Tiles {
    /// Errors: `UnsupportedModel` when `length` rows or columns are not these heads.
    fn check(&self, length: u64) -> Result<()> {
        let Tiles {
            first,
            key_heads,
            heads,
            width,
        } = *self;
        let all = heads.checked_mul(width).and_then(|all| all.checked_add(first));
        let fits = all.is_some_and(|all| all as u64 == length);
        if !fits || key_heads == 0 || width == 0 || !heads.is_multiple_of(key_heads) {
            bail!(
                UnsupportedModel,
                "{length} rows or columns are not {first} and {heads} heads of {width} that share {key_heads} key heads"
            );
        }
        Ok(())
    }

    /// Where the source has what belongs at `index`.
    fn source(&self, index: usize) -> usize {
        let Some(from_first) = index.checked_sub(self.first) else {
            return index;
        };
        let (head, within) = (from_first / self.width, from_first % self.width);
        let sharing = self.heads / self.key_heads;
        let tiled = head % sharing * self.key_heads + head / sharing;
        self.first + tiled * self.width + within
    }
}

/// Parts that lie one after another in the source, each of all heads, where the parts of a head belong together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deal {
    pub heads: usize,
    /// Rows of a head in each part, in the order in which the parts lie and the head has them.
    pub widths: [usize; 4],
}

impl Deal {
    /// Rows of one head, `None` for more than there can be.
    fn head(&self) -> Option<usize> {
        self.widths
            .iter()
            .try_fold(0usize, |sum, &width| sum.checked_add(width))
    }

    /// Where the source has what belongs at `index`. The caller has checked that the heads are as many rows as there are.
    fn source(&self, index: usize) -> usize {
        let head_rows = self.head().unwrap_or(0).max(1);
        let (head, mut within) = (index / head_rows, index % head_rows);
        let mut before = 0;
        for width in self.widths {
            if within < width {
                return before * self.heads + head * width + within;
            }
            within -= width;
            before += width;
        }
        index
    }
}

/// What lies below a matrix's own rows, and how both are dealt out.
struct Below<'a> {
    matrix: Matrix<'a>,
    /// Rows above it.
    above: usize,
    deal: Deal,
}

/// One tensor of a source.
pub(super) struct Matrix<'a> {
    /// Row-major shape.
    pub shape: Vec<u64>,
    bytes: &'a [u8],
    /// The error is that of a type which cannot be read; it counts once the tensor is needed.
    encoding: Result<Encoding>,
    /// The checksum that the source holds for the bytes.
    hash: Option<u64>,
    /// Rows come in heads of this many, whose two halves are interleaved in the source.
    interleaved: Option<usize>,
    /// Rows that come in another order of heads.
    tiled_rows: Option<Tiles>,
    /// Columns that do.
    tiled_cols: Option<Tiles>,
    /// What the source has added to every value.
    excess: f32,
    /// The source holds -exp(v) of every value v.
    negative_exponentials: bool,
    /// More rows, from another tensor of the source.
    below: Option<Box<Below<'a>>>,
    origin: Origin<'a>,
}

/// Writes the rows from the given one on to a slice, as many as fit.
pub(super) type Reader<'a> = Box<dyn Fn(usize, &mut [f32]) -> Result<()> + Sync + 'a>;

impl<'a> Matrix<'a> {
    /// The tensor in `range` of a file. Errors: `Bounds` when the range is not inside.
    pub fn in_file(
        shape: Vec<u64>,
        file: &'a MappedFile,
        range: Range<usize>,
        encoding: Result<Encoding>,
    ) -> Result<Matrix<'a>> {
        file.check_length()?;
        let Some(bytes) = file.bytes().get(range.clone()) else {
            bail!(Bounds, "{}: bytes {range:?} lie past the end", file.path().display());
        };
        Ok(Matrix {
            shape,
            bytes,
            encoding,
            hash: None,
            interleaved: None,
            tiled_rows: None,
            tiled_cols: None,
            excess: 0.0,
            negative_exponentials: false,
            below: None,
            origin: Origin::File(file, range),
        })
    }

    /// A tensor of a container.
    pub fn in_container(container: &'a Container, id: TensorId, info: &TensorInfo) -> Result<Matrix<'a>> {
        Ok(Matrix {
            shape: info.shape.clone(),
            bytes: container.bytes(id)?,
            encoding: Ok(Encoding::Container(info.dtype)),
            hash: Some(info.hash),
            interleaved: None,
            tiled_rows: None,
            tiled_cols: None,
            excess: 0.0,
            negative_exponentials: false,
            below: None,
            origin: Origin::Container(container, id),
        })
    }

    /// The same tensor, whose rows (of a vector: elements) come in heads of `head_dim` with interleaved halves: the source
    /// has at 2j and 2j+1 of a head what belongs at j and j + head_dim/2.
    pub fn interleaved(mut self, head_dim: usize) -> Result<Matrix<'a>> {
        let rotating = self.shape.first().copied().unwrap_or(0);
        if head_dim == 0 || !head_dim.is_multiple_of(2) || !rotating.is_multiple_of(head_dim as u64) {
            bail!(UnsupportedModel, "{rotating} rows are not whole heads of {head_dim}");
        }
        self.interleaved = Some(head_dim);
        Ok(self)
    }

    /// The same tensor, to every value of which the source has added `excess`.
    pub fn less(mut self, excess: f32) -> Matrix<'a> {
        self.excess = excess;
        self
    }

    /// The same tensor, whose rows (of a vector: elements) come in another order of heads.
    pub fn tiled_rows(mut self, tiles: Tiles) -> Result<Matrix<'a>> {
        tiles.check(self.shape.first().copied().unwrap_or(0))?;
        self.tiled_rows = Some(tiles);
        Ok(self)
    }

    /// The same tensor, whose columns come in another order of heads.
    pub fn tiled_cols(mut self, tiles: Tiles) -> Result<Matrix<'a>> {
        tiles.check(self.shape.last().copied().unwrap_or(0))?;
        self.tiled_cols = Some(tiles);
        Ok(self)
    }

    /// The same tensor, of every value v of which the source holds -exp(v).
    pub fn negative_exponentials(mut self) -> Matrix<'a> {
        self.negative_exponentials = true;
        self
    }

    /// The rows of this matrix and of `below`, which lies below it, dealt out to heads.
    ///
    /// Errors: `UnsupportedModel` when the rows of both are not these heads, or are not equally long.
    pub fn dealt(mut self, below: Matrix<'a>, deal: Deal) -> Result<Matrix<'a>> {
        let ([above, cols], [more, other]) = (&self.shape[..], &below.shape[..]) else {
            bail!(UnsupportedModel, "only matrices are put together");
        };
        let all = deal.head().and_then(|head| head.checked_mul(deal.heads));
        let sum = above.checked_add(*more);
        if cols != other || all.is_none_or(|all| sum != Some(all as u64)) {
            bail!(
                UnsupportedModel,
                "{:?} and {:?} are not {} heads of {:?} rows",
                self.shape,
                below.shape,
                deal.heads,
                deal.widths
            );
        }
        let (above, cols) = (*above as usize, *cols);
        self.shape = vec![all.unwrap_or(0) as u64, cols];
        self.below = Some(Box::new(Below {
            matrix: below,
            above,
            deal,
        }));
        Ok(self)
    }

    /// `rows` rows from row `first` on, as a matrix of their own; of more dimensions all but the last count as rows.
    ///
    /// Errors: `Bounds` when there are not so many, `UnsupportedTensorType` for an encoding whose rows are not side by side.
    pub fn rows(&self, first: usize, rows: usize) -> Result<Matrix<'a>> {
        let reordered = [
            self.tiled_rows.is_some(),
            self.tiled_cols.is_some(),
            self.interleaved.is_some(),
            self.below.is_some(),
        ];
        if reordered.contains(&true) || self.negative_exponentials {
            bail!(UnsupportedTensorType, "a tensor in another order is not taken apart");
        }
        let (all, cols) = self.rows_cols();
        let row_bytes = match self.encoding.clone()? {
            Encoding::Float(float) => cols.checked_mul(float.bytes()),
            Encoding::Blocks(kind) => {
                let (weights, size) = kind.block();
                (cols / weights).checked_mul(size)
            }
            Encoding::Container(dtype) => bail!(UnsupportedTensorType, "rows of {} are not taken apart", dtype.name()),
        };
        let Origin::File(file, range) = &self.origin else {
            bail!(UnsupportedTensorType, "a container's tensors are not taken apart")
        };
        let end = first.checked_add(rows).filter(|&end| end <= all);
        let bytes = end.zip(row_bytes).and_then(|(end, row_bytes)| {
            let start = range.start.checked_add(first.checked_mul(row_bytes)?)?;
            Some(start..range.start.checked_add(end.checked_mul(row_bytes)?)?)
        });
        let Some(bytes) = bytes.filter(|bytes| bytes.end <= range.end) else {
            return Err(past(first));
        };
        let mut part = Matrix::in_file(vec![rows as u64, cols as u64], file, bytes, self.encoding.clone())?;
        part.excess = self.excess;
        Ok(part)
    }

    /// Errors: `HashMismatch` when the source has a checksum and the bytes are not those it was made of.
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
        if let Some(below) = &self.below {
            below.matrix.readable()?;
        }
        self.encoding.clone().map(|_| ())
    }

    /// As a matrix: a vector is one row, the last of more dimensions is the row.
    pub fn rows_cols(&self) -> (usize, usize) {
        let cols = self.shape.last().copied().unwrap_or(0) as usize;
        let rows = self.shape.iter().rev().skip(1).product::<u64>() as usize;
        (rows, cols)
    }

    /// The bytes, when they are a payload of `dtype` already.
    pub fn stored_as(&self, dtype: Dtype) -> Option<&'a [u8]> {
        matches!(self.encoding, Ok(Encoding::Container(stored)) if stored == dtype).then_some(self.bytes)
    }

    /// Says that the bytes are not needed any more.
    pub fn release(&self) {
        if let Some(below) = &self.below {
            below.matrix.release();
        }
        match &self.origin {
            Origin::File(file, range) => file.release(range.start, range.len()),
            Origin::Container(container, id) => container.release(*id),
        }
    }

    /// A reader of rows. Errors, also those of the reader: `Bounds` when bytes and shape do not fit, `Parse` for a payload
    /// that is no good.
    pub fn reader(&self) -> Result<Reader<'a>> {
        let (rows, cols) = self.rows_cols();
        let plain = self.plain_reader(rows, cols)?;
        let excess = self.excess;
        let plain: Reader = match excess == 0.0 {
            true => plain,
            false => Box::new(move |first, out| {
                plain(first, out)?;
                out.iter_mut().for_each(|value| *value -= excess);
                Ok(())
            }),
        };
        let plain: Reader = match self.negative_exponentials {
            false => plain,
            true => Box::new(move |first, out| {
                plain(first, out)?;
                out.iter_mut().for_each(|value| *value = (-*value).ln());
                Ok(())
            }),
        };
        let plain: Reader = match self.tiled_cols {
            None => plain,
            Some(tiles) => Box::new(move |first, out| {
                plain(first, out)?;
                let mut row = vec![0.0; cols];
                for out in out.chunks_exact_mut(cols.max(1)) {
                    row.copy_from_slice(out);
                    for (index, value) in out.iter_mut().enumerate() {
                        let source = tiles.source(index);
                        *value = row.get(source).copied().ok_or_else(|| past(source))?;
                    }
                }
                Ok(())
            }),
        };
        if let Some(below) = &self.below {
            let (more, above, deal) = (below.matrix.reader()?, below.above, below.deal);
            return Ok(Box::new(move |first, out| {
                let mut rows = out.chunks_exact_mut(cols.max(1)).enumerate();
                rows.try_for_each(|(row, out)| {
                    let source = deal.source(first + row);
                    match source.checked_sub(above) {
                        None => plain(source, out),
                        Some(source) => more(source, out),
                    }
                })
            }));
        }
        let source: Box<dyn Fn(usize) -> usize + Sync> = match (self.interleaved, self.tiled_rows) {
            (None, None) => return Ok(plain),
            (None, Some(tiles)) => Box::new(move |index| tiles.source(index)),
            (Some(head_dim), _) => Box::new(move |index| {
                let (head, within) = (index / head_dim, index % head_dim);
                let (half, j) = (within / (head_dim / 2), within % (head_dim / 2));
                head * head_dim + 2 * j + half
            }),
        };
        if self.shape.len() == 1 {
            return Ok(Box::new(move |first, out| {
                let mut values = vec![0.0; out.len()];
                plain(first, &mut values)?;
                for (index, value) in out.iter_mut().enumerate() {
                    *value = values.get(source(index)).copied().ok_or_else(|| past(source(index)))?;
                }
                Ok(())
            }));
        }
        Ok(Box::new(move |first, out| {
            let mut rows = out.chunks_exact_mut(cols.max(1)).enumerate();
            rows.try_for_each(|(row, out)| plain(source(first + row), out))
        }))
    }

    fn plain_reader(&self, rows: usize, cols: usize) -> Result<Reader<'a>> {
        let bytes = self.bytes;
        match self.encoding.clone()? {
            Encoding::Float(float) => Ok(Box::new(move |first, out| {
                let values = slice(bytes, first * cols, out.len(), float.bytes())?;
                float.decode(values, out)
            })),
            Encoding::Blocks(kind) => {
                let (weights, size) = kind.block();
                Ok(Box::new(move |first, out| {
                    let blocks = slice(bytes, first * (cols / weights), out.len() / weights, size)?;
                    kind.decode(blocks, out)
                }))
            }
            Encoding::Container(dtype) => {
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

fn past(row: usize) -> Error {
    Error::new(Kind::Bounds, format!("row {row} lies past the end of the tensor"))
}

/// `count` units of `size` bytes from unit `first` on.
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
                "{count} × {size} bytes from unit {first} on lie past {} bytes",
                bytes.len()
            ),
        )
    })
}

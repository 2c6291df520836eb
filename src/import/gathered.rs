//! Payloads that a file has in pieces: rows of several objects, planes of codes and scales instead of blocks, columns instead of
//! rows. They are put together, row by row, whenever their bytes are needed.

use crate::error::{Result, bail, error};
use crate::format::MappedFile;
use crate::format::ninfer::RowSplit;
use std::ops::Range;
use std::sync::Arc;

/// How an object has its rows.
#[derive(Clone, Debug)]
pub(super) enum Form {
    /// One after another.
    Rows,
    /// As columns, in words of so many bytes: word r of every row of the object is row r.
    Columns(usize),
    /// In planes.
    Planes(RowSplit),
}

/// Rows of an object.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    /// The bytes of the whole object in the file.
    pub object: Range<usize>,
    pub form: Form,
    pub rows: Range<usize>,
}

/// The rows of several pieces.
pub(super) struct Gathered {
    file: Arc<MappedFile>,
    pieces: Vec<Piece>,
    row_bytes: usize,
}

impl Gathered {
    /// All rows have `row_bytes` bytes.
    pub fn new(file: &Arc<MappedFile>, pieces: Vec<Piece>, row_bytes: usize) -> Gathered {
        let file = file.clone();
        Gathered {
            file,
            pieces,
            row_bytes,
        }
    }

    fn row_count(&self) -> usize {
        self.pieces.iter().map(|piece| piece.rows.len()).sum()
    }

    /// Bytes of all rows.
    pub fn len(&self) -> usize {
        self.row_count() * self.row_bytes
    }

    /// The bytes of all rows. Errors: as [`Gathered::rows`].
    pub fn bytes(&self) -> Result<Vec<u8>> {
        self.rows(0, self.row_count())
    }

    /// The bytes of `count` rows from row `first` on. Errors: `Bounds` when there are not so many, `Io` if the file was
    /// truncated.
    pub fn rows(&self, first: usize, count: usize) -> Result<Vec<u8>> {
        let all = self.row_count();
        if first.checked_add(count).is_none_or(|end| end > all) {
            bail!(Bounds, "{count} rows from row {first} on, the tensor has {all}");
        }
        self.file.check_length()?;
        let mut bytes = vec![0; count * self.row_bytes];
        let mut out = bytes.chunks_exact_mut(self.row_bytes.max(1));
        let mut before = 0;
        for piece in &self.pieces {
            let len = piece.rows.len();
            // The wanted rows of this piece, counted from its first one.
            let from = first.saturating_sub(before).min(len);
            let to = (first + count).saturating_sub(before).min(len);
            before += len;
            for (row, out) in (piece.rows.start + from..piece.rows.start + to).zip(&mut out) {
                self.row(piece, row, out)?;
            }
        }
        Ok(bytes)
    }

    fn row(&self, piece: &Piece, row: usize, out: &mut [u8]) -> Result<()> {
        let short = || error!(Bounds, "row {row} lies past the end of its object");
        let object = self.file.bytes().get(piece.object.clone()).ok_or_else(short)?;
        match &piece.form {
            Form::Rows => {
                let first = row * out.len();
                out.copy_from_slice(object.get(first..first + out.len()).ok_or_else(short)?);
            }
            &Form::Columns(word) => {
                let stride = object.len() / (out.len() / word).max(1);
                for (column, out) in out.chunks_exact_mut(word).enumerate() {
                    let first = column * stride + row * word;
                    out.copy_from_slice(object.get(first..first + word).ok_or_else(short)?);
                }
            }
            Form::Planes(planes) => planes.blocks(object, row, out)?,
        }
        Ok(())
    }

    /// Gives the mapped pages back.
    pub fn release(&self) {
        let mut last = None;
        for piece in &self.pieces {
            if last != Some(&piece.object) {
                self.file.release(piece.object.start, piece.object.len());
            }
            last = Some(&piece.object);
        }
    }
}

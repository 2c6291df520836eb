//! The interface to a model's tensors.

use crate::dtype::planes::Source;
use crate::dtype::{Order, Ordered, RowDecoder};
use crate::error::Result;
use crate::format::cmf::Masks;
use crate::format::{TensorId, TensorInfo};
use std::borrow::Cow;

/// A set of named tensors: a file, or tensors made in memory.
pub trait Tensors: Send + Sync {
    /// Every tensor; a [`TensorId`] indexes this.
    fn infos(&self) -> &[TensorInfo];

    /// The tensor of this name.
    fn find(&self, name: &str) -> Option<TensorId>;

    /// The payload. Pages of a file are read when they are touched; a payload that is no part of a file is made by this call.
    ///
    /// Errors: `Internal` for an invalid id, `Io` if the file was truncated, and those of making a payload.
    fn stored(&self, id: TensorId) -> Result<Stored<'_>>;

    /// Where the payload is in the model's files; `None` for tensors in memory.
    fn place(&self, _id: TensorId) -> Option<Place> {
        None
    }

    /// Whether the columns of a matrix are value heads in tiled order: the first value head of every key head first. The network
    /// has to multiply it by activations in this order.
    fn has_tiled_columns(&self, _id: TensorId) -> bool {
        false
    }

    /// Task masks over these tensors, if there are any.
    fn masks(&self) -> Option<&Masks> {
        None
    }

    /// Declares a payload unused for now, so that its pages can be given back. Its bytes stay readable.
    fn release(&self, id: TensorId);
}

/// The place of a payload in the files of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The number of the file, from 0.
    pub file: usize,
    /// The offset in the file.
    pub offset: u64,
    /// The checksum that the file has of it.
    pub hash: Option<u64>,
}

/// A tensor with its payload.
pub struct Stored<'a> {
    /// The tensor.
    pub info: &'a TensorInfo,
    /// Its payload.
    pub bytes: Cow<'a, [u8]>,
    /// Where the payload has the rows and columns of the tensor.
    pub order: Order,
}

impl<'a> Stored<'a> {
    /// A tensor and a payload in its order.
    pub fn new(info: &'a TensorInfo, bytes: &'a [u8]) -> Stored<'a> {
        Stored {
            info,
            bytes: Cow::Borrowed(bytes),
            order: Order::default(),
        }
    }

    /// A decoder of single rows. Errors: `Parse` for a malformed payload.
    pub fn decoder(&self) -> Result<Box<dyn RowDecoder + '_>> {
        decoder(self.info, &self.bytes, self.order)
    }

    /// The tensor on its way to a device. Errors: those of [`Source::open_ordered`].
    pub fn source(&self) -> Result<Source<'_>> {
        Source::open_ordered(self.info.dtype, &self.bytes, self.info.rows_cols(), self.order)
    }
}

/// A decoder of single rows of a tensor, whose payload has them in this order. Errors: `Parse` for a malformed payload.
pub fn decoder<'a>(info: &TensorInfo, bytes: &'a [u8], order: Order) -> Result<Box<dyn RowDecoder + 'a>> {
    let (rows, cols) = info.rows_cols();
    let stored = info.dtype.decoder(bytes, rows, cols)?;
    Ok(match order.is_same() {
        true => stored,
        false => Box::new(Ordered { stored, order }),
    })
}

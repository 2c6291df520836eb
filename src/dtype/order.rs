//! Orders in which a file stores the rows or columns of a tensor: maps from an index in the tensor to one in the file.

use crate::error::{Result, bail};
use cmf_kernels_ref::dtype::RowDecoder;

/// Where a file has the rows and columns of a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Order {
    /// The order of rows.
    pub rows: RowOrder,
    /// Heads in tiled order along the columns.
    pub cols: Option<TiledHeads>,
}

/// Where a file has the rows of a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RowOrder {
    /// In the same places.
    #[default]
    Same,
    /// Heads of this many rows, whose two halves are interleaved: rows j and j + head/2 of a head are at 2j and 2j + 1.
    Interleaved(usize),
    /// Tiled heads.
    Tiled(TiledHeads),
}

/// Value heads in tiled order: first the first value head of every key head, then the second of each, and so on. In the tensor
/// the value heads of a key head are neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TiledHeads {
    /// Rows or columns before the heads, which keep their places.
    pub first: usize,
    /// Heads that share their keys among value heads.
    pub key_heads: usize,
    /// Value heads, a multiple of the key heads.
    pub heads: usize,
    /// Rows or columns of a value head.
    pub width: usize,
}

impl Order {
    /// Whether everything is in the same place.
    pub fn is_same(&self) -> bool {
        *self == Order::default()
    }
}

impl RowOrder {
    /// The index in the file.
    pub fn source(&self, index: usize) -> usize {
        match self {
            RowOrder::Same => index,
            RowOrder::Interleaved(head) => {
                let (first, within) = (index / head * head, index % head);
                let (half, j) = (within / (head / 2), within % (head / 2));
                first + 2 * j + half
            }
            RowOrder::Tiled(heads) => heads.source(index),
        }
    }
}

impl TiledHeads {
    /// Errors: `UnsupportedModel` when `length` rows or columns are not these heads.
    pub fn check(&self, length: u64) -> Result<()> {
        let TiledHeads {
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

    /// The index in the file.
    pub fn source(&self, index: usize) -> usize {
        let Some(from_first) = index.checked_sub(self.first) else {
            return index;
        };
        let (head, within) = (from_first / self.width, from_first % self.width);
        let sharing = self.heads / self.key_heads;
        let tiled = head % sharing * self.key_heads + head / sharing;
        self.first + tiled * self.width + within
    }

    /// Whether columns in blocks of `weights` stay in whole blocks.
    pub fn keeps_blocks(&self, weights: usize) -> bool {
        self.first.is_multiple_of(weights) && self.width.is_multiple_of(weights)
    }
}

/// Rows of a tensor, decoded from a payload that has them in another order.
pub struct Ordered<'a> {
    /// Decodes rows of the payload.
    pub stored: Box<dyn RowDecoder + 'a>,
    /// Where the payload has the rows and columns.
    pub order: Order,
}

impl RowDecoder for Ordered<'_> {
    fn row(&self, row: usize, out: &mut [f32]) {
        self.stored.row(self.order.rows.source(row), out);
        if let Some(heads) = self.order.cols {
            let stored = out.to_vec();
            for (col, value) in out.iter_mut().enumerate() {
                *value = stored[heads.source(col)];
            }
        }
    }
}

//! Orders of heads in which sources store rows or columns: maps from an index in the container to one in the source.

use crate::error::{Result, bail};

/// Value heads in tiled order: first the first value head of every key head, then the second of each, and so on. In the
/// container the value heads of a key head are neighbours.
#[derive(Clone, Copy, Debug)]
pub(super) struct TiledHeads {
    /// Rows or columns before the heads, which keep their places.
    pub first: usize,
    pub key_heads: usize,
    pub heads: usize,
    /// Rows or columns of a head.
    pub width: usize,
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

    /// The index in the source.
    pub fn source(&self, index: usize) -> usize {
        let Some(from_first) = index.checked_sub(self.first) else {
            return index;
        };
        let (head, within) = (from_first / self.width, from_first % self.width);
        let sharing = self.heads / self.key_heads;
        let tiled = head % sharing * self.key_heads + head / sharing;
        self.first + tiled * self.width + within
    }
}

/// The index in the source of a row in a head of `head_dim` whose two halves are interleaved there.
pub(super) fn interleaved(index: usize, head_dim: usize) -> usize {
    let (head, within) = (index / head_dim, index % head_dim);
    let (half, j) = (within / (head_dim / 2), within % (head_dim / 2));
    head * head_dim + 2 * j + half
}

/// Projections stacked one after another in the source, each with rows of all heads. In the container the rows of a head are
/// neighbours, projection by projection.
#[derive(Clone, Copy, Debug)]
pub(super) struct StackedProjections {
    pub heads: usize,
    /// Rows of a head in each projection.
    pub widths: [usize; 4],
}

impl StackedProjections {
    /// Rows of all heads, `None` on overflow.
    pub fn rows(&self) -> Option<usize> {
        let mut widths = self.widths.iter();
        let head = widths.try_fold(0usize, |sum, &width| sum.checked_add(width));
        head.and_then(|head| head.checked_mul(self.heads))
    }

    /// The index in the source of a row below [`StackedProjections::rows`].
    pub fn source(&self, index: usize) -> usize {
        let head_rows = self.widths.iter().sum::<usize>().max(1);
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

//! Projections that a source stacks one after another.

/// Projections stacked one after another in the source, each with rows of all heads. In the container the rows of a head are
/// neighbours, projection by projection.
#[derive(Clone, Copy, Debug)]
pub struct StackedProjections {
    /// Heads.
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

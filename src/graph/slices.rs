//! Matrices made of rows of many tensors, such as experts. Segments are cut at the same rows of all of them, so that
//! a sum over experts is never split.

use super::matrix::{Matrix, Measured, Run, Segment};
use crate::dtype::planes::{Amount, Measure, Planes};
use crate::error::{Result, bail};
use crate::source::{TensorId, Tensors};
use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

/// Segments are cut at multiples of this number of rows.
const GRANULE: usize = 8;

/// Consecutive rows of a tensor.
#[derive(Clone, Copy, Debug)]
pub struct Slice {
    /// The tensor.
    pub tensor: TensorId,
    /// Its first row.
    pub first: usize,
    /// The number of rows.
    pub rows: usize,
}

/// Slices that make a matrix.
#[derive(Clone, Copy)]
pub struct Stack<'a> {
    /// Slices that come first and are not cut.
    pub first: &'a [Slice],
    /// The slices that follow. All have the same number of rows, and each segment has the same rows of all of them.
    pub cut: &'a [Slice],
    /// Slices that may replace a slice of `cut` later. The capacity is large enough for them.
    pub pool: &'a [Slice],
}

impl<'a> Stack<'a> {
    /// A stack of `cut` and `pool`.
    pub fn of([cut, pool]: &'a [Vec<Slice>; 2]) -> Stack<'a> {
        Stack { first: &[], cut, pool }
    }

    /// Whether the matrix fits into one binding of `limit` bytes, with this layout and number of columns.
    ///
    /// Errors: errors in the payloads of types whose rows vary in size.
    pub fn is_one_segment(
        self,
        (planes, cols): (Planes, usize),
        (tensors, measured): (&dyn Tensors, &Measured),
        limit: u64,
    ) -> Result<bool> {
        let all = Slices::open(planes, cols, self, tensors, measured)?;
        Ok(all.segment(0..all.height()).fits(limit))
    }
}

/// The slices of a stack and their sizes.
struct Slices<'a> {
    planes: Planes,
    cols: usize,
    stack: Stack<'a>,
    /// The contents of tensors are needed only if the rows of the type vary in size.
    measures: HashMap<TensorId, Rc<Measure>>,
}

impl<'a> Slices<'a> {
    fn open(
        planes: Planes,
        cols: usize,
        stack: Stack<'a>,
        tensors: &dyn Tensors,
        measured: &Measured,
    ) -> Result<Slices<'a>> {
        let mut measures = HashMap::new();
        if planes.varies() {
            for slice in [stack.first, stack.cut, stack.pool].into_iter().flatten() {
                measures.insert(slice.tensor, measured.of(planes, slice.tensor, tensors)?);
            }
        }
        Ok(Slices {
            planes,
            cols,
            stack,
            measures,
        })
    }

    /// The number of rows of each slice of `cut`.
    fn height(&self) -> usize {
        self.stack.cut.first().map_or(0, |slice| slice.rows)
    }

    /// The size of rows of a slice; 0 if the rows of the type do not vary.
    fn amount(&self, slice: &Slice, rows: &Range<usize>) -> Amount {
        let measure = self.measures.get(&slice.tensor);
        let rows = slice.first + rows.start..slice.first + rows.end;
        measure.map_or(Amount::default(), |measure| measure.amount(rows))
    }

    /// A segment of the slices that come first and these rows of `cut`.
    fn segment(&self, here: Range<usize>) -> Segment {
        let Stack { first, cut, pool } = self.stack;
        let whole = first.iter().map(|slice| (slice, 0..slice.rows, Amount::default()));
        let pool = pool.iter().map(|slice| self.amount(slice, &here));
        let largest = pool.fold(Amount::default(), Amount::max);
        let rows = cut.iter().map(|slice| (slice, here.clone(), largest));
        let runs: Vec<_> = whole
            .chain(rows)
            .enumerate()
            .map(|(part, (slice, rows, others))| Run {
                part,
                capacity: self.amount(slice, &rows).max(others),
                rows: slice.first + rows.start..slice.first + rows.end,
            })
            .collect();
        Segment::new((self.planes, self.cols), runs.len(), here.start, runs)
    }
}

impl Matrix {
    /// A matrix of the slices of a stack. If some come first, it has one segment.
    ///
    /// Errors: `OutOfMemory` if that does not fit into `limit` bytes, or if 8 rows of every slice do not; and those
    /// of the payloads, if the rows of the type vary in size.
    pub fn sliced(
        label: String,
        (planes, cols): (Planes, usize),
        stack: Stack,
        (tensors, measured): (&dyn Tensors, &Measured),
        limit: u64,
    ) -> Result<Matrix> {
        let slices = Slices::open(planes, cols, stack, tensors, measured)?;
        let Stack { first, cut, .. } = stack;
        let segments = Segment::cut(slices.height(), GRANULE, limit, |here| slices.segment(here));
        let Some(segments) = segments.filter(|segments| first.is_empty() || segments.len() < 2) else {
            bail!(
                OutOfMemory,
                "{label}: {GRANULE} rows of each of {} slices do not fit into a binding of at most {limit} bytes",
                cut.len()
            );
        };
        Ok(Matrix {
            label,
            parts: first.iter().chain(cut).map(|slice| slice.tensor).collect(),
            planes,
            cols,
            segments,
        })
    }
}

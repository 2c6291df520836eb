//! The part of the size of planes that depends on the contents of the rows.

use crate::error::{Result, bail};
use std::iter::Sum;
use std::ops::{Add, AddAssign, Range};

/// Codes of two groups that cross rows. They are stored together, so that their scales are a whole word and their codes two
/// vectors.
pub(super) const PAIR: usize = 64;

/// The part of the rows' size that differs from row to row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Amount {
    /// Vectors of 16 bytes in the code plane.
    pub vectors: usize,
    /// Words: those that follow the vectors in the code plane, or overlay entries in the scale plane.
    pub words: usize,
}

impl Amount {
    /// The larger of both, component by component.
    pub fn max(self, other: Amount) -> Amount {
        Amount {
            vectors: self.vectors.max(other.vectors),
            words: self.words.max(other.words),
        }
    }

    /// The difference, and 0 where `other` is larger.
    pub fn less(self, other: Amount) -> Amount {
        Amount {
            vectors: self.vectors.saturating_sub(other.vectors),
            words: self.words.saturating_sub(other.words),
        }
    }

    /// Whether it fits into `capacity`.
    pub fn fits(self, capacity: Amount) -> bool {
        self.vectors <= capacity.vectors && self.words <= capacity.words
    }
}

impl Add for Amount {
    type Output = Amount;

    fn add(self, other: Amount) -> Amount {
        Amount {
            vectors: self.vectors + other.vectors,
            words: self.words + other.words,
        }
    }
}

impl AddAssign for Amount {
    fn add_assign(&mut self, other: Amount) {
        *self = *self + other;
    }
}

impl Sum for Amount {
    fn sum<I: Iterator<Item = Amount>>(all: I) -> Amount {
        all.fold(Amount::default(), Add::add)
    }
}

/// Where rows of a tensor begin that are stored side by side.
#[derive(Clone, Copy, Debug)]
pub struct Origin {
    /// The first of them.
    pub first: usize,
    /// The amount before it in the planes: [`Geometry::begin`](super::Geometry::begin), other rows and their spare capacity.
    pub before: Amount,
}

/// The amounts of a tensor's rows.
#[derive(Clone, Debug)]
pub enum Measure {
    /// Rows do not differ in size.
    Even,
    /// The vectors and words before each row and after the last.
    Sums(Vec<[u32; 2]>),
    /// Pairs of groups that cross rows of so many columns.
    Flat(usize),
}

impl Measure {
    /// The sums over rows with these amounts. Errors: those of `rows`; `Bounds` for more than a u32 can count.
    pub(super) fn sums(rows: impl Iterator<Item = Result<Amount>>) -> Result<Measure> {
        let mut sums = vec![[0u32; 2]];
        let mut total = [0u32; 2];
        for amount in rows {
            let amount = amount?;
            let add = |sum: u32, more: usize| u32::try_from(more).ok().and_then(|more| sum.checked_add(more));
            match (add(total[0], amount.vectors), add(total[1], amount.words)) {
                (Some(vectors), Some(words)) => total = [vectors, words],
                _ => bail!(
                    Bounds,
                    "payload: its rows take more vectors or words than 32 bits can count"
                ),
            }
            sums.push(total);
        }
        Ok(Measure::Sums(sums))
    }

    /// The amount of these rows, stored side by side in a segment.
    pub fn amount(&self, rows: Range<usize>) -> Amount {
        match self {
            Measure::Even => Amount::default(),
            Measure::Sums(sums) => match (sums.get(rows.start), sums.get(rows.end)) {
                (Some(from), Some(to)) => Amount {
                    vectors: to[0].saturating_sub(from[0]) as usize,
                    words: to[1].saturating_sub(from[1]) as usize,
                },
                _ => Amount::default(),
            },
            Measure::Flat(_) if rows.is_empty() => Amount::default(),
            Measure::Flat(cols) => Amount {
                vectors: 2 * ((rows.end * cols).div_ceil(PAIR) - rows.start * cols / PAIR),
                words: 0,
            },
        }
    }
}

//! How large the planes of a matrix are, and where what is in them begins.

use super::Planes;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Range};

/// Rows that share a record where rows have bit widths of their own.
pub const SHARED_ROWS: usize = 8;
/// Codes of two groups that straddle rows. They lie together, so that their scales are a whole word; with two vectors of codes.
pub const PAIR: usize = 64;

/// The part of rows' sizes that differs from row to row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Amount {
    /// Vectors of 16 bytes in the code plane.
    pub vectors: usize,
    /// Words: of the code plane behind all its vectors, or overlay entries in the scale plane.
    pub words: usize,
}

impl Amount {
    /// What is enough for either.
    pub fn max(self, other: Amount) -> Amount {
        Amount {
            vectors: self.vectors.max(other.vectors),
            words: self.words.max(other.words),
        }
    }

    /// What is left behind `other`, or nothing.
    pub fn less(self, other: Amount) -> Amount {
        Amount {
            vectors: self.vectors.saturating_sub(other.vectors),
            words: self.words.saturating_sub(other.words),
        }
    }

    /// Whether there is room for it in `room`.
    pub fn fits(self, room: Amount) -> bool {
        self.vectors <= room.vectors && self.words <= room.words
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

/// How much the rows of a tensor hold.
#[derive(Clone, Debug)]
pub enum Measure {
    /// Nothing but what every row of the family holds.
    Even,
    /// The vectors and words before each row and after the last.
    Sums(Vec<[u32; 2]>),
    /// Pairs of groups that straddle rows of so many columns.
    Flat(usize),
}

impl Measure {
    /// What these rows hold, side by side in a segment.
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

/// Sizes of the planes of one matrix, or of one segment of it.
///
/// The code plane holds vectors, and behind them words where the family has such. The scale plane holds the records of all
/// rows, then the scales of units that are in none, then column scales or overlay entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// The family.
    pub planes: Planes,
    /// Rows stored, over all stacked tensors.
    pub rows: usize,
    /// Columns of every row.
    pub cols: usize,
    /// Stacked tensors.
    pub parts: usize,
    /// What depends on which rows these are, with the room that is left for more.
    pub amount: Amount,
}

impl Geometry {
    /// Units of 32 columns in a row.
    pub fn units(&self) -> usize {
        self.cols.div_ceil(32)
    }

    /// About the most bytes that a row takes in both planes, without overlay entries.
    pub fn widest_row_bytes(&self) -> usize {
        match self.planes {
            Planes::BitsN => self.units() * 36,
            Planes::Nib4Flat => self.units() * 18 + 72,
            _ => self.code_row_bytes() + self.record_row_bytes() + self.unit_scale_row_bytes(),
        }
    }

    /// What stands before all records.
    pub fn header(&self) -> Option<u32> {
        (self.planes == Planes::Nib4Flat).then_some(self.cols as u32)
    }

    /// Bytes of one row of the code plane; 0 where they vary.
    pub fn code_row_bytes(&self) -> usize {
        self.units() * self.planes.unit_bytes()
    }

    /// Bytes of a row's record; 0 where there are none, and where rows share them.
    pub fn record_row_bytes(&self) -> usize {
        match self.planes {
            Planes::I8 | Planes::I8Col => 2,
            Planes::Nib4 => self.half_words() * 4,
            Planes::Nib4Ladder => 4 + (self.units() * 5).div_ceil(32) * 4,
            Planes::Bits1Overlay | Planes::Bits2 => 4 + self.half_words() * 4,
            Planes::Nib4Flat => 4,
            Planes::F32 | Planes::F16 | Planes::Bf16 | Planes::Bits1 | Planes::BitsN => 0,
        }
    }

    /// Words of a row's f16 scales, one a unit.
    fn half_words(&self) -> usize {
        self.units().div_ceil(2)
    }

    /// Bytes of the records before row `row`, which shares none with the row before it.
    pub fn record_offset(&self, row: usize) -> usize {
        match self.planes {
            Planes::BitsN => row.div_ceil(SHARED_ROWS) * 12,
            _ => self.header().map_or(0, |_| 4) + row * self.record_row_bytes(),
        }
    }

    /// Bytes of all records.
    fn record_bytes(&self) -> usize {
        let end = match self.planes.has_overlay() {
            true => 4,
            false => 0,
        };
        (self.record_offset(self.rows) + end).next_multiple_of(4)
    }

    /// Bytes of a row's scales of units outside of its record; 0 where groups straddle rows.
    pub fn unit_scale_row_bytes(&self) -> usize {
        match self.planes {
            Planes::Bits1 => self.units() * 2,
            _ => 0,
        }
    }

    /// Where the scales of units begin that belong to row `row`, before which `before` is in the planes.
    pub fn unit_scale_offset(&self, row: usize, before: Amount) -> usize {
        let flat = match self.planes {
            Planes::Nib4Flat => before.vectors * 2,
            _ => 0,
        };
        self.record_bytes() + row * self.unit_scale_row_bytes() + flat
    }

    /// Where column scales or overlay entries begin.
    fn tail_offset(&self) -> usize {
        self.unit_scale_offset(self.rows, self.amount).next_multiple_of(4)
    }

    /// Where the column scales of stacked tensor `part` begin in the scale plane.
    pub fn col_scale_offset(&self, part: usize) -> usize {
        self.tail_offset() + part * self.units() * 64
    }

    /// What is before the first row: records count words from the beginning of the plane that holds them.
    pub fn begin(&self) -> Amount {
        let words = match self.planes {
            Planes::BitsN => self.amount.vectors * 4,
            Planes::Bits1Overlay | Planes::Bits2 => self.tail_offset() / 4,
            _ => 0,
        };
        Amount { vectors: 0, words }
    }

    /// Bytes of the code plane, whole vectors and never 0.
    pub fn code_bytes(&self) -> usize {
        let varying = match self.planes {
            Planes::BitsN => self.amount.vectors * 16 + self.amount.words * 4,
            Planes::Nib4Flat => self.amount.vectors * 16,
            _ => 0,
        };
        (self.rows * self.code_row_bytes() + varying).next_multiple_of(16) + self.spare_bytes()[0]
    }

    /// Bytes of the scale plane, never 0.
    pub fn scale_bytes(&self) -> usize {
        let tail = match self.planes {
            Planes::I8Col => self.parts * self.units() * 64,
            Planes::Bits1Overlay | Planes::Bits2 => self.amount.words * 4,
            _ => 0,
        };
        self.tail_offset() + tail + self.spare_bytes()[1]
    }

    /// Bytes of both planes that hold nothing: a ladder's last row and the last of straddling groups may look at what follows, and
    /// a binding has at least a word.
    fn spare_bytes(&self) -> [usize; 2] {
        match self.planes {
            Planes::F32 | Planes::F16 | Planes::Bf16 | Planes::Nib4Ladder => [0, 4],
            Planes::Nib4Flat => [16, 4],
            _ => [0, 0],
        }
    }

    /// Bytes of both planes that hold data: what the device reads for one pass over the matrix.
    pub fn data_bytes(&self) -> u64 {
        let spare: usize = self.spare_bytes().iter().sum();
        (self.code_bytes() + self.scale_bytes() - spare) as u64
    }

    /// Whether what belongs to rows from row `row` on begins with a whole word, and shares no record with rows before them.
    pub fn may_begin_at(&self, row: usize) -> bool {
        let shared = self.planes == Planes::BitsN && !row.is_multiple_of(SHARED_ROWS);
        let whole = |offset: usize| offset.is_multiple_of(4);
        !shared && whole(self.record_offset(row)) && whole(row * self.unit_scale_row_bytes())
    }
}

//! Sizes of planes, and where their parts begin.

use super::amount::Amount;
use super::layout::{Planes, Rows};

/// Rows that share a record where rows have bit widths of their own.
pub const SHARED_ROWS: usize = 8;
/// Bytes of such a record.
const SHARED_RECORD_BYTES: usize = 12;

/// Sizes of the planes of one matrix, or of one segment of it.
///
/// The code plane holds vectors of 16 bytes, followed by words where rows have bit widths of their own. The scale plane holds
/// the records of all rows, then the group scales that are in no record, then column scales or overlay entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// The layout.
    pub planes: Planes,
    /// Rows stored, over all stacked tensors.
    pub rows: usize,
    /// Columns of every row.
    pub cols: usize,
    /// Stacked tensors.
    pub parts: usize,
    /// The part of the size that depends on the contents of the rows, with spare capacity.
    pub amount: Amount,
}

impl Geometry {
    fn varying(&self) -> Rows {
        self.planes.layout().rows
    }

    /// Groups of 32 columns in a row.
    pub fn groups(&self) -> usize {
        self.cols.div_ceil(32)
    }

    /// About the most bytes that a row takes in both planes, without overlay entries.
    pub fn widest_row_bytes(&self) -> usize {
        match self.varying() {
            Rows::Widths => self.groups() * 36,
            Rows::Flat => self.groups() * 18 + 72,
            Rows::Even | Rows::Overlay => self.code_row_bytes() + self.record_row_bytes(),
        }
    }

    /// The word before all records, where there is one.
    pub fn header(&self) -> Option<u32> {
        (self.varying() == Rows::Flat).then_some(self.cols as u32)
    }

    /// Bytes of one row of the code plane; 0 where rows differ in size.
    pub fn code_row_bytes(&self) -> usize {
        self.groups() * self.planes.layout().group_bytes
    }

    /// Bytes of a row's record; 0 where there are none, and where rows share them.
    pub fn record_row_bytes(&self) -> usize {
        (self.planes.layout().record_bytes)(self.groups())
    }

    /// Bytes of the header and of the records before row `row`, which shares no record with the row before it.
    pub fn record_offset(&self, row: usize) -> usize {
        match self.varying() {
            Rows::Widths => row.div_ceil(SHARED_ROWS) * SHARED_RECORD_BYTES,
            _ => self.header().map_or(0, |_| 4) + row * self.record_row_bytes(),
        }
    }

    /// Where the group scales that are in no record begin.
    fn records_end(&self) -> usize {
        // The last row's overlay entries end where a further record would say.
        let end = if self.planes.has_overlay() { 4 } else { 0 };
        (self.record_offset(self.rows) + end).next_multiple_of(4)
    }

    /// Where the group scales of a row begin that are in no record, if the planes hold `before` before that row.
    pub fn group_scale_offset(&self, before: Amount) -> usize {
        self.records_end()
            + match self.varying() {
                Rows::Flat => before.vectors * 2,
                _ => 0,
            }
    }

    /// Where column scales or overlay entries begin.
    fn tail_offset(&self) -> usize {
        self.group_scale_offset(self.amount).next_multiple_of(4)
    }

    /// Where the column scales of stacked tensor `part` begin in the scale plane.
    pub fn col_scale_offset(&self, part: usize) -> usize {
        self.tail_offset() + part * self.groups() * 64
    }

    /// The amount before the first row: records count words from the beginning of the plane that holds them.
    pub fn begin(&self) -> Amount {
        let words = match self.varying() {
            Rows::Widths => self.amount.vectors * 4,
            Rows::Overlay => self.tail_offset() / 4,
            Rows::Even | Rows::Flat => 0,
        };
        Amount { vectors: 0, words }
    }

    /// Bytes of the code plane, whole vectors and never 0.
    pub fn code_bytes(&self) -> usize {
        let bytes = match self.varying() {
            Rows::Widths => self.amount.vectors * 16 + self.amount.words * 4,
            Rows::Flat => self.amount.vectors * 16,
            Rows::Even | Rows::Overlay => self.rows * self.code_row_bytes(),
        };
        bytes.next_multiple_of(16) + self.planes.layout().spare_bytes[0]
    }

    /// Bytes of the scale plane, never 0.
    pub fn scale_bytes(&self) -> usize {
        let tail = match self.planes.has_column_scales() {
            true => self.parts * self.groups() * 64,
            false if self.planes.has_overlay() => self.amount.words * 4,
            false => 0,
        };
        self.tail_offset() + tail + self.planes.layout().spare_bytes[1]
    }

    /// Bytes of both planes that hold data: the device reads them in one pass over the matrix.
    pub fn data_bytes(&self) -> u64 {
        let spare: usize = self.planes.layout().spare_bytes.iter().sum();
        (self.code_bytes() + self.scale_bytes() - spare) as u64
    }

    /// Whether the data of row `row` and the rows after it begin with whole words, and share no record with the rows before.
    pub fn may_begin_at(&self, row: usize) -> bool {
        let shared = self.planes.shares_records() && !row.is_multiple_of(SHARED_ROWS);
        !shared && self.record_offset(row).is_multiple_of(4)
    }
}

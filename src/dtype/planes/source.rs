//! A tensor on its way into planes: a pure function of its payload, one block of rows at a time.

use super::amount::{Amount, Measure, Origin, PAIR};
use super::flat;
use super::geometry::Geometry;
use super::layout::Planes;
use super::overlay::Overlay;
use super::widths::Widths;
use crate::dtype::order::Order;
use crate::dtype::payload::{Payload, slice};
use crate::error::{Result, bail};
use std::ops::Range;

/// One tensor of the file, to be repacked.
pub struct Source<'a> {
    payload: Payload<'a>,
    planes: Planes,
    repack: &'static Repack,
    contents: Contents<'a>,
    measure: Measure,
    order: Order,
    /// Weights and bytes of the blocks that rows consist of, where columns are reordered.
    block: (usize, usize),
}

/// How an element type's rows become planes.
pub struct Repack {
    /// Reads the tables that describe the rows. Errors: `Parse` and `Bounds` for tables that do not fit.
    pub open: for<'a> fn(&Payload<'a>) -> Result<Contents<'a>>,
    /// Writes the codes of a row, zeros up to whole groups. Not called for [`Contents::Widths`] and [`Contents::Flat`].
    pub codes: fn(&Payload, row: usize, out: &mut [u8]) -> Result<()>,
    /// Writes the scales of a row, as its record holds them. Not called for [`Contents::Flat`].
    pub scales: fn(&Payload, row: usize, out: &mut [u8]) -> Result<()>,
}

impl Repack {
    /// Rows whose codes are the first section of the payload and whose scales are the second, if there is one.
    pub const COPY: Repack = Repack {
        open: |_| Ok(Contents::Even),
        codes: |payload, row, out| payload.copy_row(0, row, out),
        scales: |payload, row, out| payload.copy_row(1, row, out),
    };
}

/// The contents of a tensor's rows that differ in size.
pub enum Contents<'a> {
    /// Nothing.
    Even,
    /// Overlay entries.
    Overlay(Overlay<'a>),
    /// Codes of different widths.
    Widths(Widths<'a>),
    /// Groups that cross rows.
    Flat,
}

impl<'a> Source<'a> {
    /// Reads the tables of `payload`. Errors: `Parse` and `Bounds` for tables that do not fit.
    pub(crate) fn new(planes: Planes, repack: &'static Repack, payload: Payload<'a>) -> Result<Source<'a>> {
        let contents = (repack.open)(&payload)?;
        let measure = match &contents {
            Contents::Even => Measure::Even,
            Contents::Overlay(overlay) => overlay.measure(payload.rows)?,
            Contents::Widths(widths) => widths.measure()?,
            Contents::Flat => Measure::Flat(payload.cols),
        };
        Ok(Source {
            payload,
            planes,
            repack,
            contents,
            measure,
            order: Order::default(),
            block: (1, 0),
        })
    }

    /// The tensor whose rows and columns the payload has in this order. Rows consist of blocks of `block` weights and bytes,
    /// if they are nothing else.
    ///
    /// Errors: `UnsupportedTensorType` for rows that differ in size, and for columns that are not moved in whole blocks.
    pub(crate) fn ordered(mut self, order: Order, block: Option<(usize, usize)>) -> Result<Source<'a>> {
        if !order.is_same() && !matches!(self.contents, Contents::Even) {
            bail!(UnsupportedTensorType, "rows that differ in size cannot be reordered");
        }
        if let Some(heads) = order.cols {
            match block {
                Some(block) if heads.keeps_blocks(block.0) => self.block = block,
                _ => bail!(
                    UnsupportedTensorType,
                    "heads of {} columns, expected whole blocks of {}",
                    heads.width,
                    block.map_or(0, |block| block.0)
                ),
            }
        }
        self.order = order;
        Ok(self)
    }

    /// Calls `use_row` with a payload and the place in it of a row of the tensor.
    fn with_row(&self, row: usize, use_row: impl FnOnce(&Payload, usize) -> Result<()>) -> Result<()> {
        let row = self.order.rows.source(row);
        let Some(heads) = self.order.cols else {
            return use_row(&self.payload, row);
        };
        let stored = self.payload.row(0, row)?;
        let (weights, size) = self.block;
        let mut bytes = vec![0; stored.len()];
        for (block, out) in bytes.chunks_exact_mut(size.max(1)).enumerate() {
            let source = heads.source(block * weights) / weights;
            out.copy_from_slice(slice(stored, source * size, size)?);
        }
        let alone = Payload {
            bytes: &bytes,
            rows: 1,
            ..self.payload
        };
        use_row(&alone, 0)
    }

    /// Its device layout.
    pub fn planes(&self) -> Planes {
        self.planes
    }

    /// The amounts of its rows.
    pub fn into_measure(self) -> Measure {
        self.measure
    }

    /// The amount of these rows, stored side by side in a segment.
    pub fn amount(&self, rows: Range<usize>) -> Amount {
        self.measure.amount(rows)
    }

    /// The amount that these rows add to that of the rows from `origin` on.
    fn added(&self, origin: Origin, rows: &Range<usize>) -> Amount {
        self.amount(origin.first..rows.end)
            .less(self.amount(origin.first..rows.start))
    }

    /// The amount before a row.
    pub fn before_row(&self, origin: Origin, row: usize) -> Amount {
        origin.before + self.amount(origin.first..row)
    }

    fn geometry(&self, rows: usize) -> Geometry {
        Geometry {
            planes: self.planes,
            rows,
            cols: self.payload.cols,
            parts: 1,
            amount: Amount::default(),
        }
    }

    /// Bytes that these rows take in the code plane, without the words after its vectors.
    pub fn code_bytes(&self, origin: Origin, rows: &Range<usize>) -> usize {
        match self.contents {
            Contents::Widths(_) | Contents::Flat => self.added(origin, rows).vectors * 16,
            Contents::Even | Contents::Overlay(_) => rows.len() * self.geometry(rows.len()).code_row_bytes(),
        }
    }

    /// Bytes that these rows take in the code plane after its vectors.
    pub fn word_bytes(&self, rows: &Range<usize>) -> usize {
        match self.contents {
            Contents::Widths(_) => self.amount(rows.clone()).words * 4,
            _ => 0,
        }
    }

    /// Bytes of the records of these rows, where they share none.
    pub fn record_bytes(&self, rows: &Range<usize>) -> usize {
        rows.len() * self.geometry(rows.len()).record_row_bytes()
    }

    /// Bytes of the group scales of these rows that are in no record.
    pub fn group_scale_bytes(&self, origin: Origin, rows: &Range<usize>) -> usize {
        match self.contents {
            Contents::Flat => self.added(origin, rows).vectors * 2,
            _ => 0,
        }
    }

    /// Writes the codes of the rows `range`, which are stored at `origin`, to `out`, [`Source::code_bytes`] long.
    ///
    /// Errors: `Bounds` for a short payload, `Parse` for codes that the format does not have.
    pub fn codes(&self, origin: Origin, mut range: Range<usize>, out: &mut [u8]) -> Result<()> {
        match &self.contents {
            Contents::Flat => flat::pairs::<{ PAIR / 2 }>(&self.payload, origin, range, 0, out),
            Contents::Widths(widths) => widths.vectors(range, out),
            Contents::Even | Contents::Overlay(_) => {
                let mut rows = out.chunks_exact_mut(self.geometry(range.len()).code_row_bytes());
                range.try_for_each(|row| match rows.next() {
                    Some(out) => self.with_row(row, |payload, row| (self.repack.codes)(payload, row, out)),
                    None => Ok(()),
                })
            }
        }
    }

    /// Writes the words of these rows that follow the vectors of the code plane to `out`, [`Source::word_bytes`] long: for each
    /// row the scales of its groups, then the parts of its codes that are not vectors.
    ///
    /// Errors: as [`Source::codes`].
    pub fn words(&self, range: Range<usize>, out: &mut [u8]) -> Result<()> {
        match &self.contents {
            Contents::Widths(widths) => {
                widths.words(range, |row, out| (self.repack.scales)(&self.payload, row, out), out)
            }
            _ => Ok(()),
        }
    }

    /// Writes the records of the rows `range`, which are stored at `origin`, to `out`: [`Geometry::record_row_bytes`] each.
    ///
    /// Errors: `Bounds` for a short payload and a place above 2^32, `NonFinite` for scales that are not finite numbers.
    pub fn records(&self, origin: Origin, range: Range<usize>, out: &mut [u8]) -> Result<()> {
        let stride = self.geometry(range.len()).record_row_bytes();
        if stride == 0 {
            return Ok(());
        }
        for (row, out) in range.zip(out.chunks_exact_mut(stride)) {
            match self.contents {
                Contents::Even => self.with_row(row, |payload, row| (self.repack.scales)(payload, row, out))?,
                Contents::Overlay(_) => {
                    let (begin, scales) = out.split_at_mut(4);
                    begin.copy_from_slice(&word(row, self.before_row(origin, row).words)?);
                    (self.repack.scales)(&self.payload, row, scales)?;
                }
                Contents::Flat => out.copy_from_slice(&word(row, flat::first_code(&self.payload, origin, row))?),
                Contents::Widths(_) => {}
            }
        }
        Ok(())
    }

    /// Adds a row with a bit width of its own to the record of its eight rows, in which it has this `index`. The record must be
    /// zero before the first row.
    ///
    /// Errors: `Bounds` for a place above 2^32.
    pub fn shared_record(&self, origin: Origin, row: usize, index: usize, record: &mut [u8; 12]) -> Result<()> {
        if let Contents::Widths(widths) = &self.contents {
            if index == 0 {
                let Amount { vectors, words } = self.before_row(origin, row);
                record[..4].copy_from_slice(&word(row, vectors)?);
                record[4..8].copy_from_slice(&word(row, words)?);
            }
            record[8 + index / 2] |= widths.bits(row) << (4 * (index % 2));
        }
        Ok(())
    }

    /// Writes the group scales of the rows `range`, which are stored at `origin`, that are in no record to `out`,
    /// [`Source::group_scale_bytes`] long.
    ///
    /// Errors: `Bounds` for a short payload.
    pub fn group_scales(&self, origin: Origin, range: Range<usize>, out: &mut [u8]) -> Result<()> {
        match self.contents {
            Contents::Flat => {
                let at = flat::groups(&self.payload) * 16;
                flat::pairs::<4>(&self.payload, origin, range, at, out)
            }
            _ => Ok(()),
        }
    }

    /// Writes the column scales to `out`, 64 bytes per group; nothing for layouts without them. Errors: `Bounds` for a short
    /// payload.
    pub fn col_scales(&self, out: &mut [u8]) -> Result<()> {
        if self.planes.has_column_scales() {
            let scales = self.payload.tail()?;
            let len = self.payload.cols * 2;
            let Some(scales) = scales.get(..len) else {
                bail!(
                    Bounds,
                    "payload: {} bytes of column scales, expected {len}",
                    scales.len()
                );
            };
            let (data, padding) = out.split_at_mut(len);
            data.copy_from_slice(scales);
            padding.fill(0);
        }
        Ok(())
    }

    /// Appends the overlay entries of a row to `out`, 4 bytes each; nothing for types without an overlay.
    pub fn overlay(&self, row: usize, out: &mut Vec<u8>) -> Result<()> {
        if let Contents::Overlay(overlay) = &self.contents {
            let mut entries = Vec::new();
            overlay.row(row, &mut entries)?;
            entries.iter().for_each(|entry| out.extend(entry.to_le_bytes()));
        }
        Ok(())
    }
}

/// A word of a record. Errors: `Bounds` for a place above 2^32; bindings are far smaller.
fn word(row: usize, place: usize) -> Result<[u8; 4]> {
    match u32::try_from(place) {
        Ok(place) => Ok(place.to_le_bytes()),
        Err(_) => bail!(
            Bounds,
            "row {row} begins at {place} of its plane, expected a place below 2^32"
        ),
    }
}

//! One tensor of the file on its way into planes: a pure function of its bytes, one block of rows at a time.

use super::geometry::PAIR;
use super::overlay::Overlay;
use super::pack::{self, Parts};
use super::{Amount, Geometry, Measure, Planes};
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result, bail};
use half::f16;
use std::ops::Range;

/// Bytes of a group of 32 weights in the file.
const Q4_TILE: usize = 18;
const Q1_TILE: usize = 6;
const Q1T_TILE: usize = 9;

/// One tensor of the file, to be repacked.
pub struct Source<'a> {
    dtype: Dtype,
    payload: &'a [u8],
    rows: usize,
    cols: usize,
    planes: Planes,
    measure: Measure,
    /// Where each row's codes begin in the file, for vbit and vbit_ro.
    packed: Vec<usize>,
    overlay: Option<Overlay<'a>>,
}

/// Where rows of a tensor begin that are stored side by side.
#[derive(Clone, Copy, Debug)]
pub struct Origin {
    /// The first of them.
    pub first: usize,
    /// What is before it in the planes: [`Geometry::begin`] and what other rows hold or have room for.
    pub before: Amount,
}

pub(super) fn slice(payload: &[u8], at: usize, len: usize) -> Result<&[u8]> {
    match at.checked_add(len).and_then(|end| payload.get(at..end)) {
        Some(bytes) => Ok(bytes),
        None => bail!(Bounds, "payload of {} bytes ends before {at} + {len}", payload.len()),
    }
}

fn product(factors: &[usize]) -> Result<usize> {
    let all = factors.iter().try_fold(1usize, |all, &factor| all.checked_mul(factor));
    all.ok_or_else(|| Error::new(Kind::Bounds, "payload: its size overflows"))
}

impl<'a> Source<'a> {
    /// A `rows` × `cols` matrix of `dtype`. Where rows vary this reads what says how: bit widths, offsets, the overlay.
    ///
    /// Errors: those of [`Planes::of`]; `Parse` and `Bounds` for widths, offsets and overlays that do not fit.
    pub fn open(dtype: Dtype, payload: &'a [u8], rows: usize, cols: usize) -> Result<Source<'a>> {
        let mut source = Source {
            dtype,
            payload,
            rows,
            cols,
            planes: Planes::of(dtype, cols)?,
            measure: Measure::Even,
            packed: Vec::new(),
            overlay: None,
        };
        match dtype {
            Dtype::Vbit | Dtype::VbitRo => source.open_packed()?,
            Dtype::Q1s => {
                let at = product(&[rows, cols / 32, Q1_TILE])?;
                source.open_overlay(Overlay::flat(payload, at, rows, cols)?)?;
            }
            Dtype::Q1t => {
                let at = product(&[rows, cols / 32, Q1T_TILE])?;
                source.open_overlay(Overlay::by_row(payload, at, rows, cols)?)?;
            }
            _ if source.planes == Planes::Nib4Flat => source.measure = Measure::Flat(cols),
            _ => {}
        }
        Ok(source)
    }

    fn open_packed(&mut self) -> Result<()> {
        let (rows, groups) = (self.rows, self.cols / 32);
        let widths = slice(self.payload, 0, rows)?;
        let table = rows + product(&[rows, groups, 2])?;
        let mut at = table;
        let mut offsets = None;
        if self.dtype == Dtype::VbitRo {
            let bytes = product(&[rows, 4])? + 4;
            offsets = Some(slice(self.payload, table, bytes)?);
            at = table + bytes;
        }
        let first = at;
        let mut sums = Sums::default();
        for (row, &width) in widths.iter().enumerate() {
            let parts = Parts::of(width).map_err(|err| err.context(format!("row {row}")))?;
            if let Some(offsets) = offsets {
                let bytes = [0, 1, 2, 3].map(|i| offsets[row * 4 + i]);
                at = first + u32::from_le_bytes(bytes) as usize;
            }
            let bytes = product(&[groups, 4, usize::from(width)])?;
            slice(self.payload, at, bytes).map_err(|err| err.context(format!("row {row}")))?;
            self.packed.push(at);
            let scales = Amount {
                vectors: 0,
                words: groups.div_ceil(2),
            };
            sums.push(parts.amount(groups) + scales)?;
            at += bytes;
        }
        self.measure = sums.measure();
        Ok(())
    }

    fn open_overlay(&mut self, overlay: Overlay<'a>) -> Result<()> {
        let mut entries = Vec::new();
        let mut sums = Sums::default();
        for row in 0..self.rows {
            overlay.row(row, &mut entries)?;
            let words = entries.len();
            sums.push(Amount { vectors: 0, words })?;
        }
        self.measure = sums.measure();
        self.overlay = Some(overlay);
        Ok(())
    }

    /// Its family.
    pub fn planes(&self) -> Planes {
        self.planes
    }

    /// How much its rows hold.
    pub fn into_measure(self) -> Measure {
        self.measure
    }

    /// How much these rows hold, side by side in a segment.
    pub fn amount(&self, rows: Range<usize>) -> Amount {
        self.measure.amount(rows)
    }

    /// What these rows hold of what the rows from `origin` on hold.
    fn held(&self, origin: Origin, rows: &Range<usize>) -> Amount {
        self.amount(origin.first..rows.end)
            .less(self.amount(origin.first..rows.start))
    }

    /// What is before a row.
    pub fn before_row(&self, origin: Origin, row: usize) -> Amount {
        origin.before + self.amount(origin.first..row)
    }

    /// Bytes that these rows take in the code plane, without its words.
    pub fn code_bytes(&self, origin: Origin, rows: &Range<usize>) -> usize {
        match self.planes {
            Planes::BitsN | Planes::Nib4Flat => self.held(origin, rows).vectors * 16,
            _ => rows.len() * self.geometry(rows.len()).code_row_bytes(),
        }
    }

    /// Bytes that these rows take in the code plane behind its vectors.
    pub fn word_bytes(&self, rows: &Range<usize>) -> usize {
        match self.planes {
            Planes::BitsN => self.amount(rows.clone()).words * 4,
            _ => 0,
        }
    }

    /// Bytes of the records of these rows, where they share none.
    pub fn record_bytes(&self, rows: &Range<usize>) -> usize {
        rows.len() * self.geometry(rows.len()).record_row_bytes()
    }

    /// Bytes of the scales of these rows' units that are in no record.
    pub fn unit_scale_bytes(&self, origin: Origin, rows: &Range<usize>) -> usize {
        match self.planes {
            Planes::Nib4Flat => self.held(origin, rows).vectors * 2,
            _ => rows.len() * self.geometry(rows.len()).unit_scale_row_bytes(),
        }
    }

    fn geometry(&self, rows: usize) -> Geometry {
        Geometry {
            planes: self.planes,
            rows,
            cols: self.cols,
            parts: 1,
            amount: Amount::default(),
        }
    }

    /// Writes the codes of the tensor's rows `range`, which lie at `origin`, to `out`, which is [`Source::code_bytes`] long.
    ///
    /// Errors: `Bounds` for a short payload, `Parse` for codes that the format does not have.
    pub fn codes(&self, origin: Origin, range: Range<usize>, out: &mut [u8]) -> Result<()> {
        let stride = self.geometry(range.len()).code_row_bytes();
        let (first, row_bytes) = match self.dtype {
            Dtype::F32 => (0, self.cols * 4),
            Dtype::F16 | Dtype::Bf16 => (0, self.cols * 2),
            Dtype::Q8Row | Dtype::Q82f => (0, self.cols),
            _ if self.planes == Planes::Nib4Flat => {
                return self.pairs::<{ PAIR / 2 }>(origin, range, 0, out);
            }
            Dtype::Q4Block | Dtype::Q4tp => (0, self.cols / 2),
            Dtype::Q4Tiled => {
                return self.tiles::<Q4_TILE, 16>(range, out, |tile, out| {
                    out.copy_from_slice(&tile[2..]);
                    Ok(())
                });
            }
            Dtype::Q1 | Dtype::Q1s => {
                return self.tiles::<Q1_TILE, 4>(range, out, |tile, out| {
                    *out = pack::bits1([tile[2], tile[3], tile[4], tile[5]]).to_le_bytes();
                    Ok(())
                });
            }
            Dtype::Q1t => {
                return self.tiles::<Q1T_TILE, 8>(range, out, |tile, out| {
                    let words = pack::bits2(std::array::from_fn(|i| tile[2 + i]))?;
                    out.copy_from_slice(bytemuck::cast_slice(&words.map(u32::to_le)));
                    Ok(())
                });
            }
            Dtype::Vbit | Dtype::VbitRo => {
                return self.vectors(range, out);
            }
        };
        for (row, out) in range.zip(out.chunks_exact_mut(stride)) {
            let (data, padding) = out.split_at_mut(row_bytes);
            data.copy_from_slice(slice(self.payload, first + row * row_bytes, row_bytes)?);
            padding.fill(0);
        }
        Ok(())
    }

    /// Writes the words of the code plane that belong to these rows to `out`, which is [`Source::word_bytes`] long: for each the
    /// scales of its units, then what its codes have besides vectors.
    ///
    /// Errors: as [`Source::codes`].
    pub fn words(&self, range: Range<usize>, out: &mut [u8]) -> Result<()> {
        if self.planes != Planes::BitsN {
            return Ok(());
        }
        let groups = self.cols / 32;
        let mut codes = vec![0; groups * 32];
        let mut words = Vec::new();
        let mut rest = out;
        for row in range {
            let Amount { vectors, words: count } = Parts::of(self.payload[row])?.amount(groups);
            let (scales, after) = rest.split_at_mut(groups.div_ceil(2) * 4);
            self.halves(row, scales)?;
            let (here, after) = after.split_at_mut(count * 4);
            if count != 0 {
                self.packed_row(row, &mut codes, &mut words)?;
                put_words(&words[vectors * 4..], here);
            }
            rest = after;
        }
        Ok(())
    }

    /// Writes the vectors of the code plane that belong to rows with bit widths of their own.
    fn vectors(&self, range: Range<usize>, out: &mut [u8]) -> Result<()> {
        let groups = self.cols / 32;
        let mut codes = vec![0; groups * 32];
        let mut words = Vec::new();
        let mut rest = out;
        for row in range {
            let Amount { vectors, .. } = Parts::of(self.payload[row])?.amount(groups);
            let (here, after) = rest.split_at_mut(vectors * 16);
            if vectors != 0 {
                self.packed_row(row, &mut codes, &mut words)?;
                put_words(&words, here);
            }
            rest = after;
        }
        Ok(())
    }

    /// Makes `words` those of a row's codes.
    fn packed_row(&self, row: usize, codes: &mut [u8], words: &mut Vec<u32>) -> Result<()> {
        let groups = self.cols / 32;
        let (width, at) = (self.payload[row], self.packed[row]);
        let parts = Parts::of(width)?;
        let file = slice(self.payload, at, groups * 4 * usize::from(width))?;
        pack::read_msb_first(width, file, codes);
        words.resize(parts.words(groups), 0);
        parts.write(codes, words);
        Ok(())
    }

    /// Writes the part of `BYTES` bytes a pair of groups of the payload, which begins at byte `at`, that has these rows' pairs:
    /// those that begin in them and, for the first row of all, the one that it begins in. Zeros follow the file's last group.
    fn pairs<const BYTES: usize>(&self, origin: Origin, range: Range<usize>, at: usize, out: &mut [u8]) -> Result<()> {
        let first = match range.start == origin.first {
            true => range.start * self.cols / PAIR,
            false => (range.start * self.cols).div_ceil(PAIR),
        };
        let file = slice(self.payload, at, (self.rows * self.cols).div_ceil(32) * BYTES / 2)?;
        let file = file.get(first * BYTES..).unwrap_or_default();
        let (data, padding) = out.split_at_mut(file.len().min(out.len()));
        data.copy_from_slice(&file[..data.len()]);
        padding.fill(0);
        Ok(())
    }

    /// Converts the tiles of some rows, which lie one after another in the file and on the device.
    fn tiles<const FILE: usize, const DEVICE: usize>(
        &self,
        range: Range<usize>,
        out: &mut [u8],
        convert: impl Fn(&[u8; FILE], &mut [u8; DEVICE]) -> Result<()>,
    ) -> Result<()> {
        let groups = self.cols / 32;
        let bytes = product(&[range.len(), groups, FILE])?;
        let tiles = slice(self.payload, product(&[range.start, groups, FILE])?, bytes)?;
        let pairs = tiles.as_chunks::<FILE>().0.iter().zip(out.as_chunks_mut::<DEVICE>().0);
        for (i, (tile, out)) in pairs.enumerate() {
            convert(tile, out).map_err(|err| {
                let (row, group) = (range.start + i / groups, i % groups);
                err.context(format!("row {row}, group {group}"))
            })?;
        }
        Ok(())
    }

    /// Writes the records of some rows that lie at `origin` to `out`: [`Geometry::record_row_bytes`] each.
    ///
    /// Errors: `Bounds` for a short payload and a place that a word cannot count, `NonFinite` for a ladder that is no number.
    pub fn records(&self, origin: Origin, range: Range<usize>, out: &mut [u8]) -> Result<()> {
        let stride = self.geometry(range.len()).record_row_bytes();
        if stride == 0 {
            return Ok(());
        }
        let groups = self.cols / 32;
        for (row, out) in range.zip(out.chunks_exact_mut(stride)) {
            match self.planes {
                Planes::F32 | Planes::F16 | Planes::Bf16 | Planes::Bits1 | Planes::BitsN => {}
                Planes::I8 | Planes::I8Col => {
                    out.copy_from_slice(slice(self.payload, self.rows * self.cols + row * 2, 2)?);
                }
                Planes::Nib4 => self.halves(row, out)?,
                Planes::Bits1Overlay | Planes::Bits2 => {
                    let (begin, halves) = out.split_at_mut(4);
                    begin.copy_from_slice(&counted(row, self.before_row(origin, row).words)?);
                    self.halves(row, halves)?;
                }
                Planes::Nib4Flat => {
                    let skipped = origin.first * self.cols / PAIR * PAIR;
                    let begin = origin.before.vectors * 32 + row * self.cols - skipped;
                    out.copy_from_slice(&counted(row, begin)?);
                }
                Planes::Nib4Ladder => {
                    let ladders = self.rows * groups * 16;
                    let rung_bytes = (groups * 5).div_ceil(8);
                    let ladder = slice(self.payload, ladders + row * 4, 4)?;
                    let finite = |half: &[u8]| f16::from_le_bytes([half[0], half[1]]).is_finite();
                    if !ladder.chunks_exact(2).all(finite) {
                        bail!(NonFinite, "row {row}: its ladder is not made of finite numbers");
                    }
                    out[..4].copy_from_slice(ladder);
                    let (data, padding) = out[4..].split_at_mut(rung_bytes);
                    let at = ladders + self.rows * 4 + row * rung_bytes;
                    data.copy_from_slice(slice(self.payload, at, rung_bytes)?);
                    padding.fill(0);
                }
            }
        }
        Ok(())
    }

    /// Writes what a row with a bit width of its own adds to the record of its eight, of which it is number `index`. The record is
    /// zero before the first.
    ///
    /// Errors: `Bounds` for a place that a word cannot count.
    pub fn shared_record(&self, origin: Origin, row: usize, index: usize, record: &mut [u8; 12]) -> Result<()> {
        if index == 0 {
            let Amount { vectors, words } = self.before_row(origin, row);
            record[..4].copy_from_slice(&counted(row, vectors)?);
            record[4..8].copy_from_slice(&counted(row, words)?);
        }
        record[8 + index / 2] |= self.payload[row] << (4 * (index % 2));
        Ok(())
    }

    /// Writes the scales of the units of these rows, which lie at `origin`, to `out`, which is [`Source::unit_scale_bytes`] long.
    ///
    /// Errors: `Bounds` for a short payload.
    pub fn unit_scales(&self, origin: Origin, range: Range<usize>, out: &mut [u8]) -> Result<()> {
        match self.planes {
            Planes::Bits1 => {
                let row_bytes = self.cols / 32 * 2;
                let mut rows = range.zip(out.chunks_exact_mut(row_bytes));
                rows.try_for_each(|(row, out)| self.halves(row, out))
            }
            Planes::Nib4Flat => {
                let at = (self.rows * self.cols).div_ceil(32) * 16;
                self.pairs::<4>(origin, range, at, out)
            }
            _ => Ok(()),
        }
    }

    /// Writes a row's f16 scales, one a group, and zeros behind them.
    fn halves(&self, row: usize, out: &mut [u8]) -> Result<()> {
        let groups = self.cols / 32;
        let (data, padding) = out.split_at_mut(groups * 2);
        padding.fill(0);
        let plane = |at: usize| slice(self.payload, at + row * groups * 2, groups * 2);
        let tile = match self.dtype {
            Dtype::Q4Tiled => Q4_TILE,
            Dtype::Q1 | Dtype::Q1s => Q1_TILE,
            Dtype::Q1t => Q1T_TILE,
            Dtype::Vbit | Dtype::VbitRo => {
                data.copy_from_slice(plane(self.rows)?);
                return Ok(());
            }
            _ => {
                data.copy_from_slice(plane(self.rows * groups * 16)?);
                return Ok(());
            }
        };
        let tiles = slice(self.payload, row * groups * tile, groups * tile)?;
        for (tile, scale) in tiles.chunks_exact(tile).zip(data.chunks_exact_mut(2)) {
            scale.copy_from_slice(&tile[..2]);
        }
        Ok(())
    }

    /// Writes the column scales to `out` (64 bytes a unit); nothing for types without them.
    pub fn col_scales(&self, out: &mut [u8]) -> Result<()> {
        if self.planes == Planes::I8Col {
            let at = self.rows * self.cols + self.rows * 2;
            let (data, padding) = out.split_at_mut(self.cols * 2);
            data.copy_from_slice(slice(self.payload, at, self.cols * 2)?);
            padding.fill(0);
        }
        Ok(())
    }

    /// Appends the overlay entries of a row to `out`, 4 bytes each; nothing for types without an overlay.
    pub fn overlay(&self, row: usize, out: &mut Vec<u8>) -> Result<()> {
        if let Some(overlay) = &self.overlay {
            let mut entries = Vec::new();
            overlay.row(row, &mut entries)?;
            entries.iter().for_each(|entry| out.extend(entry.to_le_bytes()));
        }
        Ok(())
    }
}

/// A word of a record. Errors: `Bounds` for a place that it cannot count; a plane that is bound as one is far smaller than that.
fn counted(row: usize, place: usize) -> Result<[u8; 4]> {
    match u32::try_from(place) {
        Ok(place) => Ok(place.to_le_bytes()),
        Err(_) => bail!(Bounds, "row {row} lies beyond what a word counts"),
    }
}

fn put_words(words: &[u32], out: &mut [u8]) {
    for (out, word) in out.chunks_exact_mut(4).zip(words) {
        out.copy_from_slice(&word.to_le_bytes());
    }
}

/// The vectors and words before each row, and after the last so far.
struct Sums(Vec<[u32; 2]>);

impl Default for Sums {
    fn default() -> Sums {
        Sums(vec![[0; 2]])
    }
}

impl Sums {
    fn push(&mut self, amount: Amount) -> Result<()> {
        let [vectors, words] = self.0.last().copied().unwrap_or_default();
        let add = |sum: u32, more: usize| u32::try_from(more).ok().and_then(|more| sum.checked_add(more));
        match (add(vectors, amount.vectors), add(words, amount.words)) {
            (Some(vectors), Some(words)) => self.0.push([vectors, words]),
            _ => bail!(Bounds, "payload: more than a device can count"),
        }
        Ok(())
    }

    fn measure(self) -> Measure {
        Measure::Sums(self.0)
    }
}

//! One tensor of the file on its way into planes: a pure function of its bytes, one block of rows at a time.

use super::overlay::Overlay;
use super::pack::{self, Parts};
use super::{Geometry, Planes};
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
    /// The amount of [`Geometry`] before each row and after the last, for families whose rows vary.
    starts: Vec<u32>,
    /// Where each row's codes begin in the file, for vbit and vbit_ro.
    packed: Vec<usize>,
    overlay: Option<Overlay<'a>>,
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
            starts: Vec::new(),
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
            _ => {}
        }
        Ok(source)
    }

    /// The same in a family that may not be its own: any type can be expanded to f32, to lie beside others.
    ///
    /// Errors: as [`Source::open`]; `UnsupportedTensorType` for another family that is not its own.
    pub fn open_in(planes: Planes, dtype: Dtype, payload: &'a [u8], rows: usize, cols: usize) -> Result<Source<'a>> {
        match planes {
            own if own == Planes::of(dtype, cols)? => Source::open(dtype, payload, rows, cols),
            Planes::F32 => Ok(Source {
                dtype,
                payload,
                rows,
                cols,
                planes,
                starts: Vec::new(),
                packed: Vec::new(),
                overlay: None,
            }),
            other => bail!(
                UnsupportedTensorType,
                "{} weights do not lie as {}",
                dtype.name(),
                other.name()
            ),
        }
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
        let mut total = 0;
        for (row, &width) in widths.iter().enumerate() {
            let parts = Parts::of(width).map_err(|err| err.context(format!("row {row}")))?;
            if let Some(offsets) = offsets {
                let bytes = [0, 1, 2, 3].map(|i| offsets[row * 4 + i]);
                at = first + u32::from_le_bytes(bytes) as usize;
            }
            let bytes = product(&[groups, 4, usize::from(width)])?;
            slice(self.payload, at, bytes).map_err(|err| err.context(format!("row {row}")))?;
            self.packed.push(at);
            self.push_start(&mut total, parts.vectors(groups))?;
            at += bytes;
        }
        self.starts.push(total);
        Ok(())
    }

    fn open_overlay(&mut self, overlay: Overlay<'a>) -> Result<()> {
        let mut entries = Vec::new();
        let mut total = 0;
        for row in 0..self.rows {
            overlay.row(row, &mut entries)?;
            self.push_start(&mut total, entries.len())?;
        }
        self.starts.push(total);
        self.overlay = Some(overlay);
        Ok(())
    }

    /// Notes that a row begins at `total`, and adds what it takes.
    fn push_start(&mut self, total: &mut u32, amount: usize) -> Result<()> {
        self.starts.push(*total);
        let sum = u32::try_from(amount).ok().and_then(|amount| total.checked_add(amount));
        *total = sum.ok_or_else(|| Error::new(Kind::Bounds, "payload: more than a device can count"))?;
        Ok(())
    }

    /// Its columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Its family.
    pub fn planes(&self) -> Planes {
        self.planes
    }

    /// The amount of [`Geometry`] before each row and after the last; empty for families whose rows do not vary.
    pub fn into_starts(self) -> Vec<u32> {
        self.starts
    }

    /// The amount of [`Geometry`] that these rows take.
    pub fn amount(&self, range: Range<usize>) -> usize {
        match (self.starts.get(range.start), self.starts.get(range.end)) {
            (Some(from), Some(to)) => (to - from) as usize,
            _ => 0,
        }
    }

    /// Bytes that these rows take in the code plane.
    pub fn code_bytes(&self, range: Range<usize>) -> usize {
        match self.planes {
            Planes::BitsN => self.amount(range) * 16,
            _ => range.len() * self.geometry(range.len()).code_row_bytes(),
        }
    }

    fn geometry(&self, rows: usize) -> Geometry {
        Geometry {
            planes: self.planes,
            rows,
            cols: self.cols,
            parts: 1,
            amount: 0,
        }
    }

    /// Writes the code plane's rows for the tensor's rows `range` to `out`, which is [`Source::code_bytes`] long.
    ///
    /// Errors: `Bounds` for a short payload, `Parse` for codes that the format does not have.
    pub fn codes(&self, range: Range<usize>, out: &mut [u8]) -> Result<()> {
        let groups = self.cols / 32;
        let stride = self.geometry(range.len()).code_row_bytes();
        let (first, row_bytes) = match self.dtype {
            Dtype::F32 => (0, self.cols * 4),
            _ if self.planes == Planes::F32 => return self.expanded(range, out),
            Dtype::F16 | Dtype::Bf16 => (0, self.cols * 2),
            Dtype::Q8Row | Dtype::Q82f => (0, self.cols),
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
                let mut codes = vec![0; groups * 32];
                let mut words = Vec::new();
                let mut rest = out;
                for row in range {
                    let (here, after) = rest.split_at_mut(self.code_bytes(row..row + 1));
                    let (width, at) = (self.payload[row], self.packed[row]);
                    let file = slice(self.payload, at, groups * 4 * usize::from(width))?;
                    pack::read_msb_first(width, file, &mut codes);
                    words.resize(here.len() / 4, 0);
                    Parts::of(width)?.write(&codes, &mut words);
                    for (out, word) in here.chunks_exact_mut(4).zip(&words) {
                        out.copy_from_slice(&word.to_le_bytes());
                    }
                    rest = after;
                }
                return Ok(());
            }
        };
        for (row, out) in range.zip(out.chunks_exact_mut(stride)) {
            let (data, padding) = out.split_at_mut(row_bytes);
            data.copy_from_slice(slice(self.payload, first + row * row_bytes, row_bytes)?);
            padding.fill(0);
        }
        Ok(())
    }

    /// Groups that straddle rows have no plane, and neighbours of different types none in common: such matrices are rare and
    /// small, and become f32.
    fn expanded(&self, range: Range<usize>, out: &mut [u8]) -> Result<()> {
        let stride = self.geometry(range.len()).code_row_bytes();
        let decoder = self.dtype.decoder(self.payload, self.rows, self.cols)?;
        let mut values = vec![0f32; self.cols];
        for (row, out) in range.zip(out.chunks_exact_mut(stride)) {
            decoder.row(row, &mut values);
            let (data, padding) = out.split_at_mut(self.cols * 4);
            data.copy_from_slice(bytemuck::cast_slice(&values));
            padding.fill(0);
        }
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

    /// Writes the records of the tensor's rows `range` to `out`: their scales, behind the words that count from `lead`
    /// ([`Geometry::first_lead`] plus the amount before these rows) where rows vary. Nothing for types without scales.
    pub fn row_scales(&self, range: Range<usize>, lead: usize, out: &mut [u8]) -> Result<()> {
        let stride = self.geometry(range.len()).scale_row_bytes();
        let groups = self.cols / 32;
        let start = range.start;
        match self.planes {
            Planes::F32 | Planes::F16 | Planes::Bf16 => {}
            Planes::I8 | Planes::I8Col => {
                let at = self.rows * self.cols + range.start * 2;
                out[..range.len() * 2].copy_from_slice(slice(self.payload, at, range.len() * 2)?);
            }
            Planes::Nib4 | Planes::Bits1 => {
                for (row, out) in range.zip(out.chunks_exact_mut(stride)) {
                    self.halves(row, out)?;
                }
            }
            Planes::Bits1Overlay | Planes::Bits2 | Planes::BitsN => {
                // A plane that is bound as one is far smaller than that.
                let counted = |row: usize, word: usize| {
                    u32::try_from(word)
                        .map_err(|_| Error::new(Kind::Bounds, format!("row {row} lies beyond what a word counts")))
                };
                for (row, out) in range.zip(out.chunks_exact_mut(stride)) {
                    let at = lead + self.amount(start..row);
                    let (first, second) = match self.planes {
                        Planes::BitsN => (at << 4 | usize::from(self.payload[row]), None),
                        _ => (at, Some(at + self.amount(row..row + 1))),
                    };
                    let words = [Some(first), second].into_iter().flatten();
                    let mut rest = out;
                    for word in words {
                        let (here, after) = rest.split_at_mut(4);
                        here.copy_from_slice(&counted(row, word)?.to_le_bytes());
                        rest = after;
                    }
                    self.halves(row, rest)?;
                }
            }
            Planes::Nib4Ladder => {
                let ladders = self.rows * groups * 16;
                let code_bytes = (groups * 5).div_ceil(8);
                for (row, out) in range.zip(out.chunks_exact_mut(stride)) {
                    let ladder = slice(self.payload, ladders + row * 4, 4)?;
                    let finite = |half: &[u8]| f16::from_le_bytes([half[0], half[1]]).is_finite();
                    if !ladder.chunks_exact(2).all(finite) {
                        bail!(NonFinite, "row {row}: its ladder is not made of finite numbers");
                    }
                    out[..4].copy_from_slice(ladder);
                    let (data, padding) = out[4..].split_at_mut(code_bytes);
                    data.copy_from_slice(slice(
                        self.payload,
                        ladders + self.rows * 4 + row * code_bytes,
                        code_bytes,
                    )?);
                    padding.fill(0);
                }
            }
        }
        Ok(())
    }

    /// Writes a row's f16 scales, one a group, padded to whole words.
    fn halves(&self, row: usize, out: &mut [u8]) -> Result<()> {
        let groups = self.cols / 32;
        let (data, padding) = out.split_at_mut(groups * 2);
        padding.fill(0);
        let plane = |at: usize| slice(self.payload, at + row * groups * 2, groups * 2);
        let tiles = |tile: usize| Ok((slice(self.payload, row * groups * tile, groups * tile)?, tile));
        let (tiles, tile) = match self.dtype {
            Dtype::Q4Tiled => tiles(Q4_TILE)?,
            Dtype::Q1 | Dtype::Q1s => tiles(Q1_TILE)?,
            Dtype::Q1t => tiles(Q1T_TILE)?,
            Dtype::Vbit | Dtype::VbitRo => {
                data.copy_from_slice(plane(self.rows)?);
                return Ok(());
            }
            _ => {
                data.copy_from_slice(plane(self.rows * groups * 16)?);
                return Ok(());
            }
        };
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

//! What a weight is: one table of the file format's element types.
//!
//! Sizes, names and which types can be written live here; decoding is the reference crate's, encoding is in the files
//! beside this one. Nothing here knows a model or a device. Source: the format's section 3.1.

pub mod encode;
pub mod planes;

use crate::error::{Error, Kind, Result, bail};
use cmf_kernels_ref::dtype as reference;

pub use reference::RowDecoder;

/// An element type of the container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the names are the format's own; `Dtype::name` spells them")]
pub enum Dtype {
    F32,
    F16,
    Bf16,
    Q8Row,
    Q4Block,
    Vbit,
    Q82f,
    VbitRo,
    Q4Tiled,
    Q1,
    Q1s,
    Q1t,
    Q4tp,
}

/// How many bytes a tensor of some type and shape takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// Exactly this many.
    Exact(u64),
    /// At least this many; the payload itself says how many (bit widths, overlays).
    AtLeast(u64),
}

struct Row {
    dtype: Dtype,
    id: u8,
    name: &'static str,
    quant: &'static str,
}

const fn row(dtype: Dtype, id: u8, name: &'static str, quant: &'static str) -> Row {
    Row { dtype, id, name, quant }
}

/// The table: id in the directory, name in the specification, name on the command line ("" = read, not written).
const TABLE: [Row; 13] = [
    row(Dtype::F32, 0, "f32", "f32"),
    row(Dtype::F16, 1, "f16", "f16"),
    row(Dtype::Bf16, 2, "bf16", "bf16"),
    row(Dtype::Q8Row, 3, "q8_row", "q8"),
    row(Dtype::Q4Block, 4, "q4_block", "q4"),
    row(Dtype::Vbit, 8, "vbit", ""),
    row(Dtype::Q82f, 9, "q8_2f", "q8_2f"),
    row(Dtype::VbitRo, 10, "vbit_ro", "vbit"),
    row(Dtype::Q4Tiled, 11, "q4_tiled", "q4t"),
    row(Dtype::Q1, 12, "q1", "q1"),
    row(Dtype::Q1s, 13, "q1s", "q1s"),
    row(Dtype::Q1t, 14, "q1t", "q1t"),
    row(Dtype::Q4tp, 15, "q4tp", "q4tp"),
];

impl Dtype {
    /// Every type, in id order.
    pub fn all() -> impl Iterator<Item = Dtype> {
        TABLE.iter().map(|row| row.dtype)
    }

    fn row(self) -> &'static Row {
        // The table lists the variants in declaration order; a test holds it to that.
        &TABLE[self as usize]
    }

    /// The type of a directory record, or `None` for reserved and unknown ids.
    pub fn from_id(id: u8) -> Option<Dtype> {
        TABLE.iter().find(|row| row.id == id).map(|row| row.dtype)
    }

    /// The type that a `--quant` name stands for.
    pub fn from_quant_name(name: &str) -> Option<Dtype> {
        TABLE
            .iter()
            .find(|row| !row.quant.is_empty() && row.quant == name)
            .map(|row| row.dtype)
    }

    /// The id in the directory.
    pub fn id(self) -> u8 {
        self.row().id
    }

    /// The specification's name.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// The command line's name, empty for a type that is read and not written.
    pub fn quant_name(self) -> &'static str {
        self.row().quant
    }

    /// Types that need a matrix whose rows are whole groups of 32.
    pub fn needs_group_rows(self) -> bool {
        match self {
            Dtype::Vbit | Dtype::VbitRo | Dtype::Q4Tiled | Dtype::Q1 | Dtype::Q1s | Dtype::Q1t | Dtype::Q4tp => true,
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 | Dtype::Q8Row | Dtype::Q4Block | Dtype::Q82f => false,
        }
    }

    /// Bytes of a tensor of `shape`. Errors: `Parse` when the type does not allow the shape, `Bounds` on overflow.
    pub fn size(self, shape: &[u64]) -> Result<Size> {
        let overflow = || Error::new(Kind::Bounds, format!("element count of shape {shape:?} overflows"));
        let n = shape
            .iter()
            .try_fold(1u64, |n, &d| n.checked_mul(d))
            .ok_or_else(overflow)?;
        if shape.is_empty() || n == 0 {
            bail!(Parse, "{} tensor of shape {shape:?} has no elements", self.name());
        }
        let (out, cols) = match *shape {
            [out, cols] => (out, cols),
            // One vector is one row.
            [cols] => (1, cols),
            // The last dimension is the row; the others count rows.
            _ => (n / shape[shape.len() - 1], shape[shape.len() - 1]),
        };
        let matrix = matches!(self, Dtype::Q8Row | Dtype::Q82f) || self.needs_group_rows();
        if matrix && shape.len() != 2 {
            bail!(Parse, "{} needs a matrix, found shape {shape:?}", self.name());
        }
        if self.needs_group_rows() && !cols.is_multiple_of(32) {
            bail!(
                Parse,
                "{} needs rows of whole groups of 32, found {cols} columns",
                self.name()
            );
        }
        let groups = cols / 32;
        let sum = |parts: &[Option<u64>]| {
            parts
                .iter()
                .try_fold(0u64, |total, part| part.and_then(|p| total.checked_add(p)))
                .ok_or_else(overflow)
        };
        let per_group = |bytes: u64| out.checked_mul(groups).and_then(|g| g.checked_mul(bytes));
        Ok(match self {
            Dtype::F32 => Size::Exact(sum(&[n.checked_mul(4)])?),
            Dtype::F16 | Dtype::Bf16 => Size::Exact(sum(&[n.checked_mul(2)])?),
            Dtype::Q8Row => Size::Exact(sum(&[Some(n), out.checked_mul(2)])?),
            Dtype::Q82f => Size::Exact(sum(&[Some(n), out.checked_mul(2), cols.checked_mul(2)])?),
            Dtype::Q4Block => Size::Exact(sum(&[n.div_ceil(32).checked_mul(18)])?),
            Dtype::Q4Tiled => Size::Exact(sum(&[per_group(18)])?),
            Dtype::Q1 => Size::Exact(sum(&[per_group(6)])?),
            Dtype::Q4tp => {
                let codes = groups
                    .checked_mul(5)
                    .map(|bits| bits.div_ceil(8))
                    .and_then(|b| b.checked_mul(out));
                Size::Exact(sum(&[per_group(16), out.checked_mul(4), codes])?)
            }
            Dtype::Q1s => Size::AtLeast(sum(&[per_group(6), Some(4)])?),
            Dtype::Q1t => Size::AtLeast(sum(&[per_group(9), out.checked_add(1).and_then(|r| r.checked_mul(4))])?),
            // The narrowest row has 3 bits a weight: 12 bytes a group.
            Dtype::Vbit => Size::AtLeast(sum(&[Some(out), per_group(14)])?),
            Dtype::VbitRo => Size::AtLeast(sum(&[
                Some(out),
                per_group(14),
                out.checked_add(1).and_then(|r| r.checked_mul(4)),
            ])?),
        })
    }

    /// A decoder of single rows of `payload`, a `rows` × `cols` matrix, after checking the whole structure of the payload.
    ///
    /// Errors: `Parse` for lengths, bit widths, offsets or overlay entries that do not fit.
    pub fn decoder<'a>(self, payload: &'a [u8], rows: usize, cols: usize) -> Result<Box<dyn RowDecoder + 'a>> {
        let decoder = match self {
            Dtype::F32 => reference::f32::decoder(payload, rows, cols),
            Dtype::F16 => reference::f16::decoder(payload, rows, cols),
            Dtype::Bf16 => reference::bf16::decoder(payload, rows, cols),
            Dtype::Q8Row => reference::q8_row::decoder(payload, rows, cols),
            Dtype::Q4Block => reference::q4_block::decoder(payload, rows, cols),
            Dtype::Vbit => reference::vbit::decoder(payload, rows, cols),
            Dtype::Q82f => reference::q8_2f::decoder(payload, rows, cols),
            Dtype::VbitRo => reference::vbit_ro::decoder(payload, rows, cols),
            Dtype::Q4Tiled => reference::q4_tiled::decoder(payload, rows, cols),
            Dtype::Q1 => reference::q1::decoder(payload, rows, cols),
            Dtype::Q1s => reference::q1s::decoder(payload, rows, cols),
            Dtype::Q1t => reference::q1t::decoder(payload, rows, cols),
            Dtype::Q4tp => reference::q4tp::decoder(payload, rows, cols),
        };
        decoder.map_err(|bad| Error::new(Kind::Parse, format!("{} payload: {}", self.name(), bad.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_declaration_order_and_unambiguous() {
        for (i, dtype) in Dtype::all().enumerate() {
            assert_eq!(dtype as usize, i);
            assert_eq!(Dtype::from_id(dtype.id()), Some(dtype));
            if !dtype.quant_name().is_empty() {
                assert_eq!(Dtype::from_quant_name(dtype.quant_name()), Some(dtype));
            }
        }
        assert_eq!([5, 6, 7, 16, 255].map(Dtype::from_id), [None; 5]);
    }
}

//! How a weight lies on the device: planes that a kernel loads as whole vectors, repacked from the file row by row.
//!
//! A row is `units` of 32 columns, padded with zeros. The code plane holds the codes, the scale plane the scales' own bits: for
//! each row a record, then what is shared, see [`Geometry`]. Codes of 4 bits and more keep the file's order; those that the
//! file packs tighter than a kernel can unpack are reordered, see [`pack`]. The repack loses nothing but the order of overlay
//! entries, entries that a later one replaces, and which NaN an entry is.
//!
//! Where rows differ in what they hold, records say where it is:
//!
//! - Eight rows with bit widths of their own have a record: where the vectors of the first begin in the code plane, where its
//!   words begin behind all vectors, and the widths, 4 bits each, from which follows where the others' are. A row's words are
//!   its scales and what its codes have besides whole vectors.
//! - With an overlay a record begins with the word where the row's entries begin; they end where those of the next record do.
//!   They lie behind the records, one word each, column in the low half and f16 value in the high one, by row and by column,
//!   and replace what the code plane holds at their places. Room that is kept for more holds [`NO_ENTRY`], so that other rows
//!   can be written over those that are there.
//! - Groups that straddle rows lie as in the file. A record is the number of the row's first code; before all of them stands
//!   how many columns a row has.
//!
//! On the device a matrix takes what it takes in the file, or at most 2 % more (q1t 12 %, as a trit takes two bits), but for
//! some with narrow rows. The widest that take more, in columns: 160 of q4_block and q4_tiled, 256 of q4tp, 224 of vbit if all
//! have 3 bits, 544 of q1t and 1568 of q1s without overlay entries, none of vbit_ro and q1; where columns are no whole units,
//! 355 of q4_block and 1537 of f32, f16, bf16, q8_row and q8_2f.

mod geometry;
mod overlay;
pub mod pack;
mod source;
#[cfg(test)]
mod tests;

pub use geometry::{Amount, Geometry, Measure, SHARED_ROWS};
pub use source::{Origin, Source};

use super::Dtype;
use crate::error::{Result, bail};

/// An overlay entry that changes nothing: its value is a NaN, which no other entry has.
pub const NO_ENTRY: u32 = 0xffff_0000;

/// A family of device layouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Planes {
    /// f32, 128 bytes a unit.
    F32,
    /// f16, 64 bytes a unit.
    F16,
    /// bf16, 64 bytes a unit.
    Bf16,
    /// Signed bytes, an f16 scale a row.
    I8,
    /// Signed bytes, an f16 scale a row and one a column.
    I8Col,
    /// Nibbles, an f16 scale a unit.
    Nib4,
    /// Nibbles, an f16 scale for 32, which need not be of the same row.
    Nib4Flat,
    /// Nibbles, a 5-bit rung a unit on the row's ladder.
    Nib4Ladder,
    /// One bit a weight, an f16 scale a unit.
    Bits1,
    /// The same with an overlay.
    Bits1Overlay,
    /// Two bits a weight, an f16 scale a unit, and an overlay.
    Bits2,
    /// 3, 4, 5, 6 or 8 bits a weight, as the row says, and an f16 scale a unit.
    BitsN,
}

impl Planes {
    /// Every family.
    pub const ALL: [Planes; 12] = [
        Planes::F32,
        Planes::F16,
        Planes::Bf16,
        Planes::I8,
        Planes::I8Col,
        Planes::Nib4,
        Planes::Nib4Flat,
        Planes::Nib4Ladder,
        Planes::Bits1,
        Planes::Bits1Overlay,
        Planes::Bits2,
        Planes::BitsN,
    ];

    /// The family's name in shader variants.
    pub fn name(self) -> &'static str {
        match self {
            Planes::F32 => "f32",
            Planes::F16 => "f16",
            Planes::Bf16 => "bf16",
            Planes::I8 => "i8",
            Planes::I8Col => "i8_col",
            Planes::Nib4 => "nib4",
            Planes::Nib4Flat => "nib4_flat",
            Planes::Nib4Ladder => "nib4_ladder",
            Planes::Bits1 => "bits1",
            Planes::Bits1Overlay => "bits1_overlay",
            Planes::Bits2 => "bits2",
            Planes::BitsN => "bits_n",
        }
    }

    /// The files of `shaders/dtype` that decode it.
    pub fn shaders(self) -> &'static [&'static str] {
        match self {
            Planes::F32 => &["f32", "no_overlay"],
            Planes::F16 => &["f16", "wide16", "no_overlay"],
            Planes::Bf16 => &["bf16", "wide16", "no_overlay"],
            Planes::I8 => &["i8", "i8_codes", "no_overlay"],
            Planes::I8Col => &["i8_col", "i8_codes", "no_overlay"],
            Planes::Nib4 => &["group_words", "nib4_codes", "no_overlay"],
            Planes::Nib4Flat => &["nib4_flat", "no_overlay"],
            Planes::Nib4Ladder => &["nib4_ladder", "nib4_codes", "no_overlay"],
            Planes::Bits1 => &["group", "bits1_codes", "no_overlay"],
            Planes::Bits1Overlay => &["group_overlay", "bits1_codes"],
            Planes::Bits2 => &["group_overlay", "bits2_codes"],
            Planes::BitsN => &["bits_n", "no_overlay"],
        }
    }

    /// Whether its kernels decode halves.
    pub fn has_halves(self) -> bool {
        match self {
            Planes::F16 | Planes::I8 | Planes::I8Col | Planes::Nib4 | Planes::Nib4Flat | Planes::Nib4Ladder => true,
            Planes::Bits1 | Planes::Bits1Overlay | Planes::Bits2 | Planes::BitsN => true,
            Planes::F32 | Planes::Bf16 => false,
        }
    }

    /// Whether it has scales by column, for each of at most three stacked tensors.
    pub fn has_column_scales(self) -> bool {
        self == Planes::I8Col
    }

    /// Whether single weights are replaced by values of their own.
    pub fn has_overlay(self) -> bool {
        matches!(self, Planes::Bits1Overlay | Planes::Bits2)
    }

    /// Whether its rows take different numbers of bytes.
    pub fn varies(self) -> bool {
        self.has_overlay() || matches!(self, Planes::BitsN | Planes::Nib4Flat)
    }

    /// The family that serves `dtype` with rows of `cols`. Errors: `UnsupportedTensorType` for rows that an overlay entry's
    /// 16 bits of column do not reach across.
    pub fn of(dtype: Dtype, cols: usize) -> Result<Planes> {
        Ok(match dtype {
            Dtype::F32 => Planes::F32,
            Dtype::F16 => Planes::F16,
            Dtype::Bf16 => Planes::Bf16,
            Dtype::Q8Row => Planes::I8,
            Dtype::Q82f => Planes::I8Col,
            Dtype::Q4Block if cols.is_multiple_of(32) => Planes::Nib4,
            Dtype::Q4Block => Planes::Nib4Flat,
            Dtype::Q4Tiled => Planes::Nib4,
            Dtype::Q4tp => Planes::Nib4Ladder,
            Dtype::Vbit | Dtype::VbitRo => Planes::BitsN,
            Dtype::Q1 => Planes::Bits1,
            Dtype::Q1s if cols > 1 << 16 => {
                bail!(
                    UnsupportedTensorType,
                    "{} weights run with rows of up to 65536 columns, found {cols}",
                    dtype.name()
                )
            }
            Dtype::Q1s => Planes::Bits1Overlay,
            Dtype::Q1t => Planes::Bits2,
        })
    }

    /// Bytes of a unit's codes; 0 where they vary.
    fn unit_bytes(self) -> usize {
        match self {
            Planes::F32 => 128,
            Planes::F16 | Planes::Bf16 => 64,
            Planes::I8 | Planes::I8Col => 32,
            Planes::Nib4 | Planes::Nib4Ladder => 16,
            Planes::Bits1 | Planes::Bits1Overlay => 4,
            Planes::Bits2 => 8,
            Planes::BitsN | Planes::Nib4Flat => 0,
        }
    }
}

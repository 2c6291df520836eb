//! How a weight lies on the device: planes that a kernel loads as whole vectors, repacked from the file row by row.
//!
//! A row is `units` of 32 columns, padded with zeros. The code plane holds the codes, the scale plane the scales' own bits:
//! per row first, then per column for each stacked tensor. Codes of 4 bits and more keep the file's order; those that the
//! file packs tighter than a kernel can unpack are reordered, see [`pack`]. The repack loses nothing but the order of overlay
//! entries and entries that a later one replaces.
//!
//! Where rows differ in what they hold, a row's record in the scale plane begins with where the rest is: in a word the row's
//! packed codes and their width, or in two words where its overlay entries begin and end. The entries lie behind the records,
//! one word each, column in the low half and f16 value in the high one, by row and by column. They replace what the code
//! plane holds at their places. No record says anything about another row, so that rows can be replaced where there is room.
//!
//! On the device a matrix takes what it takes in the file, or at most 2 % more (q1t 12 %, as a trit takes two bits), unless its
//! rows are narrow: records are whole words, and packed codes whole vectors. The widest rows that take more, in columns:
//! 1537 of f32, f16, bf16, q8_row and q8_2f, where they are no whole units; 160 of q4_block and q4_tiled; 256 of q4tp; 480 of
//! q1; 2656 of q1s and 2144 of q1t, without overlay entries; 1888 of vbit and 1376 of vbit_ro, if all have 3 bits. Only q4_block
//! can have groups that straddle rows: such a matrix becomes f32, whose values are exactly the same.

mod overlay;
pub mod pack;
mod source;
#[cfg(test)]
mod tests;

pub use source::Source;

use super::Dtype;
use crate::error::{Result, bail};

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
    pub const ALL: [Planes; 11] = [
        Planes::F32,
        Planes::F16,
        Planes::Bf16,
        Planes::I8,
        Planes::I8Col,
        Planes::Nib4,
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
            Planes::Nib4 => &["group", "nib4_codes", "no_overlay"],
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
            Planes::F16 | Planes::I8 | Planes::I8Col | Planes::Nib4 | Planes::Nib4Ladder => true,
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

    /// Whether a row's bytes depend on what it holds.
    pub fn varies(self) -> bool {
        self.has_overlay() || self == Planes::BitsN
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
            // Groups that straddle rows have no plane; such matrices are rare and small, and are expanded.
            Dtype::Q4Block => Planes::F32,
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
            Planes::BitsN => 0,
        }
    }
}

/// Sizes of the planes of one matrix, or of one segment of it.
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
    /// What depends on what the rows hold: overlay entries, or vectors of 16 bytes of packed codes; with the room that is
    /// left for more. 0 for other families.
    pub amount: usize,
}

impl Geometry {
    /// Units of 32 columns in a row.
    pub fn units(&self) -> usize {
        self.cols.div_ceil(32)
    }

    /// Bytes of one row of the code plane; 0 where they vary.
    pub fn code_row_bytes(&self) -> usize {
        self.units() * self.planes.unit_bytes()
    }

    /// Bytes of one row's record in the scale plane.
    pub fn scale_row_bytes(&self) -> usize {
        let halves = self.units().next_multiple_of(2) * 2;
        match self.planes {
            Planes::F32 | Planes::F16 | Planes::Bf16 => 0,
            Planes::I8 | Planes::I8Col => 2,
            Planes::Nib4 | Planes::Bits1 => halves,
            Planes::Nib4Ladder => 4 + (self.units() * 5).div_ceil(32) * 4,
            Planes::BitsN => 4 + halves,
            Planes::Bits1Overlay | Planes::Bits2 => 8 + halves,
        }
    }

    /// Bytes of both planes that belong to one row, on average and without its overlay.
    pub fn row_bytes(&self) -> usize {
        let codes = match self.planes {
            Planes::BitsN => self.code_bytes() / self.rows.max(1),
            _ => self.code_row_bytes(),
        };
        codes + self.scale_row_bytes()
    }

    /// Where the column scales of stacked tensor `part` begin in the scale plane.
    pub fn col_scale_offset(&self, part: usize) -> usize {
        (self.rows * self.scale_row_bytes()).next_multiple_of(4) + part * self.units() * 64
    }

    /// Where overlay entries begin in the scale plane.
    pub fn overlay_offset(&self) -> usize {
        self.rows * self.scale_row_bytes()
    }

    /// What the first word of the records counts from: the first overlay entry as a word of the scale plane, or the first
    /// vector of the code plane.
    pub fn first_lead(&self) -> usize {
        match self.planes.has_overlay() {
            true => self.overlay_offset() / 4,
            false => 0,
        }
    }

    /// Bytes of the code plane, whole vectors and never 0.
    pub fn code_bytes(&self) -> usize {
        match self.planes {
            // A row of 3 bits and no columns is none, so there is at least one vector.
            Planes::BitsN => self.amount * 16,
            _ => (self.rows * self.code_row_bytes()).next_multiple_of(16),
        }
    }

    /// Bytes of the scale plane, never 0; a ladder has a spare word, which the last row may look at.
    pub fn scale_bytes(&self) -> usize {
        match self.planes {
            Planes::I8Col => self.col_scale_offset(self.parts),
            Planes::Bits1Overlay | Planes::Bits2 => self.overlay_offset() + self.amount * 4,
            _ => (self.rows * self.scale_row_bytes()).next_multiple_of(4) + self.spare_bytes(),
        }
    }

    fn spare_bytes(&self) -> usize {
        match self.planes {
            Planes::I8Col | Planes::Bits1Overlay | Planes::Bits2 | Planes::BitsN => 0,
            Planes::F32 | Planes::F16 | Planes::Bf16 | Planes::I8 => 4,
            Planes::Nib4 | Planes::Nib4Ladder | Planes::Bits1 => 4,
        }
    }

    /// Bytes of both planes that hold data: what the device reads for one pass over the matrix.
    pub fn data_bytes(&self) -> u64 {
        (self.code_bytes() + self.scale_bytes() - self.spare_bytes()) as u64
    }
}

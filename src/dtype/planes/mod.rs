//! Device layouts of weights: planes that a kernel loads as whole vectors, repacked from the file row by row.
//!
//! A row consists of groups of 32 columns, padded with zeros. The code plane holds the codes; the scale plane holds the
//! file's own scales, as one record per row, followed by data that rows share, see [`Geometry`]. Codes of 4 bits and more keep
//! the file's order. Codes that the file packs too tightly for a kernel are reordered, see [`pack`]. Three things are lost: the
//! order of overlay entries, entries that a later one replaces, and the payloads of NaN entries.
//!
//! Where rows differ in size, their records say where they begin:
//!
//! - Rows with bit widths of their own share a record of three words between eight rows: where the vectors of the first row
//!   begin in the code plane, where its words begin after all vectors, and the eight widths, 4 bits each, from which the
//!   places of the other rows follow. The words of a row are its scales and the parts of its codes that are not whole vectors.
//! - With an overlay, a record begins with the index of the word where the row's entries begin; they end where those of the
//!   next record begin. The entries follow the records, one word each, ordered by row and column: the column in the low half,
//!   an f16 in the high half that replaces the code's value. Spare capacity holds [`NO_ENTRY`], so that the rows of another
//!   tensor can be written over these.
//! - Rows of GGUF blocks have records of their own, see `blocks.rs`. They have the same size in all rows.
//! - Groups that cross rows are stored as in the file. A record is the index of the row's first code. The number of columns
//!   comes before all records.
//!
//! A matrix takes at most 2 % more memory on the device than in the file (q1t 12 %, TQ1_0 and PTQ1_0 24 %, since a base-3 digit
//! takes two bits), unless its rows are narrow. The widest rows that take more, in columns: 160 of q4_block and q4_tiled, 256
//! of q4tp, 224 of vbit if all rows have 3 bits, 544 of q1t and 1568 of q1s without overlay entries, none of vbit_ro and q1;
//! 32 of Q8_0, 96 of Q5_0, 128 of PQ2_0 and PTQ1_0, 160 of Q4_0, IQ4_NL and MXFP4, 256 of IQ4_XS, TQ1_0 and TQ2_0, none of the
//! other types of GGUF; if the columns are not whole groups, 355 of q4_block and 1537 of f32, f16, bf16, q8_row and q8_2f.

mod amount;
pub(super) mod blocks;
mod flat;
mod geometry;
mod layout;
mod overlay;
pub mod pack;
mod source;
#[cfg(test)]
mod tests;
mod widths;

pub use amount::{Amount, Measure, Origin};
pub use geometry::{Geometry, SHARED_ROWS};
pub use layout::Planes;
pub use overlay::NO_ENTRY;
pub(super) use overlay::Overlay;
pub use source::Source;
pub(super) use source::{Contents, Repack};
pub(super) use widths::Widths;

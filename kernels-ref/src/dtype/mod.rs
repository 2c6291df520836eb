//! What the bytes of a tensor mean, one file per element type of the container's section 3.1.

mod layout;

pub mod bf16;
pub mod f16;
pub mod f32;
pub mod q1;
pub mod q1s;
pub mod q1t;
pub mod q4_block;
pub mod q4_tiled;
pub mod q4tp;
pub mod q8_2f;
pub mod q8_row;
pub mod vbit;
pub mod vbit_ro;

/// Why a payload cannot be decoded: a sentence with wanted and found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadPayload(pub String);

/// Decodes single rows of a matrix whose payload was checked when the decoder was made.
pub trait RowDecoder: Send + Sync {
    /// Writes row `row` to `out`, which must hold exactly the matrix's columns.
    fn row(&self, row: usize, out: &mut [f32]);
}

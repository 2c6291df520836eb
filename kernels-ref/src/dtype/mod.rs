//! What the bytes of a tensor mean, one file per element type of the container's section 3.1.

/// Why a payload cannot be decoded: a sentence with wanted and found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadPayload(pub String);

/// Decodes single rows of a matrix whose payload was checked when the decoder was made.
pub trait RowDecoder: Send + Sync {
    /// Writes row `row` to `out`, which must hold exactly the matrix's columns.
    fn row(&self, row: usize, out: &mut [f32]);
}

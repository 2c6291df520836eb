//! Decoders of element types: those of the container (section 3.1 of its specification), one file per family, and the block
//! types of GGUF.
//!
//! A decoder function takes the payload of a `rows` × `cols` matrix and checks the whole structure of the payload first:
//! lengths, bit widths, offsets, overlay entries. Afterwards it decodes single rows without failing.

mod layout;

pub mod float;
pub mod gguf;
pub mod q1;
pub mod q4;
pub mod q8;
pub mod vbit;

/// Why a payload cannot be decoded: expected and found, as a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadPayload(pub String);

/// Decodes single rows of a matrix whose payload has been checked.
pub trait RowDecoder: Send + Sync {
    /// Writes row `row` to `out`, whose length must be the matrix's column count.
    fn row(&self, row: usize, out: &mut [f32]);
}

impl<F: Fn(usize, &mut [f32]) + Send + Sync> RowDecoder for F {
    fn row(&self, row: usize, out: &mut [f32]) {
        self(row, out);
    }
}

/// A decoder, or why the payload is refused.
pub type Decoder<'a> = Result<Box<dyn RowDecoder + 'a>, BadPayload>;

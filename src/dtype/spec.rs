//! The rows of the type table.

use super::payload::{Payload, Section};
use super::planes::{Planes, Repack};
use super::quantise::{Settings, Weights};
use crate::error::Result;
use cmf_kernels_ref::dtype::Decoder;

/// The size of a tensor of some type and shape, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// Exactly this many.
    Exact(u64),
    /// At least this many: the payload holds bit widths or overlays of its own choice.
    AtLeast(u64),
}

/// One row of the type table.
pub struct Spec {
    /// Id in the directory of a container; `None` for types that containers do not have.
    pub id: Option<u8>,
    /// Number in GGUF files; `None` for types that they do not have.
    pub gguf: Option<u32>,
    /// Name in the specification of the container, or of GGUF.
    pub name: &'static str,
    /// Name in conversion options; empty for a type that is read and not offered for writing.
    pub quant: &'static str,
    /// Bits of a code without its scale. Where rows have widths of their own, those of most rows.
    pub code_bits: u8,
    /// The shapes it allows.
    pub shapes: Shapes,
    /// The most columns it can be written with.
    pub max_cols: u64,
    /// What the payload begins with.
    pub sections: &'static [Section],
    /// What follows the sections.
    pub tail: Tail,
    /// The oracle: makes a decoder of the payload of a `rows` × `cols` matrix.
    pub decoder: for<'a> fn(payload: &'a [u8], rows: usize, cols: usize) -> Decoder<'a>,
    /// Writes a payload.
    pub encode: Encode,
    /// The device layout of rows with so many columns. Errors: `UnsupportedTensorType`.
    pub planes: fn(cols: usize) -> Result<Planes>,
    /// How rows become planes.
    pub repack: Repack,
    /// Checks scales of a payload that the decoder accepts, even those that no weight uses. Errors: `NonFinite`.
    pub verify: fn(&Payload) -> Result<()>,
    /// Fills a payload with random weights; `None` where its size depends on the weights.
    pub random: Option<Random>,
}

/// The shapes that a type allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shapes {
    /// Any.
    Any,
    /// Any; groups of 32 run over the flattened tensor and may cross rows.
    FlatGroups,
    /// Matrices.
    Matrix,
    /// Matrices whose rows are whole groups of 32.
    GroupRows,
    /// Any whose rows are whole blocks of so many columns.
    BlockRows(u64),
}

/// Fills a zeroed payload of a `rows` × `cols` matrix with weights of standard deviation `deviation`, more or less. `random`
/// fills bytes with random bits.
pub type Random = fn(payload: &mut [u8], shape: [usize; 2], deviation: f64, random: &dyn Fn(&mut [u8]));

/// An encoder.
#[derive(Clone, Copy)]
pub enum Encode {
    /// Fills a zeroed payload of [`Size::Exact`] bytes.
    Exact(fn(&Weights, &mut [u8]) -> Result<()>),
    /// The type is only read.
    Never,
    /// Makes the payload, whose size depends on the weights or the settings.
    Sized(fn(&Weights, &Settings) -> Result<Vec<u8>>),
}

/// The end of a payload, after its sections.
pub struct Tail {
    /// Its size for `rows` and `cols`. `None` on overflow.
    pub size: fn(rows: u64, cols: u64) -> Option<Size>,
    /// Checks that the payload has the length that its own tables require, without reading codes, scales or overlay values.
    /// Called for payloads of at least [`Size::AtLeast`] bytes. `None`: making a decoder reads nothing else.
    pub check: Option<fn(&Payload) -> Result<()>>,
    /// Appends the tail of the matrix of the rows `keep`, ascending, of a payload that the decoder accepts.
    pub select: fn(&Payload, keep: &[usize], selected: &mut Vec<u8>) -> Result<()>,
    /// Bit widths of the rows, in types that have them.
    #[allow(clippy::type_complexity, reason = "a function from a payload to its bytes")]
    pub widths: Option<for<'a> fn(&Payload<'a>) -> Result<&'a [u8]>>,
    /// The columns of all overlay entries, in types that have them.
    #[allow(clippy::type_complexity, reason = "a function from a payload to columns")]
    pub overlay_cols: Option<fn(&Payload) -> Result<Vec<usize>>>,
}

impl Tail {
    /// No tail.
    pub const NONE: Tail = Tail {
        size: |_, _| Some(Size::Exact(0)),
        check: None,
        select: |_, _, _| Ok(()),
        widths: None,
        overlay_cols: None,
    };
}

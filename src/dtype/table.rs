//! The table of element types, and the functions that read it.

use super::order::Order;
use super::payload::{GROUP, Payload, Section};
use super::planes::{Planes, Source};
use super::quantise::Settings;
use super::spec::{Encode, Shapes, Size, Spec};
use super::{float, gguf, q1, q4, q4tp, q8, vbit};
use crate::error::{Error, Kind, Result, bail};
use cmf_kernels_ref::dtype::RowDecoder;

/// An element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(
    missing_docs,
    non_camel_case_types,
    clippy::upper_case_acronyms,
    reason = "the names are the formats' own; `Dtype::name` spells them"
)]
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
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    TQ1_0,
    TQ2_0,
    MXFP4,
    PQ2_0,
    PTQ1_0,
    U8,
}

/// Every type with its row, in the order of the enum: the container's by id, then GGUF's by number, then that of texts.
static TABLE: &[(Dtype, Spec)] = &[
    (Dtype::F32, float::F32),
    (Dtype::F16, float::F16),
    (Dtype::Bf16, float::BF16),
    (Dtype::Q8Row, q8::Q8_ROW),
    (Dtype::Q4Block, q4::Q4_BLOCK),
    (Dtype::Vbit, vbit::VBIT),
    (Dtype::Q82f, q8::Q8_2F),
    (Dtype::VbitRo, vbit::VBIT_RO),
    (Dtype::Q4Tiled, q4::Q4_TILED),
    (Dtype::Q1, q1::Q1),
    (Dtype::Q1s, q1::Q1S),
    (Dtype::Q1t, q1::Q1T),
    (Dtype::Q4tp, q4tp::Q4TP),
    (Dtype::Q4_0, gguf::Q4_0),
    (Dtype::Q4_1, gguf::Q4_1),
    (Dtype::Q5_0, gguf::Q5_0),
    (Dtype::Q5_1, gguf::Q5_1),
    (Dtype::Q8_0, gguf::Q8_0),
    (Dtype::Q2_K, gguf::Q2_K),
    (Dtype::Q3_K, gguf::Q3_K),
    (Dtype::Q4_K, gguf::Q4_K),
    (Dtype::Q5_K, gguf::Q5_K),
    (Dtype::Q6_K, gguf::Q6_K),
    (Dtype::IQ4_NL, gguf::IQ4_NL),
    (Dtype::IQ4_XS, gguf::IQ4_XS),
    (Dtype::TQ1_0, gguf::TQ1_0),
    (Dtype::TQ2_0, gguf::TQ2_0),
    (Dtype::MXFP4, gguf::MXFP4),
    (Dtype::PQ2_0, gguf::PQ2_0),
    (Dtype::PTQ1_0, gguf::PTQ1_0),
    (Dtype::U8, float::U8),
];

impl Dtype {
    /// Every type of weights: all but [`Dtype::U8`].
    pub fn all() -> impl Iterator<Item = Dtype> {
        let types = TABLE.iter().map(|(dtype, _)| *dtype);
        types.filter(|dtype| *dtype != Dtype::U8)
    }

    pub(super) fn spec(self) -> &'static Spec {
        // A test checks that the table is in declaration order.
        &TABLE[self as usize].1
    }

    fn find(matches: impl Fn(&Spec) -> bool) -> Option<Dtype> {
        TABLE.iter().find(|(_, spec)| matches(spec)).map(|(dtype, _)| *dtype)
    }

    /// The type of a directory record, or `None` for reserved and unknown ids.
    pub fn from_id(id: u8) -> Option<Dtype> {
        Dtype::find(|spec| spec.id == Some(id))
    }

    /// The type with this number in GGUF files, or `None` for types that are not read.
    pub fn from_gguf(number: u32) -> Option<Dtype> {
        Dtype::find(|spec| spec.gguf == Some(number))
    }

    /// The type with this name in conversion options.
    pub fn from_quant_name(name: &str) -> Option<Dtype> {
        Dtype::find(|spec| !spec.quant.is_empty() && spec.quant == name)
    }

    /// The id in the directory of a container; `None` for types that containers do not have.
    pub fn id(self) -> Option<u8> {
        self.spec().id
    }

    /// The number in GGUF files; `None` for types that they do not have.
    pub fn gguf(self) -> Option<u32> {
        self.spec().gguf
    }

    /// Whether weights can be encoded in this type; others are only read.
    pub fn has_encoder(self) -> bool {
        !matches!(self.spec().encode, Encode::Never)
    }

    /// The specification's name.
    pub fn name(self) -> &'static str {
        self.spec().name
    }

    /// The name in conversion options, empty for a type that is read and not offered for writing.
    pub fn quant_name(self) -> &'static str {
        self.spec().quant
    }

    /// Bits of a code without its scale. Where rows have widths of their own, those of most rows.
    pub fn code_bits(self) -> u8 {
        self.spec().code_bits
    }

    /// The number of columns of a row is a multiple of this.
    pub fn row_multiple(self) -> usize {
        match self.spec().shapes {
            Shapes::Any | Shapes::FlatGroups | Shapes::Matrix => 1,
            Shapes::GroupRows => 32,
            Shapes::BlockRows(weights) => weights as usize,
        }
    }

    /// Bytes of a row of `cols` columns, in types whose rows have the same size and follow each other. `None` for other types,
    /// and on overflow.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        let spec = self.spec();
        match (spec.sections, (spec.tail.size)(1, cols as u64), spec.shapes) {
            (_, _, Shapes::FlatGroups) => None,
            ([section], Some(Size::Exact(0)), _) => usize::try_from(section.row_bytes(cols as u64)?).ok(),
            _ => None,
        }
    }

    /// Whether every row has a bit width of its own.
    pub fn has_row_widths(self) -> bool {
        self.spec().tail.widths.is_some()
    }

    /// Bytes of a tensor of `shape`. Errors: `Parse` when the type does not allow the shape, `Bounds` on overflow.
    pub fn size(self, shape: &[u64]) -> Result<Size> {
        let spec = self.spec();
        let overflow = || Error::new(Kind::Bounds, format!("element count of shape {shape:?} overflows"));
        let n = shape
            .iter()
            .try_fold(1u64, |n, &d| n.checked_mul(d))
            .ok_or_else(overflow)?;
        let Some(&cols) = shape.last().filter(|_| n != 0) else {
            bail!(Parse, "{} tensor of shape {shape:?} has no elements", spec.name);
        };
        if matches!(spec.shapes, Shapes::Matrix | Shapes::GroupRows) && shape.len() != 2 {
            bail!(Parse, "{} needs a matrix, found shape {shape:?}", spec.name);
        }
        let (what, multiple) = match spec.shapes {
            Shapes::GroupRows => ("groups", 32),
            Shapes::BlockRows(weights) => ("blocks", weights),
            _ => ("", 1),
        };
        if !cols.is_multiple_of(multiple) {
            bail!(
                Parse,
                "{} needs rows of whole {what} of {multiple}, found {cols} columns",
                spec.name
            );
        }
        // The last dimension is the row; the product of the others is the number of rows.
        let (rows, cols) = match spec.shapes {
            Shapes::FlatGroups => (1, n),
            _ => (n / cols, cols),
        };
        let sum = || {
            let (tail, exact) = match (spec.tail.size)(rows, cols)? {
                Size::Exact(bytes) => (bytes, true),
                Size::AtLeast(bytes) => (bytes, false),
            };
            let mut sections = spec.sections.iter();
            let bytes = sections.try_fold(tail, |sum, section| {
                sum.checked_add(rows.checked_mul(section.row_bytes(cols)?)?)
            })?;
            Some(if exact {
                Size::Exact(bytes)
            } else {
                Size::AtLeast(bytes)
            })
        };
        sum().ok_or_else(overflow)
    }

    /// Checks the length of the payload of a tensor of `shape`. Reads the tables that the length depends on, never codes,
    /// scales or overlay values.
    ///
    /// Errors: `Parse` for a shape the type does not allow, a wrong length, widths, offsets or counts that do not fit;
    /// `Bounds` when the element count overflows.
    pub fn check_length(self, shape: &[u64], payload: &[u8]) -> Result<()> {
        let found = payload.len() as u64;
        match self.size(shape)? {
            Size::Exact(wanted) if found != wanted => bail!(
                Parse,
                "{} of shape {shape:?}: expected {wanted} bytes, found {found}",
                self.name()
            ),
            Size::AtLeast(least) if found < least => bail!(
                Parse,
                "{} of shape {shape:?}: expected at least {least} bytes, found {found}",
                self.name()
            ),
            Size::Exact(_) => Ok(()),
            Size::AtLeast(_) => {
                let (rows, cols) = (shape[0] as usize, shape[1] as usize);
                match self.spec().tail.check {
                    Some(check) => check(&self.payload(payload, rows, cols)),
                    None => self.decoder(payload, rows, cols).map(drop),
                }
            }
        }
    }

    /// The weights and the bytes of a block, in types whose rows are blocks one after another and nothing else.
    pub fn block(self) -> Option<(usize, usize)> {
        let spec = self.spec();
        let plain = spec.shapes != Shapes::FlatGroups && (spec.tail.size)(1, 32) == Some(Size::Exact(0));
        match *spec.sections {
            [Section::Weights(bytes)] if plain => Some((1, bytes as usize)),
            [Section::Groups(bytes)] if plain => Some((GROUP, bytes as usize)),
            [Section::Blocks { weights, bytes }] if plain => Some((weights as usize, bytes as usize)),
            _ => None,
        }
    }

    fn payload(self, bytes: &[u8], rows: usize, cols: usize) -> Payload<'_> {
        Payload {
            bytes,
            rows,
            cols,
            sections: self.spec().sections,
        }
    }

    /// A decoder of single rows of `payload`, a `rows` × `cols` matrix. Checks the whole structure of the payload first.
    ///
    /// Errors: `Parse` for lengths, bit widths, offsets or overlay entries that do not fit.
    pub fn decoder<'a>(self, payload: &'a [u8], rows: usize, cols: usize) -> Result<Box<dyn RowDecoder + 'a>> {
        (self.spec().decoder)(payload, rows, cols)
            .map_err(|bad| Error::new(Kind::Parse, format!("{} payload: {}", self.name(), bad.0)))
    }

    /// Checks scales of a payload that [`Dtype::decoder`] accepts, even those that no weight uses.
    ///
    /// Errors: `NonFinite` for scales that are not finite numbers.
    pub fn verify_scales(self, payload: &[u8], rows: usize, cols: usize) -> Result<()> {
        (self.spec().verify)(&self.payload(payload, rows, cols))
    }

    /// Whether a group of one scale can reach from one row of `cols` columns into the next.
    pub fn rows_share_groups(self, cols: usize) -> bool {
        self.spec().shapes == Shapes::FlatGroups && !cols.is_multiple_of(32)
    }

    /// The payload of the rows `keep`, ascending, of a `rows` × `cols` payload: the same codes, scales and overlay values.
    ///
    /// Errors: `Bounds` for a row that does not exist; `Parse` for a payload that the decoder refuses;
    /// `UnsupportedTensorType` where rows share groups.
    pub fn select_rows(self, payload: &[u8], rows: usize, cols: usize, keep: &[usize]) -> Result<Vec<u8>> {
        if let Some(row) = keep.iter().find(|&&row| row >= rows) {
            bail!(Bounds, "row {row}, the matrix has {rows}");
        }
        if keep.windows(2).any(|pair| pair[0] >= pair[1]) {
            bail!(Bounds, "rows are selected in ascending order");
        }
        if self.rows_share_groups(cols) {
            bail!(
                UnsupportedTensorType,
                "rows of {} with {cols} columns share groups and cannot be selected",
                self.name()
            );
        }
        self.decoder(payload, rows, cols)?;
        let payload = self.payload(payload, rows, cols);
        let mut selected = Vec::new();
        payload.select_sections(keep, &mut selected)?;
        (self.spec().tail.select)(&payload, keep, &mut selected)?;
        Ok(selected)
    }

    /// Settings under which the columns `keep`, ascending, of a payload that [`Dtype::decoder`] accepts are encoded much as
    /// they are in it: with the same bit widths, if `to` has such, and the same share of outliers.
    ///
    /// Errors: `Bounds` for a payload that is too short.
    pub fn settings_of<'a>(
        self,
        payload: &'a [u8],
        (rows, cols): (usize, usize),
        keep: &[usize],
        to: Dtype,
    ) -> Result<Settings<'a>> {
        let tail = &self.spec().tail;
        let payload = self.payload(payload, rows, cols);
        let mut settings = Settings::default();
        if let Some(widths) = tail.widths.filter(|_| to.has_row_widths()) {
            settings.widths = Some(widths(&payload)?);
        }
        if let Some(overlay_cols) = tail.overlay_cols {
            let kept = overlay_cols(&payload)?
                .iter()
                .filter(|&col| keep.binary_search(col).is_ok())
                .count();
            // Entries may come twice.
            settings.outliers = (kept as f64 / (rows * keep.len()).max(1) as f64).min(1.0);
        }
        Ok(settings)
    }

    /// Fills a zeroed payload of a `rows` × `cols` matrix with random weights of about this standard deviation; `random`
    /// fills bytes with random bits. `false`: nothing is done, because the size of this type's payloads depends on the weights.
    pub fn fill_random(
        self,
        payload: &mut [u8],
        shape: [usize; 2],
        deviation: f64,
        random: &dyn Fn(&mut [u8]),
    ) -> bool {
        let fill = self.spec().random;
        if let Some(fill) = fill {
            fill(payload, shape, deviation, random);
        }
        fill.is_some()
    }
}

impl Planes {
    /// The device layout of `dtype` with rows of `cols` columns. Errors: `UnsupportedTensorType` for rows of more columns than
    /// the layout can number.
    pub fn of(dtype: Dtype, cols: usize) -> Result<Planes> {
        (dtype.spec().planes)(cols)
    }
}

impl<'a> Source<'a> {
    /// A `rows` × `cols` matrix of `dtype`. Reads the tables of the payload, where rows differ in size.
    ///
    /// Errors: those of [`Planes::of`]; `Parse` and `Bounds` for widths, offsets and overlays that do not fit.
    pub fn open(dtype: Dtype, payload: &'a [u8], rows: usize, cols: usize) -> Result<Source<'a>> {
        let planes = Planes::of(dtype, cols)?;
        Source::new(planes, &dtype.spec().repack, dtype.payload(payload, rows, cols))
    }

    /// As [`Source::open`], for a payload that has rows and columns in another order.
    ///
    /// Errors: also `UnsupportedTensorType` for types whose rows cannot be reordered, and heads that are not whole blocks.
    pub fn open_ordered(
        dtype: Dtype,
        payload: &'a [u8],
        (rows, cols): (usize, usize),
        order: Order,
    ) -> Result<Source<'a>> {
        Source::open(dtype, payload, rows, cols)?.ordered(order, dtype.block())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_declaration_order_and_unambiguous() {
        for (i, dtype) in Dtype::all().enumerate() {
            assert_eq!(dtype as usize, i);
            assert!(dtype.id().is_some() || dtype.gguf().is_some());
            assert!(dtype.id().is_none_or(|id| Dtype::from_id(id) == Some(dtype)));
            assert!(
                dtype
                    .gguf()
                    .is_none_or(|number| Dtype::from_gguf(number) == Some(dtype))
            );
            if !dtype.quant_name().is_empty() {
                assert_eq!(Dtype::from_quant_name(dtype.quant_name()), Some(dtype));
            }
        }
        assert_eq!(Dtype::from_id(6), Some(Dtype::U8));
        assert_eq!([5, 7, 16, 255].map(Dtype::from_id), [None; 4]);
    }
}

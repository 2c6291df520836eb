//! Quantised matrices whose values are written as they are: in a type of the container that holds the same codes and scales.

use super::options::{Event, Options};
use crate::dtype::Dtype;
use crate::dtype::exact::Codes;
use crate::error::{Result, bail};
use crate::import::{Reader, Tensor};
use rayon::prelude::*;
use std::ops::ControlFlow;

/// Columns with one scale.
const GROUP: usize = 32;

/// Bytes of 32 weights of q1t and of q4_tiled, and of an entry of the overlay of q1t.
const TRITS: usize = 9;
const TILE: usize = 18;
const ENTRY: usize = 4;

/// How a tensor keeps its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kept {
    /// The type.
    pub dtype: Dtype,
    /// How its payload is made.
    way: Way,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// It is the container's type already: the payload is copied.
    Copied,
    /// The codes are written, in rows of this width if the type has widths.
    Codes(u8),
}

impl Kept {
    /// Whether codes are written, instead of a payload that is copied.
    pub fn writes_codes(self) -> bool {
        matches!(self.way, Way::Codes(_))
    }
}

/// What the codes of a matrix are.
#[derive(Clone, Copy)]
struct Survey {
    least: i16,
    /// Codes other than −1, 0 and 1.
    large: usize,
    /// Whether f16 holds the values of all of these.
    overlay: bool,
}

/// How each tensor keeps its values; `None` for those that are encoded. Reads the matrices whose codes decide.
///
/// Errors: those of reading; `NonFinite` for a scale that is not a finite number; `Interrupted` if `progress` ends it.
pub(super) fn kept(
    tensors: &[Tensor],
    options: &Options,
    progress: &mut dyn FnMut(Event) -> ControlFlow<()>,
) -> Result<Vec<Option<Kept>>> {
    let mut all = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let free = options.quant.is_none() && options.overridden(&tensor.name).is_none();
        let is_text = tensor.data.dtype().ok() == Some(Dtype::U8);
        let kept = match free && tensor.data.shape.len() > 1 {
            _ if is_text => Some(Kept {
                dtype: Dtype::U8,
                way: Way::Copied,
            }),
            true => of(tensor).map_err(|err| err.context(format!("tensor '{}'", tensor.name)))?,
            false => None,
        };
        all.push(kept);
        let event = Event::Tensor {
            done: 0,
            total: tensors.len(),
            name: &tensor.name,
        };
        if kept.is_some() && progress(event).is_break() {
            bail!(Interrupted, "the conversion was cancelled");
        }
    }
    Ok(all)
}

/// How a matrix keeps its values.
fn of(tensor: &Tensor) -> Result<Option<Kept>> {
    let Some(dtype) = tensor.data.quantised() else {
        return Ok(None);
    };
    if tensor.data.is_contained() {
        let way = Way::Copied;
        return Ok(Some(Kept { dtype, way }));
    }
    let matrix = tensor.data.shape.len() == 2;
    let (_, cols) = tensor.data.rows_cols();
    if !cols.is_multiple_of(GROUP) {
        return Ok(None);
    }
    let Some(survey) = survey(tensor)? else {
        return Ok(None);
    };
    let codes = |dtype, bits| {
        let way = Way::Codes(bits);
        Some(Kept { dtype, way })
    };
    let four_bits = codes(if matrix { Dtype::Q4Tiled } else { Dtype::Q4Block }, 0);
    Ok(match dtype {
        Dtype::Q4_0 => four_bits,
        // The lowest of its codes, −16, does not fit 5 bits, whose codes are −15 to 16.
        Dtype::Q5_0 if matrix => codes(Dtype::VbitRo, 6),
        Dtype::Q8_0 if matrix && survey.least > -128 => codes(Dtype::VbitRo, 8),
        Dtype::TQ1_0 | Dtype::TQ2_0 | Dtype::PQ2_0 | Dtype::PTQ1_0 => {
            let groups: usize = tensor.data.shape.iter().product::<u64>() as usize / GROUP;
            let small = survey.large.saturating_mul(ENTRY) <= groups * (TILE - TRITS);
            match matrix && survey.overlay && small && cols <= 1 << 16 {
                true => codes(Dtype::Q1t, 0),
                false => four_bits,
            }
        }
        _ => None,
    })
}

/// What the codes are; `None` if 32 neighbouring columns do not share a scale, or if the type has no such scales.
fn survey(tensor: &Tensor) -> Result<Option<Survey>> {
    let Some(scales) = tensor.data.scales()? else {
        return Ok(None);
    };
    let values = tensor.data.reader()?;
    let (rows, cols) = tensor.data.rows_cols();
    let found = (0..rows).into_par_iter().map(|row| {
        let Some(groups) = groups(&values, &scales, row, cols)? else {
            return Ok(None);
        };
        let mut survey = Survey::NONE;
        for group in groups {
            for code in group.codes {
                survey.least = survey.least.min(code);
                let large = !(-1..=1).contains(&code);
                survey.large += usize::from(large);
                survey.overlay &= !large || (f32::from(code) * group.scale.to_f32()).abs() <= half::f16::MAX.to_f32();
            }
        }
        Ok(Some(survey))
    });
    found.try_reduce(
        || Some(Survey::NONE),
        |a, b| {
            let (Some(a), Some(b)) = (a, b) else {
                return Ok(None);
            };
            Ok(Some(Survey {
                least: a.least.min(b.least),
                large: a.large + b.large,
                overlay: a.overlay && b.overlay,
            }))
        },
    )
}

impl Survey {
    const NONE: Survey = Survey {
        least: 0,
        large: 0,
        overlay: true,
    };
}

/// The codes of a row; `None` if 32 neighbouring columns do not share a scale.
fn groups(values: &Reader, scales: &Reader, row: usize, cols: usize) -> Result<Option<Vec<Codes>>> {
    let mut read = [vec![0.0; cols], vec![0.0; cols]];
    let [weights, factors] = &mut read;
    values(row, weights)?;
    scales(row, factors)?;
    if let Some(col) = factors.iter().position(|scale| !scale.is_finite()) {
        bail!(NonFinite, "row {row}, column {col}: the scale is {}", factors[col]);
    }
    let (weights, factors) = (weights.as_chunks::<GROUP>().0, factors.as_chunks::<GROUP>().0);
    Ok(weights
        .iter()
        .zip(factors)
        .map(|(weights, factors)| Codes::of(weights, factors))
        .collect())
}

/// The payload of a tensor that keeps its values; `None` if it is to be copied from a container.
///
/// Errors: those of reading; `Internal` if the payload does not hold the same values.
pub(super) fn payload(tensor: &Tensor, kept: Kept) -> Result<Option<Vec<u8>>> {
    let Way::Codes(bits) = kept.way else {
        return Ok(None);
    };
    let Some(scales) = tensor.data.scales()? else {
        bail!(Internal, "a tensor without block scales");
    };
    let values = tensor.data.reader()?;
    let (rows, cols) = tensor.data.rows_cols();
    let row = |row: usize| match groups(&values, &scales, row, cols)? {
        Some(groups) => Ok(groups),
        None => bail!(Internal, "row {row} has changed since it was read first"),
    };
    let payload = kept.dtype.encode_codes(bits, rows, &row)?;
    check(kept.dtype, &payload, (rows, cols), &values)?;
    Ok(Some(payload))
}

/// Errors: `Internal` if the payload does not hold these values, bit for bit.
fn check(dtype: Dtype, payload: &[u8], (rows, cols): (usize, usize), values: &Reader) -> Result<()> {
    let decoder = dtype.decoder(payload, rows, cols)?;
    (0..rows).into_par_iter().try_for_each(|row| {
        let (mut wanted, mut found) = (vec![0f32; cols], vec![0f32; cols]);
        values(row, &mut wanted)?;
        decoder.row(row, &mut found);
        let differs = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits();
        match wanted.iter().zip(&found).position(differs) {
            None => Ok(()),
            Some(col) => bail!(
                Internal,
                "row {row}, column {col}: {} of the source is {} as {}",
                wanted[col],
                found[col],
                dtype.name()
            ),
        }
    })
}

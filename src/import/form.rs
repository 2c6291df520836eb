//! The form in which a file holds a tensor: the order of its rows and columns, and a function of its values.

use crate::dtype::{Order, RowOrder};
use crate::error::{Result, bail};

/// The form of a tensor in a file.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Form {
    /// Where the file has the rows and columns. Of a vector, the order of rows is that of its elements.
    pub order: Order,
    /// The function of the values.
    pub applied: Applied,
}

/// The function that a file has applied to every value.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Applied {
    /// None.
    #[default]
    Identity,
    /// v + this.
    Plus(f32),
    /// -exp(v), computed in f64 and rounded.
    NegativeExponential,
}

impl Form {
    /// Errors: `UnsupportedModel` when the rows or columns of a tensor of this shape are not the heads of the order.
    pub fn check(&self, shape: &[u64]) -> Result<()> {
        let rows = shape.first().copied().unwrap_or(0);
        match self.order.rows {
            RowOrder::Same => {}
            RowOrder::Interleaved(head) => {
                if head == 0 || !head.is_multiple_of(2) || !rows.is_multiple_of(head as u64) {
                    bail!(UnsupportedModel, "{rows} rows are not whole heads of {head}");
                }
            }
            RowOrder::Tiled(heads) => heads.check(rows)?,
        }
        match self.order.cols {
            Some(heads) => heads.check(shape.last().copied().unwrap_or(0)),
            None => Ok(()),
        }
    }
}

impl Applied {
    /// The value whose function is `stored`. Errors: `Parse` when there is none.
    pub fn undo(self, stored: f32) -> Result<f32> {
        match self {
            Applied::Identity => Ok(stored),
            Applied::Plus(excess) => Ok(stored - excess),
            Applied::NegativeExponential if stored < 0.0 => Ok(logarithm(stored)),
            Applied::NegativeExponential => bail!(Parse, "decay rate {stored}, expected a number below 0"),
        }
    }

    /// The function of a value.
    pub fn apply(self, value: f32) -> f32 {
        match self {
            Applied::Identity => value,
            Applied::Plus(excess) => value + excess,
            Applied::NegativeExponential => -f64::from(value).exp() as f32,
        }
    }
}

/// The logarithm of -`stored`: a bf16 if there is one whose function is exactly `stored`, because that is the type in which
/// networks are published; else the nearest f32.
fn logarithm(stored: f32) -> f32 {
    let nearest = (-f64::from(stored)).ln() as f32;
    let short = half::bf16::from_f32(nearest).to_f32();
    match Applied::NegativeExponential.apply(short) == stored {
        true => short,
        false => nearest,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decay_rates_of_published_precision_come_back_exactly() {
        for bits in (0..=u16::MAX).map(half::bf16::from_bits).map(half::bf16::to_f32) {
            let rate = Applied::NegativeExponential.apply(bits);
            // Beyond these, many logarithms have one rate.
            if (0.01..80.0).contains(&bits.abs()) {
                assert_eq!(Applied::NegativeExponential.undo(rate).unwrap(), bits);
            }
        }
        for rate in [0.0, -0.0, 1.0, f32::NAN, f32::INFINITY] {
            let err = Applied::NegativeExponential.undo(rate).unwrap_err();
            assert!(err.message.contains("below 0"), "{err}");
        }
    }

    #[test]
    fn every_rate_has_a_logarithm_that_leads_back_to_it_or_to_its_neighbour() {
        for step in 0..4000u16 {
            let rate = -1.5f32.powi(i32::from(step % 40) - 20) * (1.0 + f32::from(step) * 1.3e-4);
            let again = Applied::NegativeExponential.apply(Applied::NegativeExponential.undo(rate).unwrap());
            assert!(rate.to_bits().abs_diff(again.to_bits()) <= 8, "{rate} {again}");
        }
    }
}

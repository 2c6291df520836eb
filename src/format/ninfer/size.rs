//! The sizes that layouts give to a shape.

use super::format::{Coding, Format, fp8_scales_at, nvfp4_scales_at};
use super::row_split::RowSplit;
use crate::error::{Error, Kind, Result, bail};

impl Format {
    /// Bytes of a tensor of `shape`. Errors: `Parse` for a shape that the layout does not take, `Bounds` on overflow.
    pub fn size(self, shape: &[u64]) -> Result<u64> {
        if let Coding::Words(bytes) = self.coding() {
            if shape.len() > 16 {
                bail!(Parse, "{} dimensions, expected at most 16", shape.len());
            }
            let size = shape.iter().try_fold(bytes, |size, &dim| size.checked_mul(dim));
            return size.ok_or_else(|| overflow(shape));
        }
        let (rows, cols) = self.matrix(shape)?;
        let size = match self.coding() {
            Coding::Groups { .. } => RowSplit::new(self, rows, cols).map(|planes| planes.bytes),
            Coding::Nvfp4 => {
                nvfp4_scales_at(rows, cols).and_then(|at| at.checked_add(rows * cols / 16)?.checked_add(4))
            }
            Coding::Fp8Row => fp8_scales_at(rows, cols).and_then(|at| at.checked_add(rows.checked_mul(2)?)),
            Coding::Words(_) => None,
        };
        size.ok_or_else(|| overflow(shape))
    }

    /// Rows and columns of a matrix in this format. Errors: `Parse`.
    fn matrix(self, shape: &[u64]) -> Result<(u64, u64)> {
        let &[rows, cols] = shape else {
            bail!(Parse, "shape {shape:?}: layout {} takes matrices", self.layout());
        };
        if matches!(self, Format::Nvfp4) && !(rows.is_multiple_of(128) && cols.is_multiple_of(64)) {
            bail!(
                Parse,
                "shape {shape:?}: layout {} takes multiples of [128, 64]",
                self.layout()
            );
        }
        Ok((rows, cols))
    }
}

fn overflow(shape: &[u64]) -> Error {
    Error::new(Kind::Bounds, format!("the size of shape {shape:?} overflows"))
}

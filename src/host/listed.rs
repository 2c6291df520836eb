//! Products of a chunk of which a task mask leaves something out.

use super::linear::{activation, halves, whole_vectors};
use super::masked::List;
use super::{Bound, part};
use crate::error::{Result, bail};
use crate::kernel;

impl Bound<'_> {
    /// Σ w[r][k] · x[c][k] over the units that a list names, for weights in binding 0 and x in binding 2: `[n, rows]`.
    fn chunk_products(&self, rows: u32, units: u32, n: usize, list: &List) -> Result<Vec<f64>> {
        let stride = units as usize * 32;
        let x = part(self.floats(2)?, 0, n * stride, "x")?;
        let mut some = vec![0.0; x.len()];
        for column in (0..n).map(|c| c * stride) {
            for at in list.units.iter().map(|unit| column + unit * 32) {
                some[at..at + 32].copy_from_slice(&x[at..at + 32]);
            }
        }
        self.products_of(rows, units, &some, n)
    }

    pub(super) fn matmul_some(&mut self, p: &kernel::Matmul) -> Result<()> {
        let n = self.ctl(1)?.columns as usize;
        let list = self.list(3, p.rows.div_ceil(4), p.units)?;
        let bias = self.bias(4, p.has_bias, p.row0, p.rows)?;
        let products = self.chunk_products(p.rows, p.units, n, &list)?;
        for (c, products) in products.chunks(p.rows.max(1) as usize).enumerate() {
            let mut column = vec![0.0; products.len()];
            for row in list
                .blocks
                .iter()
                .flat_map(|block| block * 4..products.len().min(block * 4 + 4))
            {
                column[row] = products[row] + bias[row];
            }
            whole_vectors(&mut column);
            self.store(5, c * p.y_stride as usize * 4 + p.row0 as usize, &column)?;
        }
        Ok(())
    }

    pub(super) fn matmul_add_some(&mut self, p: &kernel::Matmul) -> Result<()> {
        let n = self.ctl(1)?.columns as usize;
        let list = self.list(3, p.rows.div_ceil(4), p.units)?;
        let bias = self.bias(4, p.has_bias, p.row0, p.rows)?;
        let products = self.chunk_products(p.rows, p.units, n, &list)?;
        for (c, products) in products.chunks(p.rows.max(1) as usize).enumerate() {
            let at = c * p.y_stride as usize * 4 + p.row0 as usize;
            let h = part(self.floats(5)?, at, products.len(), "h")?;
            let sums = products.iter().zip(&bias).zip(h);
            let column: Vec<f64> = sums.map(|((y, bias), &h)| f64::from(h) + y + bias).collect();
            self.store(5, at, &column)?;
        }
        Ok(())
    }

    pub(super) fn matmul_glu_some(&mut self, p: &kernel::MatmulGlu) -> Result<()> {
        let n = self.ctl(1)?.columns as usize;
        let list = self.list(3, p.part1.div_ceil(4), p.units)?;
        let gate_bias = self.bias(4, p.has_bias, p.row0, p.part1)?;
        let up_bias = self.bias(4, p.has_bias, p.bias_up + p.row0, p.part1)?;
        if list.units.len() != p.units as usize {
            bail!(
                Usage,
                "a list names {} of {} units of gate and up",
                list.units.len(),
                p.units
            );
        }
        let products = self.chunk_products(p.rows, p.units, n, &list)?;
        for (c, products) in products.chunks(p.rows.max(1) as usize).enumerate() {
            let (gate, up) = halves(products, p.rows, p.part1)?;
            for block in &list.blocks {
                let outputs = block * 4..gate.len().min(block * 4 + 4);
                let at = c * p.y_stride as usize * 4 + p.row0 as usize + outputs.start;
                let unit = |r: usize| activation(p.gelu, gate[r] + gate_bias[r]) * (up[r] + up_bias[r]);
                let mut y: Vec<f64> = outputs.map(unit).collect();
                whole_vectors(&mut y);
                self.store(5, at, &y)?;
            }
        }
        Ok(())
    }
}

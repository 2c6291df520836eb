//! Products of weights and activations: rows are decoded from the file's payloads, sums are the reference crate's.

use super::{Bound, part, prepared};
use crate::dtype::RowDecoder;
use crate::error::{Result, bail};
use crate::kernel;
use crate::program::Bind;
use cmf_kernels_ref::op::glu::{gelu_tanh, silu};
use cmf_kernels_ref::op::linear::linear;

/// The stored rows of a segment, whichever tensors they come from.
pub(super) struct Rows<'a> {
    pub cols: usize,
    runs: Vec<Run<'a>>,
}

struct Run<'a> {
    /// First stored row.
    first: usize,
    /// First row of the tensor.
    from: usize,
    decoder: Box<dyn RowDecoder + 'a>,
}

impl RowDecoder for Rows<'_> {
    fn row(&self, row: usize, out: &mut [f32]) {
        // Runs lie in order and the first begins at row 0.
        let after = self.runs.partition_point(|run| run.first <= row);
        let run = &self.runs[after - 1];
        run.decoder.row(run.from + row - run.first, out);
    }
}

impl Bound<'_> {
    /// The first `rows` rows of the weight that is binding number `i`.
    pub(super) fn rows(&self, i: usize, rows: u32) -> Result<Rows<'_>> {
        let Some(&Bind::Weight(matrix, segment)) = self.step.bindings.get(i) else {
            bail!(Usage, "binding {i} is no weight")
        };
        let matrix = &part(&self.plan.matrices, matrix, 1, "matrices")?[0];
        let segment = &part(&matrix.segments, segment, 1, "segments")?[0];
        let mut first = 0;
        let mut runs = Vec::new();
        for run in &segment.runs {
            let id = part(&matrix.parts, run.part, 1, "parts")?[0];
            let info = &part(self.tensors.infos(), id, 1, "tensors")?[0];
            let (tensor_rows, cols) = info.rows_cols();
            if cols != matrix.cols || run.rows.end > tensor_rows {
                bail!(Usage, "tensor '{}' is not what the plan stacked", info.name);
            }
            runs.push(Run {
                first,
                from: run.rows.start,
                decoder: info.dtype.decoder(self.tensors.bytes(id)?, tensor_rows, cols)?,
            });
            first += run.rows.len();
        }
        if rows as usize > first || runs.is_empty() {
            bail!(Usage, "{rows} rows of a segment of {first}");
        }
        Ok(Rows {
            cols: matrix.cols,
            runs,
        })
    }

    /// Σ_k w[r][k] · x[c][k] for weights in binding 0 and activations in binding `x`: `[n, rows]`.
    fn products(&self, rows: u32, units: u32, x: usize, n: usize) -> Result<Vec<f64>> {
        let x = part(self.floats(x)?, 0, n * units as usize * 32, "x")?;
        self.products_of(rows, units, x, n)
    }

    /// The same with these activations.
    pub(super) fn products_of(&self, rows: u32, units: u32, x: &[f32], n: usize) -> Result<Vec<f64>> {
        let weights = self.rows(0, rows)?;
        let stride = units as usize * 32;
        if stride < weights.cols || x.len() < n * stride {
            bail!(Usage, "{units} units for {} columns", weights.cols);
        }
        let mut y = vec![0.0; n * rows as usize];
        linear(&weights, 0..rows as usize, weights.cols, x, stride, n, &mut y);
        Ok(y)
    }

    /// 1/√(mean + eps) from the sums of squares of column `c` in binding `i`.
    pub(super) fn norm_scale(&self, i: usize, c: usize, square_vectors: u32, inv_cols: f32, eps: f32) -> Result<f64> {
        let sums = square_vectors as usize * 4;
        let squares = part(self.floats(i)?, c * sums.next_multiple_of(32), sums, "squares")?;
        let sum: f64 = squares.iter().map(|&v| f64::from(v)).sum();
        Ok(1.0 / (sum * f64::from(inv_cols) + f64::from(eps)).sqrt())
    }

    /// `rows` biases from `at` in binding `i`; zeros without them.
    pub(super) fn bias(&self, i: usize, has_bias: u32, at: u32, rows: u32) -> Result<Vec<f64>> {
        if has_bias == 0 {
            return Ok(vec![0.0; rows as usize]);
        }
        let bias = part(self.floats(i)?, at as usize, rows as usize, "bias")?;
        Ok(bias.iter().map(|&v| f64::from(v)).collect())
    }

    pub(super) fn matvec(&mut self, p: &kernel::Matvec) -> Result<()> {
        let bias = self.bias(3, p.has_bias, p.row0, p.rows)?;
        let y = self.products(p.rows, p.units, 1, self.step.columns as usize)?;
        for (c, column) in y.chunks(p.rows.max(1) as usize).enumerate() {
            let scale = self.norm_scale(2, c, p.square_vectors, p.inv_cols, p.eps)?;
            let mut column: Vec<f64> = column.iter().zip(&bias).map(|(y, bias)| y * scale + bias).collect();
            whole_vectors(&mut column);
            self.store(4, c * p.y_stride as usize * 4 + p.row0 as usize, &column)?;
        }
        Ok(())
    }

    pub(super) fn matvec_add(&mut self, p: &kernel::MatvecAdd) -> Result<()> {
        let bias = self.bias(2, p.has_bias, p.row0, p.rows)?;
        let products = self.products(p.rows, p.units, 1, self.step.columns as usize)?;
        for (c, column) in products.chunks(p.rows.max(1) as usize).enumerate() {
            let mut y: Vec<f64> = column.iter().zip(&bias).map(|(y, bias)| y + bias).collect();
            whole_vectors(&mut y);
            let (stride, row0) = (p.y_stride as usize * 4, p.row0 as usize);
            let at = c * stride + row0;
            let h = part(self.floats(4)?, at, y.len(), "h")?;
            y.iter_mut().zip(h).for_each(|(y, &h)| *y += f64::from(h));
            self.store(4, at, &y)?;
            let h = part(self.floats(4)?, at, y.len(), "h")?;
            let (hg, squares) = prepared(h, part(self.floats(3)?, row0, y.len(), "g")?);
            self.store(5, at, &hg)?;
            self.store(6, c * (stride / 4).next_multiple_of(32) + row0 / 4, &squares)?;
        }
        Ok(())
    }

    pub(super) fn matvec_glu(&mut self, p: &kernel::MatvecGlu) -> Result<()> {
        let products = self.products(p.rows, p.units, 1, self.step.columns as usize)?;
        let gate_bias = self.bias(3, p.has_bias, p.row0, p.part1)?;
        let up_bias = self.bias(3, p.has_bias, p.bias_up + p.row0, p.part1)?;
        for (c, column) in products.chunks(p.rows.max(1) as usize).enumerate() {
            let scale = self.norm_scale(2, c, p.square_vectors, p.inv_cols, p.eps)?;
            let (gate, up) = halves(column, p.rows, p.part1)?;
            let unit = |r: usize| activation(p.gelu, gate[r] * scale + gate_bias[r]) * (up[r] * scale + up_bias[r]);
            let y: Vec<f64> = (0..gate.len()).map(unit).collect();
            self.store(4, c * p.y_stride as usize * 4 + p.row0 as usize, &y)?;
        }
        Ok(())
    }

    pub(super) fn matmul(&mut self, p: &kernel::Matmul) -> Result<()> {
        let n = self.ctl(1)?.columns as usize;
        let bias = self.bias(3, p.has_bias, p.row0, p.rows)?;
        let y = self.products(p.rows, p.units, 2, n)?;
        for (c, column) in y.chunks(p.rows.max(1) as usize).enumerate() {
            let mut column: Vec<f64> = column.iter().zip(&bias).map(|(y, bias)| y + bias).collect();
            whole_vectors(&mut column);
            self.store(4, c * p.y_stride as usize * 4 + p.row0 as usize, &column)?;
        }
        Ok(())
    }

    pub(super) fn matmul_add(&mut self, p: &kernel::Matmul) -> Result<()> {
        let n = self.ctl(1)?.columns as usize;
        let bias = self.bias(3, p.has_bias, p.row0, p.rows)?;
        let y = self.products(p.rows, p.units, 2, n)?;
        for (c, column) in y.chunks(p.rows.max(1) as usize).enumerate() {
            let at = c * p.y_stride as usize * 4 + p.row0 as usize;
            let h = part(self.floats(4)?, at, column.len(), "h")?;
            let sums = column.iter().zip(&bias).zip(h);
            let column: Vec<f64> = sums.map(|((y, bias), &h)| f64::from(h) + y + bias).collect();
            self.store(4, at, &column)?;
        }
        Ok(())
    }

    pub(super) fn matmul_glu(&mut self, p: &kernel::MatmulGlu) -> Result<()> {
        let n = self.ctl(1)?.columns as usize;
        let gate_bias = self.bias(3, p.has_bias, p.row0, p.part1)?;
        let up_bias = self.bias(3, p.has_bias, p.bias_up + p.row0, p.part1)?;
        // The rows of a bank's experts may follow.
        let rows = p.part1.saturating_mul(2);
        if rows > p.rows {
            bail!(Usage, "{} rows hold no pairs of {}", p.rows, p.part1);
        }
        let products = self.products(rows, p.units, 2, n)?;
        for (c, column) in products.chunks(rows.max(1) as usize).enumerate() {
            let (gate, up) = halves(column, rows, p.part1)?;
            let unit = |r: usize| activation(p.gelu, gate[r] + gate_bias[r]) * (up[r] + up_bias[r]);
            let mut y: Vec<f64> = (0..gate.len()).map(unit).collect();
            whole_vectors(&mut y);
            self.store(4, c * p.y_stride as usize * 4 + p.row0 as usize, &y)?;
        }
        Ok(())
    }

    pub(super) fn glu(&mut self, p: &kernel::Glu) -> Result<()> {
        let stride = p.vectors as usize * 4;
        for c in 0..self.ctl(0)?.columns as usize {
            let up = part(self.floats(1)?, c * stride, stride, "up")?;
            let gate = part(self.floats(2)?, c * stride, stride, "gate")?;
            let gated = gate.iter().zip(up);
            let y: Vec<f64> = gated
                .map(|(&gate, &up)| activation(p.gelu, f64::from(gate)) * f64::from(up))
                .collect();
            self.store(2, c * stride, &y)?;
        }
        Ok(())
    }
}

/// Zeros up to a multiple of 4: outputs are stored as whole vectors.
pub(super) fn whole_vectors(y: &mut Vec<f64>) {
    y.resize(y.len().next_multiple_of(4), 0.0);
}

/// The gate's and the up projection's products of one column.
pub(super) fn halves(products: &[f64], rows: u32, outputs: u32) -> Result<(&[f64], &[f64])> {
    if rows != outputs * 2 {
        bail!(Usage, "{rows} rows are no pairs of {outputs}");
    }
    Ok(products.split_at(outputs as usize))
}

pub(super) fn activation(gelu: u32, x: f64) -> f64 {
    if gelu != 0 { gelu_tanh(x) } else { silu(x) }
}

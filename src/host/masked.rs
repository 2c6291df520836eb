//! What a task mask leaves of products and of attention: the rows, columns and heads that a list names, zeros for the rest.

use super::linear::{activation, whole_vectors};
use super::{Bound, part, prepared};
use crate::error::{Result, bail};
use crate::kernel;
use cmf_kernels_ref::op::linear::linear;
use std::ops::Range;

/// Words of a list before its entries; see `shaders/lib/listed.wgsl`.
const HEAD: usize = 4;

/// What a list names, of `blocks` and `units` that there are.
pub(super) struct List {
    pub blocks: Vec<usize>,
    pub units: Vec<usize>,
}

impl Bound<'_> {
    /// The list in binding `i`. Its blocks are a permutation: what is not named first becomes zero.
    pub(super) fn list(&self, i: usize, blocks: u32, units: u32) -> Result<List> {
        let words = self.words(i)?;
        let head = part(words, 0, HEAD, "list")?;
        let named = |at: u32, count: u32, all: u32, what: &str| -> Result<Vec<usize>> {
            let entries = part(words, at as usize, count as usize, what)?;
            if entries.iter().any(|&entry| entry >= all) || count > all {
                bail!(Usage, "a list names {what} past {all}");
            }
            Ok(entries.iter().map(|&entry| entry as usize).collect())
        };
        Ok(List {
            blocks: named(head[2], head[0], blocks, "blocks")?,
            units: named(HEAD as u32, head[1], units, "units")?,
        })
    }

    /// The heads that the list in binding `i` names, and the others.
    pub(super) fn listed_heads(&self, i: usize, heads: u32) -> Result<(Vec<usize>, Vec<usize>)> {
        let words = self.words(i)?;
        let count = part(words, 0, HEAD, "list")?[0] as usize;
        let all = part(words, HEAD, heads as usize, "heads")?;
        if all.iter().any(|&head| head >= heads) || count > all.len() {
            bail!(Usage, "a list names heads past {heads}");
        }
        let (named, others) = all.split_at(count);
        let numbers = |heads: &[u32]| heads.iter().map(|&head| head as usize).collect();
        Ok((numbers(named), numbers(others)))
    }

    /// Σ w[r][k] · x[k] over the named units, for rows of binding 0 and column `c` of x in binding 1.
    fn listed_products(&self, rows: Range<usize>, stored: u32, units: u32, list: &List, c: usize) -> Result<Vec<f64>> {
        let weights = self.rows(0, stored)?;
        if (units as usize * 32) < weights.cols || rows.end > stored as usize {
            bail!(Usage, "{units} units for {} columns", weights.cols);
        }
        let stride = units as usize * 32;
        let x = part(self.floats(1)?, c * stride, stride, "x")?;
        let mut some = vec![0.0; units as usize * 32];
        for unit in &list.units {
            let columns = unit * 32..unit * 32 + 32;
            some[columns.clone()].copy_from_slice(&x[columns]);
        }
        let mut y = vec![0.0; rows.len()];
        linear(&weights, rows, weights.cols, &some, some.len(), 1, &mut y);
        Ok(y)
    }

    pub(super) fn matvec_some(&mut self, p: &kernel::Matvec) -> Result<()> {
        (0..self.step.columns as usize).try_for_each(|c| self.matvec_some_column(p, c))
    }

    fn matvec_some_column(&mut self, p: &kernel::Matvec, c: usize) -> Result<()> {
        let scale = self.norm_scale(2, c, p.square_vectors, p.inv_cols, p.eps)?;
        let list = self.list(3, p.rows.div_ceil(4), p.units)?;
        let mut y = vec![0.0; p.rows as usize];
        for block in &list.blocks {
            let rows = block * 4..y.len().min(block * 4 + 4);
            let products = self.listed_products(rows.clone(), p.rows, p.units, &list, c)?;
            let bias = self.bias(4, p.has_bias, p.row0 + rows.start as u32, rows.len() as u32)?;
            for (y, (product, bias)) in y[rows].iter_mut().zip(products.iter().zip(bias)) {
                *y = product * scale + bias;
            }
        }
        whole_vectors(&mut y);
        self.store(5, c * p.y_stride as usize * 4 + p.row0 as usize, &y)
    }

    pub(super) fn matvec_add_some(&mut self, p: &kernel::MatvecAddSome) -> Result<()> {
        (0..self.step.columns as usize).try_for_each(|c| self.matvec_add_some_column(p, c))
    }

    fn matvec_add_some_column(&mut self, p: &kernel::MatvecAddSome, c: usize) -> Result<()> {
        let list = self.list(2, p.rows.div_ceil(4), p.units)?;
        let mut y = self.listed_products(0..p.rows as usize, p.rows, p.units, &list, c)?;
        whole_vectors(&mut y);
        let (stride, row0) = (p.y_stride as usize * 4, p.row0 as usize);
        let at = c * stride + row0;
        let h = part(self.floats(4)?, at, y.len(), "h")?;
        y.iter_mut().zip(h).for_each(|(y, &h)| *y += f64::from(h));
        self.store(4, at, &y)?;
        let h = part(self.floats(4)?, at, y.len(), "h")?;
        let (hg, squares) = prepared(h, part(self.floats(3)?, row0, y.len(), "g")?);
        self.store(5, at, &hg)?;
        self.store(6, c * (stride / 4).next_multiple_of(32) + row0 / 4, &squares)
    }

    pub(super) fn matvec_glu_some(&mut self, p: &kernel::MatvecGlu) -> Result<()> {
        (0..self.step.columns as usize).try_for_each(|c| self.matvec_glu_some_column(p, c))
    }

    fn matvec_glu_some_column(&mut self, p: &kernel::MatvecGlu, c: usize) -> Result<()> {
        let scale = self.norm_scale(2, c, p.square_vectors, p.inv_cols, p.eps)?;
        let words = self.words(3)?;
        let count = part(words, 0, HEAD, "list")?[0] as usize;
        let outputs = part(words, HEAD, count, "outputs")?.to_vec();
        let whole = List {
            blocks: Vec::new(),
            units: (0..p.units as usize).collect(),
        };
        let mut y = vec![0.0; p.part1 as usize];
        for output in outputs {
            if output >= p.part1 {
                bail!(Usage, "a list names output {output} of {}", p.part1);
            }
            let half = |row: u32, bias: u32| -> Result<f64> {
                let row = row as usize;
                let product = self.listed_products(row..row + 1, p.rows, p.units, &whole, c)?[0];
                Ok(product * scale + self.bias(4, p.has_bias, bias, 1)?[0])
            };
            let gate = half(output, p.row0 + output)?;
            let up = half(p.part1 + output, p.bias_up + p.row0 + output)?;
            y[output as usize] = activation(p.gelu, gate) * up;
        }
        self.store(5, c * p.y_stride as usize * 4 + p.row0 as usize, &y)
    }

    pub(super) fn silence(&mut self, p: &kernel::Silence) -> Result<()> {
        let stride = p.vectors as usize * 4;
        let bits = part(self.words(1)?, 0, stride.div_ceil(32), "bits")?.to_vec();
        for c in 0..self.ctl(0)?.columns as usize {
            for (i, word) in self.words_mut(2, c * stride, stride)?.iter_mut().enumerate() {
                if bits[i / 32] >> (i % 32) & 1 == 0 {
                    *word = 0;
                }
            }
        }
        Ok(())
    }
}

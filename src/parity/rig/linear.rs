//! Rigs of the matrix products: matvec and matmul, plain, added to the residual stream, or gated.

use super::random::{operands, padded, words};
use super::{CTL, Maker};
use crate::container::{TensorId, Tensors};
use crate::error::Result;
use crate::kernel::{self, Op};
use crate::parity::cases::{Linear, Product};
use crate::program::{Axis, Bind, BufferId, Content, Matrix, Piece, Stacking};
use std::sync::Arc;

/// Whether a list names this block of rows, unit of columns, or output.
fn is_named(number: usize) -> bool {
    number % 3 != 1
}

impl Maker {
    pub(super) fn linear(&mut self, spec: &Linear, max_binding: u64) -> Result<Arc<dyn Tensors>> {
        let pair = spec.product.is_pair();
        let stacking = if pair { Stacking::Pair } else { Stacking::Rows };
        let parts = spec.parts.iter();
        let parts = parts.map(|&(dtype, rows)| self.tensor(dtype, rows, spec.cols, spec.amplitude, spec.overlay));
        let parts = parts.collect::<Result<Vec<_>>>()?;
        let stacked: usize = spec.parts.iter().map(|part| part.1).sum();
        let outputs = if pair { stacked / 2 } else { stacked };
        let bias_up = outputs.next_multiple_of(4);
        // Without a bias the kernel reads the first element, which is zero.
        let bias = match (spec.bias, pair) {
            (false, _) => self.pieces("none", vec![Piece { tensor: None, len: 32 }]),
            (true, false) => self.vector("bias", outputs)?,
            (true, true) => self.vector("bias", bias_up + outputs)?,
        };
        let g = self.vector("g", outputs)?;
        let tensors = self.tensors()?;
        let limit = max_binding.min(spec.max_binding);
        let matrix = Matrix::stack("w".into(), &parts, stacking, &*tensors, limit)?;
        self.matrices.push(matrix.clone());

        let units = spec.cols.div_ceil(32);
        let most = spec.columns.iter().max().copied().unwrap_or(1) as usize;
        let y_len = outputs.next_multiple_of(32);
        // The decoding kernels compute as many columns as they are wide, whatever the run has.
        let wide = if spec.product.is_matmul() {
            most
        } else {
            most.next_power_of_two()
        };
        let (sums_in, sums) = (
            (spec.cols.div_ceil(16) * 4).next_multiple_of(32),
            (y_len / 4).next_multiple_of(32),
        );
        let x = self.buffer("x", units * 32 * most.next_multiple_of(8));
        let squares_in = self.buffer("squares.in", sums_in * wide);
        let y = self.buffer("y", y_len * wide);
        let (hg, squares) = (self.buffer("hg", y_len * wide), self.buffer("squares", sums * wide));
        let mut lists = Vec::new();
        for (i, segment) in matrix.segments.iter().enumerate() {
            let (rows, units, row0) = (segment.geometry.rows as u32, units as u32, segment.row0);
            let [_, part1, part2] = segment.part_rows;
            let inv_cols = 1.0 / spec.cols as f32;
            // No sums and an eps of 1 make a factor of 1.
            let (square_vectors, eps) = match spec.norm {
                true => (spec.cols.div_ceil(16) as u32, 1e-2),
                false => (0, 1.0),
            };
            let (has_bias, bias_up, gelu) = (u32::from(spec.bias), bias_up as u32, u32::from(spec.gelu));
            let y_stride = (y_len / 4) as u32;
            let matvec = kernel::Matvec {
                rows,
                units,
                row0,
                part1,
                part2,
                square_vectors,
                inv_cols,
                eps,
                has_bias,
                y_stride,
            };
            let matvec_glu = kernel::MatvecGlu {
                rows,
                units,
                row0,
                part1,
                part2,
                square_vectors,
                inv_cols,
                eps,
                has_bias,
                bias_up,
                gelu,
                y_stride,
            };
            let matmul = kernel::Matmul {
                rows,
                units,
                row0,
                part1,
                part2,
                y_stride,
                has_bias,
            };
            let matmul_glu = kernel::MatmulGlu {
                rows,
                units,
                row0,
                part1,
                part2,
                y_stride,
                has_bias,
                bias_up,
                gelu,
            };
            let op = match spec.product {
                Product::Matvec => Op::Matvec(matvec),
                Product::MatvecAdd => Op::MatvecAdd(kernel::MatvecAdd {
                    rows,
                    units,
                    row0,
                    part1,
                    part2,
                    has_bias,
                    y_stride,
                }),
                Product::MatvecGlu => Op::MatvecGlu(matvec_glu),
                Product::MatvecSome => Op::MatvecSome(matvec),
                Product::MatvecAddSome => Op::MatvecAddSome(kernel::MatvecAddSome {
                    rows,
                    units,
                    row0,
                    part1,
                    part2,
                    y_stride,
                }),
                Product::MatvecGluSome => Op::MatvecGluSome(matvec_glu),
                Product::Matmul => Op::Matmul(matmul),
                Product::MatmulAdd => Op::MatmulAdd(matmul),
                Product::MatmulGlu => Op::MatmulGlu(matmul_glu),
                Product::MatmulSome => Op::MatmulSome(matmul),
                Product::MatmulAddSome => Op::MatmulAddSome(matmul),
                Product::MatmulGluSome => Op::MatmulGluSome(matmul_glu),
            };
            let axis = |first: u32, len: usize, per: usize, limit: usize| Axis {
                first: first as usize,
                len,
                per,
                limit,
                shared: None,
            };
            let content = match spec.product {
                Product::MatvecSome | Product::MatmulSome => Some(Content::Listed {
                    rows: axis(row0, rows as usize, 4, outputs),
                    cols: axis(0, spec.cols, 32, spec.cols),
                }),
                Product::MatvecAddSome | Product::MatmulAddSome => Some(Content::Listed {
                    rows: Axis::whole(rows as usize),
                    cols: axis(0, spec.cols, 32, spec.cols),
                }),
                Product::MatmulGluSome => Some(Content::Listed {
                    rows: axis(row0, part1 as usize, 4, outputs),
                    cols: Axis::whole(units as usize * 32),
                }),
                Product::MatvecGluSome => Some(Content::Outputs(axis(row0, part1 as usize, 1, outputs))),
                _ => None,
            };
            let list = content.map(|content| {
                let list = self.buffer("list", content.len());
                lists.push((list, content.words(&is_named)));
                Bind::Buffer(list)
            });
            let mut bindings = vec![Bind::Weight(0, i)];
            let buffers: &[BufferId] = match spec.product {
                Product::Matvec | Product::MatvecGlu | Product::MatvecSome | Product::MatvecGluSome => &[x, squares_in],
                Product::MatvecAdd | Product::MatvecAddSome => &[x],
                Product::Matmul | Product::MatmulAdd | Product::MatmulGlu => &[CTL, x],
                Product::MatmulSome | Product::MatmulAddSome | Product::MatmulGluSome => &[CTL, x],
            };
            bindings.extend(buffers.iter().map(|&buffer| Bind::Buffer(buffer)));
            bindings.extend(list);
            if spec.product != Product::MatvecAddSome {
                bindings.push(bias);
            }
            match spec.product {
                Product::MatvecAdd | Product::MatvecAddSome => {
                    bindings.extend([g, Bind::Buffer(y), Bind::Buffer(hg), Bind::Buffer(squares)])
                }
                _ => bindings.push(Bind::Buffer(y)),
            }
            self.step(op, bindings);
            if !spec.product.is_matmul() {
                self.widen(wide as u32);
            }
        }
        let has_overlay = matrix.planes.shaders().contains(&"group_overlay");
        let signs = match stacked {
            1 => self.first_row(&*tensors, parts[0])?,
            _ => Vec::new(),
        };
        for &columns in &spec.columns {
            let n = if spec.product.is_matmul() {
                columns as usize
            } else {
                wide
            };
            let mut values = operands(&mut self.random, n, spec.cols, units * 32);
            // A single sum must not happen to be next to nothing: its relative error would be anything. So none of its
            // terms is negative.
            for column in values.chunks_exact_mut(units * 32) {
                for (value, sign) in column.iter_mut().zip(&signs) {
                    *value = f32::from_bits(*value).abs().copysign(*sign).to_bits();
                }
            }
            // Overlays are summed whole, so what a list leaves out must be zero for them.
            if !lists.is_empty() && !spec.product.is_pair() && has_overlay {
                for (number, values) in values.chunks_exact_mut(32).enumerate() {
                    if !is_named(number % units) {
                        values.fill(0);
                    }
                }
            }
            let mut inputs = vec![(x, values)];
            inputs.extend(lists.iter().cloned());
            if spec.norm {
                let count = spec.cols.div_ceil(4);
                let mut all = Vec::new();
                for _ in 0..n {
                    let squares = self.random.floats(count, 1.0).iter().map(|v| v * v).collect::<Vec<_>>();
                    all.extend(words(&squares));
                    all.resize(all.len() + sums_in - count, 0);
                }
                inputs.push((squares_in, all));
            }
            if matches!(
                spec.product,
                Product::MatvecAdd | Product::MatvecAddSome | Product::MatmulAdd | Product::MatmulAddSome
            ) {
                let mut values = padded(&mut self.random, n, outputs, y_len, 1.0);
                if stacked == 1 {
                    values.iter_mut().for_each(|value| *value &= !(1 << 31));
                }
                inputs.push((y, values));
            }
            self.round(0, columns, inputs);
        }
        Ok(tensors)
    }

    /// The weights of a tensor's first row.
    fn first_row(&self, tensors: &dyn Tensors, id: TensorId) -> Result<Vec<f32>> {
        let info = &tensors.infos()[id];
        let (rows, cols) = info.rows_cols();
        let mut row = vec![0.0; cols];
        info.dtype.decoder(tensors.bytes(id)?, rows, cols)?.row(0, &mut row);
        Ok(row)
    }
}

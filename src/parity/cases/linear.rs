//! Cases of the products with a weight: matvec and matmul, plain, added to the stream, or gated, whole or masked.

use super::dtypes::{WHOLE, has_halves, overlays, runnable, segment_bytes};
use crate::dtype::Dtype;
use crate::error::{Result, bail};
use crate::graph::{Matrix, Segment, Stacking};
use crate::op::{Kernel, blocks_list, outputs_list};
use crate::parity::case::Table;
use crate::parity::maker::{Maker, params, sequence};
use crate::parity::random::{Values, operands, padded};
use crate::source::{TensorId, Tensors};

#[derive(Clone, Debug)]
struct Linear {
    kernel: Kernel,
    masked: bool,
    /// Types and rows of the stacked tensors. The two of a gated product have the same rows.
    parts: Vec<(Dtype, usize)>,
    cols: usize,
    /// The tokens of each round. A matvec computes as many as the largest side by side.
    tokens: Vec<u32>,
    /// Whether the input is not normalised yet (matvec, matvec_glu).
    norm: bool,
    bias: bool,
    gelu: bool,
    values: Values,
    /// Bytes of a segment.
    limit: u64,
}

const PRODUCTS: [Kernel; 6] = [
    Kernel::Matvec,
    Kernel::MatvecAdd,
    Kernel::MatvecGlu,
    Kernel::Matmul,
    Kernel::MatmulAdd,
    Kernel::MatmulGlu,
];

/// Whether gate and up projections are a pair.
fn is_pair(kernel: Kernel) -> bool {
    matches!(kernel, Kernel::MatvecGlu | Kernel::MatmulGlu)
}

/// Whether it computes all tokens of a run, instead of a fixed number side by side.
fn is_matmul(kernel: Kernel) -> bool {
    !kernel.spec().is_wide()
}

/// Whether it adds to a stream.
fn adds(kernel: Kernel) -> bool {
    matches!(kernel, Kernel::MatvecAdd | Kernel::MatmulAdd)
}

/// Whether the made-up mask keeps this block of rows, group of columns, or output.
fn is_kept(number: usize) -> bool {
    number % 3 != 1
}

pub fn add(table: &mut Table) {
    for dtype in runnable() {
        for masked in [false, true] {
            for kernel in PRODUCTS {
                add_products(table, kernel, masked, dtype);
            }
        }
    }
    add_stacks(table);
    add_straddling(table);
    // Sizes of vocabularies, up to grids that no longer fit one side.
    for dtype in [Dtype::F16, Dtype::Q8Row, Dtype::Q1t, Dtype::VbitRo] {
        Linear::plain(Kernel::Matvec, dtype, 65_539, 32).add(table, "");
    }
    for dtype in [Dtype::Q1, Dtype::Q1s] {
        Linear::plain(Kernel::Matvec, dtype, 65_539, 160).add(table, "");
    }
    Linear::plain(Kernel::Matmul, Dtype::Q8Row, 65_539, 32).add(table, "");
    Linear::plain(Kernel::Matvec, Dtype::Q8Row, 262_181, 32).add(table, "");
}

fn add_products(table: &mut Table, kernel: Kernel, masked: bool, dtype: Dtype) {
    let plain = |rows, cols| Linear {
        masked,
        ..Linear::plain(kernel, dtype, rows, cols)
    };
    let dims: &[(usize, usize)] = match masked {
        false => &[(1, 32), (5, 96), (6, 576), (7, 1056), (33, 96), (130, 576)],
        true => &[(5, 96), (6, 576), (33, 96), (130, 576)],
    };
    let ragged = (dtype.row_multiple() == 1).then_some((7, 36));
    // The masked matvec_add has no bias.
    let can_bias = !(masked && kernel == Kernel::MatvecAdd);
    for (i, (rows, cols)) in dims.iter().copied().chain(ragged).enumerate() {
        let tokens: &[u32] = match (is_matmul(kernel), rows) {
            (false, 5) => &[8],
            (false, 6) => &[2],
            (false, 33) => &[4],
            (false, _) => &[1],
            (true, 5) if !masked => &[1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 31, 33, 64],
            (true, _) => &[1, 9],
        };
        let linear = Linear {
            tokens: tokens.to_vec(),
            norm: i % 2 == 0,
            bias: i % 3 != 0 && can_bias,
            gelu: i % 4 == 1,
            ..plain(rows, cols)
        };
        linear.add(table, "");
    }
    let mut long = plain(101, 96).cut();
    long.bias = !masked;
    long.add(table, " segments");
    if masked {
        return;
    }
    for (what, overlay) in overlays(dtype) {
        plain(12, 96).with(Values::with_overlay(overlay)).add(table, what);
    }
    if has_halves(dtype) {
        plain(12, 96).with(Values::SUBNORMAL).add(table, " subnormal");
    }
}

/// Stacked tensors: one type, types that share a layout, cut into segments.
fn add_stacks(table: &mut Table) {
    let mixes = [
        [Dtype::Q4Block, Dtype::Q4Tiled, Dtype::Q4Block],
        [Dtype::Q4Tiled, Dtype::Q4Block, Dtype::Q4Tiled],
        [Dtype::Vbit, Dtype::VbitRo, Dtype::Vbit],
    ];
    let mixes: Vec<_> = runnable().map(|dtype| [dtype; 3]).chain(mixes).collect();
    for kernel in [Kernel::Matvec, Kernel::Matmul] {
        for &[a, b, c] in &mixes {
            let linear = Linear {
                parts: vec![(a, 72), (b, 24), (c, 24)],
                bias: true,
                ..Linear::plain(kernel, a, 72, 96)
            };
            // The first cut falls into the first tensor, the last segment begins in the third.
            linear.clone().cut().add(table, " segments");
            linear.add(table, "");
        }
    }
    for kernel in [Kernel::MatvecGlu, Kernel::MatmulGlu] {
        for [a, b] in [[Dtype::Q4Tiled, Dtype::Q4Block], [Dtype::VbitRo, Dtype::Vbit]] {
            let linear = Linear {
                parts: vec![(a, 37), (b, 37)],
                bias: true,
                gelu: true,
                ..Linear::plain(kernel, a, 37, 96)
            };
            linear.add(table, "");
        }
    }
}

/// Groups of 32 weights that straddle rows: rows begin anywhere in a group, also the first row of a segment or a tensor.
fn add_straddling(table: &mut Table) {
    let dtype = Dtype::Q4Block;
    for (masked, kernel) in [false, true]
        .into_iter()
        .flat_map(|masked| PRODUCTS.map(|kernel| (masked, kernel)))
    {
        let plain = |rows, cols| Linear {
            masked,
            ..Linear::plain(kernel, dtype, rows, cols)
        };
        for (tokens, rows, cols) in [(1, 33, 1001), (2, 6, 50), (4, 7, 31), (8, 9, 97), (1, 41, 513)] {
            let mut linear = plain(rows, cols);
            linear.tokens = vec![tokens];
            linear.add(table, "");
        }
        plain(101, 50).cut().add(table, " segments");
        plain(101, 50).with(Values::SUBNORMAL).add(table, " subnormal");
    }
    for kernel in [Kernel::Matvec, Kernel::Matmul] {
        let linear = Linear {
            parts: vec![(dtype, 71), (dtype, 25), (dtype, 23)],
            ..Linear::plain(kernel, dtype, 71, 50)
        };
        linear.clone().add(table, "");
        linear.cut().add(table, " segments");
    }
}

/// Dimensions of a case's operands.
struct Shape {
    /// Groups of 32 columns in a row.
    groups: usize,
    /// Elements of a token's row of sums of squares that a norm reads.
    sums: usize,
    outputs: usize,
    /// Elements from one token's outputs to the next.
    y_stride: usize,
}

impl Linear {
    fn plain(kernel: Kernel, dtype: Dtype, rows: usize, cols: usize) -> Linear {
        Linear {
            kernel,
            masked: false,
            parts: vec![(dtype, rows); if is_pair(kernel) { 2 } else { 1 }],
            cols,
            tokens: if is_matmul(kernel) { vec![3] } else { vec![1] },
            norm: true,
            bias: false,
            gelu: false,
            values: Values::PLAIN,
            limit: WHOLE,
        }
    }

    fn with(self, values: Values) -> Linear {
        Linear { values, ..self }
    }

    /// The same in segments of 32 rows or pairs.
    fn cut(self) -> Linear {
        let stored = if is_pair(self.kernel) { 2 } else { 1 };
        Linear {
            limit: segment_bytes(self.parts[0].0, self.cols) * stored,
            ..self
        }
    }

    fn add(self, table: &mut Table, what: &str) {
        let mut dtypes: Vec<_> = self.parts.iter().map(|part| part.0.name()).collect();
        dtypes.dedup();
        let rows: Vec<_> = self.parts.iter().map(|part| part.1.to_string()).collect();
        let mut name = self.kernel.spec().name.to_string();
        if self.masked {
            name += ".masked";
        }
        name += &format!(".{} {}x{}", dtypes.join("+"), rows.join("+"), self.cols);
        for (is_set, flag) in [
            (self.norm && self.takes_norm(), " norm"),
            (self.bias, " bias"),
            (self.gelu && is_pair(self.kernel), " gelu"),
        ] {
            name += if is_set { flag } else { "" };
        }
        table.add(name + what, move |maker| self.build(maker));
    }

    fn takes_norm(&self) -> bool {
        matches!(self.kernel, Kernel::Matvec | Kernel::MatvecGlu)
    }

    fn build(&self, maker: &mut Maker) -> Result<()> {
        let pair = is_pair(self.kernel);
        let parts = self.parts.iter();
        let parts = parts.map(|&(dtype, rows)| maker.tensor(dtype, rows, self.cols, self.values));
        let parts = parts.collect::<Result<Vec<_>>>()?;
        let stacked: usize = self.parts.iter().map(|part| part.1).sum();
        let outputs = if pair { stacked / 2 } else { stacked };
        let shape = Shape {
            groups: self.cols.div_ceil(32),
            sums: (self.cols.div_ceil(16) * 4).next_multiple_of(32),
            outputs,
            y_stride: outputs.next_multiple_of(32),
        };
        self.operands(maker, &shape)?;
        let stacking = if pair { Stacking::Pair } else { Stacking::Rows };
        let matrix = maker.stack(&parts, stacking, self.limit)?;
        for (i, segment) in matrix.segments.iter().enumerate() {
            if self.masked {
                maker.list(self.list(shape.groups, segment));
            }
            self.step(maker, &shape, i, segment)?;
        }
        let signs = match stacked {
            1 => first_row(&*maker.tensors()?, parts[0])?,
            _ => Vec::new(),
        };
        let mut tokens = self.tokens.iter();
        tokens.try_for_each(|&tokens| self.round(maker, &shape, &matrix, tokens, &signs))
    }

    fn operands(&self, maker: &mut Maker, shape: &Shape) -> Result<()> {
        let most = self.tokens.iter().max().copied().unwrap_or(1) as usize;
        let Shape {
            groups,
            outputs,
            y_stride,
            ..
        } = *shape;
        // A masked matvec_add reads its list in place of the biases.
        let (bias, unused) = match self.kernel {
            Kernel::MatvecAdd => ("list", "bias"),
            _ => ("bias", "list"),
        };
        maker.zeros(unused);
        match (self.bias, is_pair(self.kernel)) {
            (false, _) => maker.zeros(bias),
            (true, false) => maker.vector(bias, outputs)?,
            (true, true) => maker.vector(bias, outputs.next_multiple_of(4) + outputs)?,
        }
        maker.vector("g", outputs)?;
        maker.width = if is_matmul(self.kernel) {
            most
        } else {
            most.next_power_of_two()
        };
        let width = maker.width;
        // A matmul reads whole tiles of 8 tokens.
        maker.rows("x", groups * 32, most.next_multiple_of(8));
        maker.rows(if adds(self.kernel) { "h" } else { "y" }, y_stride, width);
        maker.rows("x_scaled", y_stride, width);
        let squares = if self.takes_norm() {
            shape.sums
        } else {
            (y_stride / 4).next_multiple_of(32)
        };
        maker.rows("squares", squares, width);
        Ok(())
    }

    /// The mask list of a segment.
    fn list(&self, groups: usize, segment: &Segment) -> Vec<u32> {
        let [_, outputs, _] = segment.part_rows;
        let (blocks, first) = (segment.geometry.rows.div_ceil(4), segment.row0 as usize);
        let block = |block: usize| is_kept(first / 4 + block);
        let all = |_: usize| true;
        match self.kernel {
            Kernel::MatvecGlu => outputs_list(outputs as usize, &|output| is_kept(first + output)),
            Kernel::MatmulGlu => blocks_list((outputs.div_ceil(4) as usize, &block), (groups, &all)),
            Kernel::MatvecAdd | Kernel::MatmulAdd => blocks_list((blocks, &all), (groups, &is_kept)),
            _ => blocks_list((blocks, &block), (groups, &is_kept)),
        }
    }

    fn step(&self, maker: &mut Maker, shape: &Shape, number: usize, segment: &Segment) -> Result<()> {
        let (rows, groups, row0) = (segment.geometry.rows as u32, shape.groups as u32, segment.row0);
        let [_, second_row, third_row] = segment.part_rows;
        // The rows of a gated product are pairs of a gate and an up projection.
        let outputs = second_row;
        let inv_cols = 1.0 / self.cols as f32;
        // No sums and an eps of 1 make a factor of 1.
        let (square_vectors, eps) = match self.norm {
            true => (self.cols.div_ceil(16) as u32, 1e-2),
            false => (0, 1.0),
        };
        let (has_bias, gelu) = (u32::from(self.bias), u32::from(self.gelu));
        let (bias_up, y_stride) = (shape.outputs.next_multiple_of(4) as u32, (shape.y_stride / 4) as u32);
        let op = match self.kernel {
            Kernel::Matvec => params!(matvec:
                rows, groups, row0, second_row, third_row, square_vectors, inv_cols, eps, has_bias, y_stride),
            Kernel::MatvecAdd => params!(matvec_add: rows, groups, row0, second_row, third_row, has_bias, y_stride),
            Kernel::MatvecGlu => params!(matvec_glu:
                rows, groups, row0, outputs, square_vectors, inv_cols, eps, has_bias, bias_up, gelu, y_stride),
            Kernel::Matmul => params!(matmul: rows, groups, row0, second_row, third_row, y_stride, has_bias),
            Kernel::MatmulAdd => params!(matmul_add: rows, groups, row0, second_row, third_row, y_stride, has_bias),
            Kernel::MatmulGlu => params!(matmul_glu: rows, groups, row0, outputs, y_stride, has_bias, bias_up, gelu),
            other => bail!(Internal, "{} is not a product", other.spec().name),
        };
        maker.segment_step(number, op)
    }

    fn round(&self, maker: &mut Maker, shape: &Shape, matrix: &Matrix, tokens: u32, signs: &[f32]) -> Result<()> {
        // A matvec computes as many tokens as it is wide, whatever the run has.
        let n = if is_matmul(self.kernel) {
            tokens as usize
        } else {
            maker.width
        };
        let row = shape.groups * 32;
        let mut values = operands(&mut maker.random, n, self.cols, row);
        // A single sum near zero could have any relative error, so none of its terms is negative.
        for token in values.chunks_exact_mut(row) {
            for (value, sign) in token.iter_mut().zip(signs) {
                *value = f32::from_bits(*value).abs().copysign(*sign).to_bits();
            }
        }
        // Overlays are summed whole, so activations that the list leaves out must be zero.
        if self.masked && !is_pair(self.kernel) && matrix.planes.has_overlay() {
            for (number, group) in values.chunks_exact_mut(32).enumerate() {
                if !is_kept(number % shape.groups) {
                    group.fill(0);
                }
            }
        }
        let mut inputs = vec![("x", values)];
        if self.norm && self.takes_norm() {
            let mut squares = padded(&mut maker.random, n, self.cols.div_ceil(4), shape.sums, 1.0);
            let square = |word: &mut u32| *word = f32::from_bits(*word).powi(2).to_bits();
            squares.iter_mut().for_each(square);
            inputs.push(("squares", squares));
        }
        if adds(self.kernel) {
            let mut stream = padded(&mut maker.random, n, shape.outputs, shape.y_stride, 1.0);
            if !signs.is_empty() {
                stream.iter_mut().for_each(|value| *value &= !(1 << 31));
            }
            inputs.push(("h", stream));
        }
        maker.round(sequence(0, tokens), inputs)
    }
}

/// The weights of a tensor's first row.
fn first_row(tensors: &dyn Tensors, id: TensorId) -> Result<Vec<f32>> {
    let info = &tensors.infos()[id];
    let (rows, cols) = info.rows_cols();
    let mut row = vec![0.0; cols];
    info.dtype.decoder(tensors.bytes(id)?, rows, cols)?.row(0, &mut row);
    Ok(row)
}

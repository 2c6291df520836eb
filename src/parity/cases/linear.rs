//! Cases of the products with a weight: matvec and matmul, plain, added to the stream, or gated, whole or masked; and of
//! `embed`, which reads rows of a weight.

use super::dtypes::{WHOLE, runnable, segment_bytes, special};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::graph::{Matrix, Segment, Stacking};
use crate::op::{Kernel, blocks_list, embed, outputs_list};
use crate::parity::case::{Table, flags};
use crate::parity::maker::{Maker, op, sequence, token};
use crate::parity::random::{Values, operands, padded};
use crate::source::{TensorId, Tensors};

/// Tokens of a round of `embed`.
const EMBEDDED: usize = 9;

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

/// The cases of `embed`.
pub fn add_embed(table: &mut Table) {
    let embed = |dtype, rows, cols| Linear::plain(Kernel::Embed, dtype, rows, cols);
    for dtype in runnable() {
        let ragged = (dtype.row_multiple() == 1).then_some((9, 36));
        for (rows, cols) in [(33, 32), (7, 576), (70, 1056)].into_iter().chain(ragged) {
            embed(dtype, rows, cols).add(table, "");
        }
        embed(dtype, 100, 96).cut().add(table, " segments");
        for (what, values) in special(dtype) {
            embed(dtype, 33, 96).with(values).add(table, what);
        }
    }
    // Groups of 32 weights that straddle rows.
    let dtype = Dtype::Q4Block;
    embed(dtype, 50, 1001).add(table, "");
    embed(dtype, 100, 50).cut().add(table, " segments");
    embed(dtype, 33, 50).with(Values::SUBNORMAL).add(table, " subnormal");
    // The size of a vocabulary.
    embed(Dtype::Q8Row, 65_539, 32).add(table, "");
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
        let mut linear = plain(rows, cols);
        linear.tokens = tokens.to_vec();
        (linear.norm, linear.bias, linear.gelu) = (i % 2 == 0, i % 3 != 0 && can_bias, i % 4 == 1);
        linear.add(table, "");
    }
    let mut long = plain(101, 96).cut();
    long.bias = !masked;
    long.add(table, " segments");
    if masked {
        return;
    }
    for (what, values) in special(dtype) {
        plain(12, 96).with(values).add(table, what);
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
            let mut linear = Linear::plain(kernel, a, 72, 96);
            linear.parts = vec![(a, 72), (b, 24), (c, 24)];
            linear.bias = true;
            // The first cut falls into the first tensor, the last segment begins in the third.
            linear.clone().cut().add(table, " segments");
            linear.add(table, "");
        }
    }
    for kernel in [Kernel::MatvecGlu, Kernel::MatmulGlu] {
        for [a, b] in [[Dtype::Q4Tiled, Dtype::Q4Block], [Dtype::VbitRo, Dtype::Vbit]] {
            let mut linear = Linear::plain(kernel, a, 37, 96);
            linear.parts = vec![(a, 37), (b, 37)];
            (linear.bias, linear.gelu) = (true, true);
            linear.add(table, "");
        }
    }
}

/// Groups of 32 weights that straddle rows: rows begin anywhere in a group, also the first row of a segment or a tensor.
fn add_straddling(table: &mut Table) {
    let dtype = Dtype::Q4Block;
    let variants = [false, true].map(|masked| PRODUCTS.map(|kernel| (masked, kernel)));
    for (masked, kernel) in variants.into_iter().flatten() {
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
        let mut linear = Linear::plain(kernel, dtype, 71, 50);
        linear.parts = vec![(dtype, 71), (dtype, 25), (dtype, 23)];
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
            cols: cols.next_multiple_of(dtype.row_multiple()),
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
        let operator = self.kernel.spec().name.to_string() + &flags([(self.masked, ".masked")]);
        let name = format!("{operator}.{} {}x{}", dtypes.join("+"), rows.join("+"), self.cols);
        let flags = flags([
            (self.norm && self.takes_norm(), " norm"),
            (self.bias, " bias"),
            (self.gelu && is_pair(self.kernel), " gelu"),
        ]);
        table.add(name + &flags + what, move |maker| match self.kernel {
            Kernel::Embed => self.build_embed(maker),
            _ => self.build(maker),
        });
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
            maker.segment_step(i, op(self.kernel, &self.params(&shape, segment))?)?;
        }
        let signs = match stacked {
            1 => first_row(&maker.tensors, parts[0])?,
            _ => Vec::new(),
        };
        let mut tokens = self.tokens.iter();
        tokens.try_for_each(|&tokens| self.round(maker, &shape, &matrix, tokens, &signs))
    }

    fn build_embed(&self, maker: &mut Maker) -> Result<()> {
        let (dtype, rows) = self.parts[0];
        let tensor = maker.tensor(dtype, rows, self.cols, self.values)?;
        let matrix = maker.stack(&[tensor], Stacking::Rows, self.limit)?;
        let groups = self.cols.div_ceil(32);
        maker.rows("h", groups * 32, EMBEDDED);
        for (i, segment) in matrix.segments.iter().enumerate() {
            let params = embed::Params {
                rows: segment.geometry.rows as u32,
                groups: groups as u32,
                row0: segment.row0,
                multiplier: 11.3,
            };
            maker.segment_step(i, params)?;
        }
        // The first and the last row, and some between.
        let mut ids = vec![0, rows as u32 - 1];
        ids.resize_with(EMBEDDED, || (maker.random.bits() % rows as u64) as u32);
        let tokens = ids.into_iter().zip(0..).map(|(id, position)| token(id, 0, position));
        maker.round(tokens.collect(), Vec::new())
    }

    fn operands(&self, maker: &mut Maker, shape: &Shape) -> Result<()> {
        let most = self.tokens.iter().max().copied().unwrap_or(1) as usize;
        let (outputs, y_stride) = (shape.outputs, shape.y_stride);
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
        let width = if is_matmul(self.kernel) {
            most
        } else {
            most.next_power_of_two()
        };
        maker.width = width;
        // A matmul reads whole tiles of 8 tokens.
        maker.rows("x", shape.groups * 32, most.next_multiple_of(8));
        maker.rows(if adds(self.kernel) { "h" } else { "y" }, y_stride, width);
        maker.rows("x_scaled", y_stride, width);
        let squares = match self.takes_norm() {
            true => shape.sums,
            false => (y_stride / 4).next_multiple_of(32),
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

    /// The parameters of a segment's step.
    fn params(&self, shape: &Shape, segment: &Segment) -> [(&'static str, u32); 13] {
        let [_, second_row, third_row] = segment.part_rows;
        // No sums and an eps of 1 make a factor of 1.
        let (square_vectors, eps) = match self.norm {
            true => (self.cols.div_ceil(16), 1e-2f32),
            false => (0, 1.0),
        };
        [
            ("rows", segment.geometry.rows as u32),
            ("groups", shape.groups as u32),
            ("row0", segment.row0),
            ("second_row", second_row),
            ("third_row", third_row),
            // The rows of a gated product are pairs of a gate and an up projection.
            ("outputs", second_row),
            ("square_vectors", square_vectors as u32),
            ("inv_cols", (1.0 / self.cols as f32).to_bits()),
            ("eps", eps.to_bits()),
            ("has_bias", u32::from(self.bias)),
            ("bias_up", shape.outputs.next_multiple_of(4) as u32),
            ("gelu", u32::from(self.gelu)),
            ("y_stride", (shape.y_stride / 4) as u32),
        ]
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
    let stored = tensors.stored(id)?;
    let mut row = vec![0.0; stored.info.rows_cols().1];
    stored.decoder()?.row(0, &mut row);
    Ok(row)
}

//! For host implementations of operators: operands by name, and functions that several operators share.

use super::constants::LIST_HEADER;
use super::kv::Kv;
use super::spec::{Bind, BufferId, MatrixId, Spec, VectorId};
use super::tokens::{BATCH_HEADER, SlotState, Token};
use crate::dtype::RowDecoder;
use crate::error::{Error, Kind, Result, bail};
use cmf_kernels_ref::op::glu::{gelu_tanh, silu};
use cmf_kernels_ref::op::linear::linear;

/// Buffers, vectors and weights of a graph in host memory.
pub trait Memory {
    /// The words of a buffer.
    fn buffer(&self, buffer: BufferId) -> Option<&[u32]>;

    /// The words of a buffer, to be written.
    fn buffer_mut(&mut self, buffer: BufferId) -> Option<&mut [u32]>;

    /// The elements of a vector.
    fn vector(&self, vector: VectorId) -> Option<&[f32]>;

    /// The stored rows of a segment of a matrix. Errors: those of the tensors' payloads.
    fn weight(&self, matrix: MatrixId, segment: usize) -> Result<Rows<'_>>;
}

/// Rows of a weight, which may come from several tensors.
pub struct Rows<'a> {
    /// The number of rows.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
    /// Decodes a row.
    pub decoder: Box<dyn RowDecoder + 'a>,
}

impl RowDecoder for Rows<'_> {
    fn row(&self, row: usize, out: &mut [f32]) {
        self.decoder.row(row, out);
    }
}

/// One step's operands.
pub struct Operands<'a> {
    pub(crate) spec: &'static Spec,
    pub(crate) bindings: &'a [Bind],
    pub(crate) memory: &'a mut dyn Memory,
    /// Element type of the key-value cache.
    pub kv: Kv,
    /// Tokens that a wide step computes side by side, however many the run has.
    pub width: usize,
    /// Tokens of the run, at most `width`.
    pub own: usize,
    /// Whether the masked variant runs.
    pub masked: bool,
}

impl Operands<'_> {
    fn bind(&self, name: &str) -> Result<Bind> {
        let bind = self.spec.position(name).and_then(|i| self.bindings.get(i));
        bind.copied()
            .ok_or_else(|| internal(format!("{} has no operand '{name}'", self.spec.name)))
    }

    /// The words of a buffer.
    pub fn all_words(&self, name: &str) -> Result<&[u32]> {
        match self.bind(name)? {
            Bind::Buffer(buffer) => self.memory.buffer(buffer),
            _ => None,
        }
        .ok_or_else(|| internal(format!("{}: '{name}' is not a buffer", self.spec.name)))
    }

    /// `len` words of a buffer from `at`.
    pub fn words(&self, name: &str, at: usize, len: usize) -> Result<&[u32]> {
        slice(self.all_words(name)?, at, len, name)
    }

    /// The elements of a buffer or a vector.
    pub fn all_floats(&self, name: &str) -> Result<&[f32]> {
        match self.bind(name)? {
            Bind::Vector(vector) => self.memory.vector(vector),
            Bind::Buffer(buffer) => self.memory.buffer(buffer).map(bytemuck::cast_slice),
            Bind::Weight(..) => None,
        }
        .ok_or_else(|| internal(format!("{}: '{name}' has no elements", self.spec.name)))
    }

    /// `len` elements of a buffer or a vector from `at`.
    pub fn floats(&self, name: &str, at: usize, len: usize) -> Result<&[f32]> {
        slice(self.all_floats(name)?, at, len, name)
    }

    /// The same, as f64.
    pub fn values(&self, name: &str, at: usize, len: usize) -> Result<Vec<f64>> {
        Ok(self.floats(name, at, len)?.iter().map(|&v| f64::from(v)).collect())
    }

    /// `len` words of a buffer from `at`, to be written.
    pub fn words_mut(&mut self, name: &str, at: usize, len: usize) -> Result<&mut [u32]> {
        let bind = self.bind(name)?;
        let operator = self.spec.name;
        let words = match bind {
            Bind::Buffer(buffer) => self.memory.buffer_mut(buffer),
            _ => None,
        };
        let words = words.ok_or_else(|| internal(format!("{operator}: '{name}' is not a buffer")))?;
        slice_mut(words, at, len, name)
    }

    /// Rounds values to f32 and stores them from element `at`.
    pub fn store(&mut self, name: &str, at: usize, values: &[f64]) -> Result<()> {
        let to = self.words_mut(name, at, values.len())?;
        for (word, &value) in to.iter_mut().zip(values) {
            *word = (value as f32).to_bits();
        }
        Ok(())
    }

    /// As [`Operands::store`], for values that are stored as whole vectors: zeros follow up to a multiple of 4.
    pub fn store_vectors(&mut self, name: &str, at: usize, mut values: Vec<f64>) -> Result<()> {
        values.resize(values.len().next_multiple_of(4), 0.0);
        self.store(name, at, &values)
    }

    /// Adds values to the elements from `at`, and stores the sums.
    pub fn add(&mut self, name: &str, at: usize, values: &[f64]) -> Result<()> {
        let mut sums = self.values(name, at, values.len())?;
        sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        self.store(name, at, &sums)
    }

    /// The number of tokens of a batch. Operators that need no more also run over batches without records.
    pub fn count(&self, name: &str) -> Result<usize> {
        Ok(self.words(name, 0, 1)?[0] as usize)
    }

    /// The tokens of a batch.
    pub fn tokens(&self, name: &str) -> Result<Vec<Token>> {
        let count = self.words(name, 0, BATCH_HEADER)?[0] as usize;
        let records = self.words(name, BATCH_HEADER, count * size_of::<Token>() / 4)?;
        Ok(bytemuck::pod_collect_to_vec(records))
    }

    /// The first record of a batch, which is valid even if the run has no tokens.
    pub fn first_token(&self, name: &str) -> Result<Token> {
        let record = self.words(name, BATCH_HEADER, size_of::<Token>() / 4)?;
        Ok(bytemuck::pod_read_unaligned(bytemuck::cast_slice(record)))
    }

    /// Writes the tokens of a batch.
    pub fn store_tokens(&mut self, name: &str, tokens: &[Token]) -> Result<()> {
        let records: &[u32] = bytemuck::cast_slice(tokens);
        self.words_mut(name, 0, 1)?[0] = tokens.len() as u32;
        self.words_mut(name, BATCH_HEADER, records.len())?
            .copy_from_slice(records);
        Ok(())
    }

    /// The state of a slot.
    pub fn slot_state(&self, name: &str, slot: u32) -> Result<SlotState> {
        let len = size_of::<SlotState>() / 4;
        let words = self.words(name, slot as usize * len, len)?;
        Ok(bytemuck::pod_read_unaligned(bytemuck::cast_slice(words)))
    }

    /// Writes the state of a slot.
    pub fn store_slot_state(&mut self, name: &str, slot: u32, state: &SlotState) -> Result<()> {
        let words = state.words();
        self.words_mut(name, slot as usize * words.len(), words.len())?
            .copy_from_slice(words);
        Ok(())
    }

    /// The first `rows` rows of the weight.
    pub fn weight(&self, rows: u32) -> Result<Rows<'_>> {
        let Bind::Weight(matrix, segment) = self.bind("w")? else {
            bail!(Internal, "{}: 'w' is not a weight", self.spec.name)
        };
        let weight = self.memory.weight(matrix, segment)?;
        if rows as usize > weight.rows {
            bail!(Internal, "'w': {rows} rows of a segment with {} rows", weight.rows);
        }
        Ok(weight)
    }

    /// `Σ_k w[r][k] · x[t][k]` as `[n, rows]`, for the first `n` rows of `x`.
    pub fn products(&self, rows: u32, groups: u32, n: usize) -> Result<Vec<f64>> {
        let x = self.floats("x", 0, n * groups as usize * 32)?;
        self.products_of(rows, groups, x, n)
    }

    /// As [`Operands::products`], but if the masked variant runs, summed over the groups of 32 columns that `list`
    /// names.
    pub fn masked_products(&self, rows: u32, groups: u32, n: usize) -> Result<Vec<f64>> {
        if !self.masked {
            return self.products(rows, groups, n);
        }
        let len = groups as usize * 32;
        let x = self.floats("x", 0, n * len)?;
        let mut kept = vec![0.0; x.len()];
        for group in self.list_entries("group", LIST_HEADER, self.list_header()?[1], groups)? {
            for at in (0..n).map(|t| t * len + group * 32) {
                kept[at..at + 32].copy_from_slice(&x[at..at + 32]);
            }
        }
        self.products_of(rows, groups, &kept, n)
    }

    fn products_of(&self, rows: u32, groups: u32, x: &[f32], n: usize) -> Result<Vec<f64>> {
        let weights = self.weight(rows)?;
        let (len, cols) = (groups as usize * 32, weights.cols);
        if len < cols {
            bail!(Internal, "{groups} groups of 32 activations for {cols} columns of 'w'");
        }
        let mut y = vec![0.0; n * rows as usize];
        linear(&weights, 0..rows as usize, cols, x, len, n, &mut y);
        Ok(y)
    }

    /// `1 / sqrt(mean + eps)` of token `t`, where `squares` has the sums of squares.
    pub fn norm_scale(&self, t: usize, square_vectors: u32, inv_cols: f32, eps: f32) -> Result<f64> {
        let sums = square_vectors as usize * 4;
        let squares = self.values("squares", t * sums.next_multiple_of(32), sums)?;
        let sum: f64 = squares.iter().sum();
        Ok(1.0 / (sum * f64::from(inv_cols) + f64::from(eps)).sqrt())
    }

    /// `rows` biases from element `at` of an operand; zeros if there is no bias.
    pub fn bias(&self, name: &str, has_bias: u32, at: u32, rows: u32) -> Result<Vec<f64>> {
        if has_bias == 0 {
            return Ok(vec![0.0; rows as usize]);
        }
        self.values(name, at as usize, rows as usize)
    }

    /// The counts at the head of `list`.
    pub fn list_header(&self) -> Result<&[u32]> {
        self.words("list", 0, LIST_HEADER as usize)
    }

    /// `count` entries of `list` from word `at`, which are numbers below `all`.
    pub fn list_entries(&self, what: &str, at: u32, count: u32, all: u32) -> Result<Vec<usize>> {
        if count > all {
            bail!(Internal, "'list' names {count} times {what}, expected at most {all}");
        }
        let entries = self.words("list", at as usize, count as usize)?;
        if let Some(entry) = entries.iter().find(|&&entry| entry >= all) {
            bail!(Internal, "'list' names {what} {entry}, expected less than {all}");
        }
        Ok(entries.iter().map(|&entry| entry as usize).collect())
    }

    /// Whether each of `rows` rows is computed: all, or in the masked variant the blocks of 4 that `list` names.
    pub fn active_rows(&self, rows: u32) -> Result<Vec<bool>> {
        if !self.masked {
            return Ok(vec![true; rows as usize]);
        }
        let mut active = vec![false; rows as usize];
        let head = self.list_header()?;
        for block in self.list_entries("block", head[2], head[0], rows.div_ceil(4))? {
            let end = active.len().min(block * 4 + 4);
            active[block * 4..end].fill(true);
        }
        Ok(active)
    }

    /// The query heads to compute, and those that the mask leaves out.
    pub fn heads(&self, heads: u32) -> Result<(Vec<usize>, Vec<usize>)> {
        if !self.masked {
            return Ok(((0..heads as usize).collect(), Vec::new()));
        }
        let count = self.list_header()?[0];
        let named = self.list_entries("query head", LIST_HEADER, count, heads)?;
        let others = self.list_entries("query head", LIST_HEADER + count, heads - count, heads)?;
        Ok((named, others))
    }

    /// Adds `y` to the elements of `h` from `row0` of token `t`. Then stores `h · g` in `x_scaled`, and the sums of
    /// squares of 4 elements in `squares`. `stride`: elements from one token to the next.
    pub fn add_to_stream(&mut self, t: usize, stride: usize, row0: usize, mut y: Vec<f64>) -> Result<()> {
        y.resize(y.len().next_multiple_of(4), 0.0);
        let at = t * stride + row0;
        self.add("h", at, &y)?;
        // The next step reads the rounded sums.
        let h = self.floats("h", at, y.len())?;
        let (x_scaled, squares) = scaled(h, self.floats("g", row0, y.len())?);
        self.store("x_scaled", at, &x_scaled)?;
        self.store("squares", t * (stride / 4).next_multiple_of(32) + row0 / 4, &squares)
    }
}

fn internal(message: String) -> Error {
    Error::new(Kind::Internal, message)
}

fn past_end(at: usize, len: usize, has: usize, what: &str) -> Error {
    internal(format!("{what}: {len} elements from {at}, past the end of {has}"))
}

/// `len` elements from `at`. Errors: `Internal` for elements past the end.
pub fn slice<'a, T>(all: &'a [T], at: usize, len: usize, what: &str) -> Result<&'a [T]> {
    let end = at.checked_add(len);
    let part = end.and_then(|end| all.get(at..end));
    part.ok_or_else(|| past_end(at, len, all.len(), what))
}

/// As [`slice()`], to be written.
pub fn slice_mut<'a, T>(all: &'a mut [T], at: usize, len: usize, what: &str) -> Result<&'a mut [T]> {
    let has = all.len();
    let end = at.checked_add(len);
    let part = end.and_then(|end| all.get_mut(at..end));
    part.ok_or_else(|| past_end(at, len, has, what))
}

/// `h · g`, and the sum of `h²` over every 4 elements.
pub fn scaled(h: &[f32], g: &[f32]) -> (Vec<f64>, Vec<f64>) {
    let products = h.iter().zip(g).map(|(&h, &g)| f64::from(h) * f64::from(g)).collect();
    let squares = h
        .chunks(4)
        .map(|four| four.iter().map(|&v| f64::from(v) * f64::from(v)).sum());
    (products, squares.collect())
}

/// Splits the products of one token into the gate and the up projection. Errors: `Internal` for another number of
/// products.
pub fn halves(products: &[f64], outputs: u32) -> Result<(&[f64], &[f64])> {
    let len = products.len();
    if len != outputs as usize * 2 {
        bail!(Internal, "{len} products of gate and up, expected twice {outputs}");
    }
    Ok(products.split_at(outputs as usize))
}

/// The activation of a gate: gelu_tanh, or silu.
pub fn activation(gelu: u32, x: f64) -> f64 {
    if gelu != 0 { gelu_tanh(x) } else { silu(x) }
}

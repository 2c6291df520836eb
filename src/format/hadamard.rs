//! Weights that are stored in a rotated basis.
//!
//! A rotated projection computes y = W'·H(s ⊙ x): H is the blockwise normalised Walsh-Hadamard matrix in natural order, s a
//! vector of signs that depends on the width only. A row z of a rotated embedding stands for s ⊙ H(z). So a rotated matrix W'
//! means (W'·H) ⊙ s, row by row.

use crate::error::{Result, bail};
use std::collections::{BTreeMap, BTreeSet};

/// The only transform that is defined.
pub const TRANSFORM: &str = "normalized-sylvester-walsh-hadamard";
/// The only axis that is defined.
pub const AXIS: &str = "input-last-dimension";
/// The largest block that kernels transform.
const MAX_BLOCK: u64 = crate::op::HADAMARD_TILE as u64;

/// Which matrices are rotated, and how.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Hadamard {
    /// Elements of a block of H: a power of two that divides the width of every rotated matrix.
    block: usize,
    /// The signs of each width, 1 or -1; `None`: all signs are 1.
    signs: Option<BTreeMap<usize, Vec<f32>>>,
    /// Names of projections whose inputs are rotated.
    pub forward: BTreeSet<String>,
    /// Names of embeddings whose rows are rotated.
    pub inverse: BTreeSet<String>,
}

impl Hadamard {
    /// A rotation in blocks of `block` elements. `widths` and `values`: the signs of each width, one after the other; `None`:
    /// all signs are 1.
    ///
    /// Errors: `UnsupportedFeature` for a block that is not a power of two of at most 4096; `Parse` for widths and values
    /// that do not belong together.
    pub fn new(block: u64, signs: Option<(&[i64], &[f32])>) -> Result<Hadamard> {
        if !block.is_power_of_two() || block > MAX_BLOCK {
            bail!(
                UnsupportedFeature,
                "Hadamard blocks of {block}, expected a power of two of at most {MAX_BLOCK}"
            );
        }
        let signs = signs.map(|(widths, values)| signs_of(widths, values)).transpose()?;
        Ok(Hadamard {
            block: block as usize,
            signs,
            ..Hadamard::default()
        })
    }

    /// Elements of a block.
    pub fn block(&self) -> usize {
        self.block
    }

    /// The widths with signs of their own, ascending.
    pub fn widths(&self) -> impl Iterator<Item = usize> {
        self.signs.iter().flat_map(|signs| signs.keys().copied())
    }

    /// Whether all signs are 1.
    pub fn is_identity(&self) -> bool {
        self.signs.is_none()
    }

    /// The signs of matrices with `width` columns. Errors: `UnsupportedFeature` if the block does not divide the width,
    /// `Parse` if there are none.
    pub fn signs(&self, width: usize) -> Result<Vec<f32>> {
        if !width.is_multiple_of(self.block) {
            bail!(
                UnsupportedFeature,
                "Hadamard blocks of {} do not divide {width} columns",
                self.block
            );
        }
        match &self.signs {
            None => Ok(vec![1.0; width]),
            Some(signs) => match signs.get(&width) {
                Some(signs) => Ok(signs.clone()),
                None => bail!(Parse, "no Hadamard signs for matrices of {width} columns"),
            },
        }
    }
}

fn signs_of(widths: &[i64], values: &[f32]) -> Result<BTreeMap<usize, Vec<f32>>> {
    if widths.is_empty() {
        bail!(Parse, "explicit Hadamard signs without widths");
    }
    if let Some(value) = values.iter().find(|value| value.abs() != 1.0) {
        bail!(Parse, "Hadamard sign {value}, expected 1 or -1");
    }
    let mut signs = BTreeMap::new();
    let mut rest = values;
    for &width in widths {
        let len = usize::try_from(width).ok().filter(|&len| len > 0 && len <= rest.len());
        let Some(len) = len else {
            bail!(Parse, "Hadamard widths {widths:?} for {} signs", values.len());
        };
        let (own, others) = rest.split_at(len);
        if signs.insert(len, own.to_vec()).is_some() {
            bail!(Parse, "Hadamard width {width} occurs twice");
        }
        rest = others;
    }
    if !rest.is_empty() {
        bail!(Parse, "Hadamard widths {widths:?} for {} signs", values.len());
    }
    Ok(signs)
}

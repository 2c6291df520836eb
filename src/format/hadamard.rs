//! Weights that are stored in a rotated basis.
//!
//! A rotated projection computes y = W'·H(s ⊙ x): H is the blockwise normalised Walsh-Hadamard matrix in natural order, s a
//! vector of signs that depends on the width only. A row z of a rotated embedding stands for s ⊙ H(z). So a rotated matrix W'
//! means (W'·H) ⊙ s, row by row.

use crate::error::{Result, bail};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The only transform that is defined.
pub const TRANSFORM: &str = "normalized-sylvester-walsh-hadamard";
/// The only axis that is defined.
pub const AXIS: &str = "input-last-dimension";

/// Which matrices are rotated, and how.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Header", into = "Header")]
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

/// A rotation as `arch.prism_hadamard` of a CMF header states it.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    version: u32,
    block_size: u64,
    transform: String,
    axis: String,
    sign_mode: String,
    widths: Vec<i64>,
    signs: Vec<f32>,
    forward_weight_names: Vec<String>,
    inverse_weight_names: Vec<String>,
    /// Whether value heads that share a key head are neighbours, as everywhere in a CMF file.
    gdn_v_grouped: bool,
    /// Accepted and ignored: a hint for other engines to round transformed activations to f16.
    #[serde(default)]
    activation_f16: bool,
}

impl From<Hadamard> for Header {
    fn from(rotation: Hadamard) -> Header {
        let mode = if rotation.is_identity() { "identity" } else { "explicit" };
        let signs = rotation.signs.unwrap_or_default();
        Header {
            version: 1,
            block_size: rotation.block as u64,
            transform: TRANSFORM.into(),
            axis: AXIS.into(),
            sign_mode: mode.into(),
            widths: signs.keys().map(|&width| width as i64).collect(),
            signs: signs.into_values().flatten().collect(),
            forward_weight_names: rotation.forward.into_iter().collect(),
            inverse_weight_names: rotation.inverse.into_iter().collect(),
            gdn_v_grouped: true,
            activation_f16: false,
        }
    }
}

impl TryFrom<Header> for Hadamard {
    type Error = String;

    fn try_from(header: Header) -> Result<Hadamard, String> {
        let expected = [
            ("version", header.version.to_string(), "1"),
            ("transform", header.transform, TRANSFORM),
            ("axis", header.axis, AXIS),
            ("gdn_v_grouped", header.gdn_v_grouped.to_string(), "true"),
        ];
        for (key, found, expected) in expected {
            if found != expected {
                return Err(format!("prism_hadamard.{key} is {found}, supported: {expected}"));
            }
        }
        let signs = (&header.widths[..], &header.signs[..]);
        let signs = match header.sign_mode.as_str() {
            "explicit" => Some(signs),
            "identity" if header.widths.is_empty() && header.signs.is_empty() => None,
            other => {
                return Err(format!(
                    "prism_hadamard.sign_mode is {other}, supported: explicit, identity"
                ));
            }
        };
        let mut rotation = Hadamard::new(header.block_size, signs).map_err(|err| err.message)?;
        let unique = |names: Vec<String>| {
            let count = names.len();
            let names = BTreeSet::from_iter(names);
            (names.len() == count)
                .then_some(names)
                .ok_or("prism_hadamard: a list names a matrix twice")
        };
        rotation.forward = unique(header.forward_weight_names)?;
        rotation.inverse = unique(header.inverse_weight_names)?;
        match rotation.forward.is_empty() {
            true => Err("prism_hadamard.forward_weight_names is empty".into()),
            false => Ok(rotation),
        }
    }
}

impl Hadamard {
    /// A rotation in blocks of `block` elements. `signs`: the widths, and the signs of all of them one after the other; `None`:
    /// all signs are 1.
    ///
    /// Errors: `UnsupportedFeature` for a block that is not a power of two; `Parse` for widths and values
    /// that do not belong together.
    pub fn new(block: u64, signs: Option<(&[i64], &[f32])>) -> Result<Hadamard> {
        if !block.is_power_of_two() {
            bail!(
                UnsupportedFeature,
                "Hadamard blocks of {block} elements, expected a power of two"
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

    /// Whether there are no signs: all are 1.
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
            bail!(
                Parse,
                "{} Hadamard signs, expected the sum of {} widths",
                values.len(),
                widths.len()
            );
        };
        let (own, others) = rest.split_at(len);
        if signs.insert(len, own.to_vec()).is_some() {
            bail!(Parse, "Hadamard width {width} occurs twice");
        }
        rest = others;
    }
    if !rest.is_empty() {
        bail!(
            Parse,
            "{} Hadamard signs, expected the sum of {} widths",
            values.len(),
            widths.len()
        );
    }
    Ok(signs)
}

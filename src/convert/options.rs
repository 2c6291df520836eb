//! Options and results of a conversion.

use super::loss::{Group, Share};
use super::names::matches;
use super::router_stats::RouterStats;
use crate::dtype::Dtype;
use crate::format::cmf::SplitOptions;
use std::path::Path;

/// The types of a conversion.
///
/// Vectors and tensors of fewer than 32 elements are always f16; see
/// [`storage_dtype`](crate::dtype::encode::storage_dtype) for shapes that a type does not allow.
#[derive(Clone, Debug)]
pub struct Options {
    /// The type of matrices; `None`: quantised matrices keep their values where a type of the container holds them exactly, and
    /// the others are of [`Options::DEFAULT`]. With a type, rotated matrices lose their rotation.
    ///
    /// If it has fewer than 8 bits, the embedding and the output projection are q8_2f. If it has at most 8, the matrices of
    /// routers and gates and the small ones of recurrent layers are f16. With q4tp, the first fifteenth of the layers and the
    /// last are vbit_ro with a mean of 5 bits.
    pub quant: Option<Dtype>,
    /// Types of single tensors, by globs over their names: `*` matches any number of characters, dots included, `?` matches one.
    /// The last matching one decides.
    pub overrides: Vec<(String, Dtype)>,
    /// The mean bits of vbit, 3 to 8. `None`: 5 in the outer layers of q4tp, else
    /// [`Settings::MEAN_BITS`](crate::dtype::encode::Settings::MEAN_BITS), and tensors that are vbit in the source are copied.
    pub mean_bits: Option<f64>,
    /// Weights of the experts that share the bits of vbit.
    pub router_stats: Option<RouterStats>,
    /// Whether a source tensor that would be left out is an error.
    pub strict: bool,
}

impl Options {
    /// The type of matrices that are not kept.
    pub const DEFAULT: Dtype = Dtype::Q4tp;

    /// Matrices as `quant`, and defaults for the rest.
    pub fn new(quant: Dtype) -> Options {
        Options {
            quant: Some(quant),
            ..Options::keeping()
        }
    }

    /// The type of matrices that are not kept.
    pub(super) fn quant(&self) -> Dtype {
        self.quant.unwrap_or(Options::DEFAULT)
    }

    /// The type that an override sets for a tensor of this name.
    pub(super) fn overridden(&self, name: &str) -> Option<Dtype> {
        let mut overrides = self.overrides.iter().rev();
        overrides.find(|(glob, _)| matches(glob, name)).map(|&(_, dtype)| dtype)
    }

    /// The values of quantised matrices, and defaults for the rest.
    pub fn keeping() -> Options {
        Options {
            quant: None,
            overrides: Vec::new(),
            mean_bits: None,
            router_stats: None,
            strict: false,
        }
    }
}

/// The result of a conversion.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Tensors written.
    pub tensors: usize,
    /// Bytes of the file, or of all files.
    pub bytes: u64,
    /// Source tensors that the network does not use, each with the reason.
    pub dropped: Vec<String>,
    /// Remarks for the user.
    pub notes: Vec<String>,
    /// The tensors by role and type, in the order of the file.
    pub groups: Vec<Group>,
    /// Matrices that are quantised in the source, and whose values are written exactly.
    pub kept: Share,
    /// Matrices that are quantised in the source, and whose values were quantised again.
    pub again: Share,
    /// Matrices that are rotated in the source, and not in the file.
    pub unrotated: Share,
}

/// Progress of a conversion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// A tensor was written, or looked at before the first is written.
    Tensor {
        /// Tensors written so far.
        done: usize,
        /// All tensors.
        total: usize,
        /// The tensor.
        name: &'a str,
    },
}

/// Where a converted model goes.
pub enum Target<'a> {
    /// One file.
    One(&'a Path),
    /// Several files. The files that are read are added to its inputs.
    Several(SplitOptions),
}

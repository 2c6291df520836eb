//! A source as the converter sees it: a header, and tensors that can be read row by row.

use super::matrix::Matrix;
use serde_json::{Map, Value};
use std::borrow::Cow;

/// One tensor of a source.
pub(super) struct Tensor<'a> {
    /// The name in the container.
    pub name: String,
    pub data: Matrix<'a>,
}

/// A source.
pub(super) struct Model<'a> {
    pub header: Map<String, Value>,
    /// `tokenizer.json`.
    pub vocab: Option<Cow<'a, [u8]>>,
    pub masks: Option<Masks<'a>>,
    pub tensors: Vec<Tensor<'a>>,
    /// Tensors that the network does not use, each with the reason.
    pub dropped: Vec<String>,
    /// Remarks for the user.
    pub notes: Vec<String>,
}

/// The masks section of a source.
pub(super) struct Masks<'a> {
    pub bytes: &'a [u8],
    /// Whether it has rows for every pass of a looped network.
    pub by_pass: bool,
}

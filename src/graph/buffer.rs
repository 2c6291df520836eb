//! Buffers of activations and state.

use super::matrix::{Piece, Vector};
use crate::error::Result;
use crate::source::{TensorId, Tensors};
use std::sync::Arc;

/// The contents of a buffer before the first run.
#[derive(Clone, Debug, PartialEq)]
pub enum Fill {
    /// Zeros.
    Zero,
    /// These values, then zeros.
    Values(Arc<[f32]>),
    /// The words 0, 1, 2, ... up to this many, then zeros.
    Indices(u32),
    /// `(cos, sin)` of `position * inv_freq[i]`, both times `factor`: `[positions, inv_freq.len()]` pairs of f32.
    Rope {
        /// Radians for one position, one for each pair.
        inv_freq: Vec<f32>,
        /// Factor of cosine and sine (YaRN, LongRoPE).
        factor: f32,
        /// Number of positions.
        positions: u32,
    },
    /// A table of experts, see `shaders/lib/experts.wgsl`.
    Experts {
        /// The words before the experts.
        header: [u32; 8],
        /// The place of each expert, or [`crate::op::ABSENT`].
        places: Vec<u32>,
        /// Biases that are added to the experts' scores for ranking.
        bias: Option<TensorId>,
    },
}

impl Fill {
    /// `[cos, sin, cos, sin, ...]` of one position; empty for other fills. The angle is rounded to f32 first, because
    /// models that are trained in f32 see the rounded angle.
    pub fn rope_row(&self, position: u32) -> Vec<f32> {
        let Fill::Rope { inv_freq, factor, .. } = self else {
            return Vec::new();
        };
        let pair = |freq: &f32| {
            let angle = f64::from(position as f32 * freq);
            [
                (angle.cos() * f64::from(*factor)) as f32,
                (angle.sin() * f64::from(*factor)) as f32,
            ]
        };
        inv_freq.iter().flat_map(pair).collect()
    }

    /// The first words of the buffer; empty for zeros and rotation tables. Errors: as for [`Vector::values`].
    pub fn words(&self, tensors: &dyn Tensors) -> Result<Vec<u32>> {
        let (header, places, bias) = match self {
            Fill::Zero | Fill::Rope { .. } => return Ok(Vec::new()),
            Fill::Values(values) => return Ok(values.iter().map(|value| value.to_bits()).collect()),
            Fill::Indices(count) => return Ok((0..*count).collect()),
            Fill::Experts { header, places, bias } => (header, places, bias),
        };
        let vector = Vector {
            label: String::new(),
            pieces: vec![Piece {
                tensor: *bias,
                len: places.len(),
            }],
            add: 0.0,
        };
        let biases = vector.values(tensors)?;
        let experts = places.iter().zip(&biases);
        let experts = experts.flat_map(|(&place, bias)| [place, bias.to_bits()]);
        Ok(header.iter().copied().chain(experts).collect())
    }
}

/// A buffer of activations or state.
#[derive(Clone, Debug, PartialEq)]
pub struct Buffer {
    /// Its role, as in `decode.qkv` or `layer.07.k`.
    pub label: String,
    /// Its size.
    pub bytes: u64,
    /// Its first contents.
    pub fill: Fill,
}

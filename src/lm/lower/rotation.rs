//! Rotated weights: the transform of inputs and of embeddings as steps.
//!
//! A product with rotated weights reads H(s ⊙ x) instead of x. The transform is linear, so it also commutes with the factor
//! of a norm that the product applies later. It mixes the columns of a block: a product that follows it cannot leave out
//! columns.

use super::builder::Builder;
use super::context::{Lowering, Phase, RotationBuffers, vectors_of};
use crate::error::{Result, bail};
use crate::graph::Fill;
use crate::model::Model;
use crate::op::{self, Bind, BufferId, HADAMARD_TILE};
use crate::source::TensorId;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The buffers; `None` for a network without rotated weights.
pub(super) fn buffers(b: &mut Builder, model: &Model) -> Result<Option<RotationBuffers>> {
    let Some(rotation) = &model.rotation else {
        return Ok(None);
    };
    let (block, most) = (rotation.block, HADAMARD_TILE as usize);
    if block > most {
        bail!(
            UnsupportedFeature,
            "Hadamard blocks of {block} elements, expected at most {most}"
        );
    }
    let mut signs = BTreeMap::new();
    for (&width, values) in &rotation.signs {
        // Rows of all widths share a buffer, and the steps write no padding.
        if !width.is_multiple_of(32) {
            bail!(
                UnsupportedModel,
                "rotated weights of {width} columns, expected a multiple of 32"
            );
        }
        let fill = Fill::Values(Arc::clone(values));
        signs.insert(width, b.buffer(format!("signs.{width}"), width as u64 * 4, fill)?);
    }
    let widest = rotation.signs.keys().copied().max().unwrap_or(0);
    let (width, chunk) = (b.width(), b.options.chunk as usize);
    let rotated = [
        b.rows("decode.rotated", widest, width)?,
        b.rows("prefill.rotated", widest, chunk)?,
    ];
    Ok(Some(RotationBuffers { rotated, signs }))
}

impl Lowering<'_> {
    /// Whether the inputs of products with this weight are rotated.
    pub fn is_rotated(&self, weight: TensorId) -> bool {
        let rotation = self.model.rotation.as_ref();
        rotation.is_some_and(|rotation| rotation.forward.contains(&weight))
    }

    /// The input of products with `weight` of `cols` columns: `x` if the weight is not rotated, else the rotation buffer of
    /// this phase, which a step added here fills. The next rotation in the phase overwrites it.
    pub fn input(
        &mut self,
        phase: Phase,
        label: &str,
        (weight, cols): (TensorId, usize),
        x: BufferId,
    ) -> Result<BufferId> {
        if !self.is_rotated(weight) {
            return Ok(x);
        }
        self.rotate(phase, &format!("{label}.rotate"), cols, false, x, None)
    }

    /// As [`Lowering::input`], in both phases.
    pub fn inputs(&mut self, label: &str, weight: (TensorId, usize), x: [BufferId; 2]) -> Result<[BufferId; 2]> {
        let [decode, prefill] = x;
        Ok([
            self.input(Phase::Decode, label, weight, decode)?,
            self.input(Phase::Prefill, label, weight, prefill)?,
        ])
    }

    /// The buffer for rows of the embedding before they are rotated back; `None` if they are not rotated.
    pub fn rotated_rows(&self, phase: Phase) -> Option<BufferId> {
        let has_rotated_embedding = self.model.rotation.as_ref()?.inverse;
        let buffers = self.rotation.as_ref().filter(|_| has_rotated_embedding)?;
        Some(buffers.rotated[phase as usize])
    }

    /// Adds a step that writes H(s ⊙ x), or if `inverse` s ⊙ H(x), to `to`, or to the rotation buffer of the phase. Returns the
    /// buffer that is written.
    pub fn rotate(
        &mut self,
        phase: Phase,
        label: &str,
        cols: usize,
        inverse: bool,
        x: BufferId,
        to: Option<BufferId>,
    ) -> Result<BufferId> {
        let rotation = self.model.rotation.as_ref().zip(self.rotation.as_ref());
        let Some((block, buffers)) = rotation.map(|(rotation, buffers)| (rotation.block, buffers)) else {
            bail!(Internal, "{label}: the network has no rotation");
        };
        let Some(&signs) = buffers.signs.get(&cols) else {
            bail!(Internal, "{label}: there are no signs for {cols} columns");
        };
        let y = to.unwrap_or(buffers.rotated[phase as usize]);
        let stride = vectors_of(cols);
        let params = op::hadamard::Params {
            x_stride: stride,
            y_stride: stride,
            ..op::hadamard::Params::new((cols / 4) as u32, block as u32, inverse)
        };
        let [batch, x, signs] = [self.scratch[phase as usize].batch, x, signs].map(Bind::Buffer);
        let bindings = op::hadamard::Bindings {
            batch,
            x,
            signs,
            y: Bind::Buffer(y),
        };
        self.emit(phase, label, params, bindings);
        Ok(y)
    }
}

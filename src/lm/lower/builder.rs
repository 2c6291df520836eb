//! Builds the lists of buffers, matrices and vectors of a graph.

use super::options::LowerOptions;
use crate::dtype::planes::Planes;
use crate::error::{Result, bail};
use crate::graph::{self, Buffer, Fill, Matrix, Measured, Paged, Piece, Routed, Stack, Stacking, Vector};
use crate::model::{Ffn, GateUp, Layer, Linear, Model};
use crate::op::{Bind, BufferId, MatrixId, VectorId};
use crate::source::{TensorId, Tensors};

pub(super) struct Builder<'a> {
    pub tensors: &'a dyn Tensors,
    pub options: &'a LowerOptions,
    pub measured: &'a Measured,
    pub buffers: Vec<Buffer>,
    pub matrices: Vec<Matrix>,
    pub vectors: Vec<Vector>,
    pub routed: Vec<Routed>,
    pub paged: Vec<Paged>,
}

impl Builder<'_> {
    /// Tokens that the decoding kernels compute side by side: those of a speculative step, rounded up to a width that
    /// exists.
    pub fn width(&self) -> usize {
        (self.options.drafts + 1).next_power_of_two() as usize
    }

    /// The layers that are lowered: those of the network, and those of the draft head if it is used.
    pub fn layers<'m>(&self, model: &'m Model) -> impl Iterator<Item = &'m Layer> + use<'m> {
        let drafts = self.options.drafts;
        let drafting = model.mtp.iter().filter(move |_| drafts != 0);
        model.layers.iter().chain(drafting.flat_map(|mtp| &mtp.layers))
    }

    /// States that a recurrent layer keeps.
    pub fn kept_states(&self) -> u32 {
        self.options.drafts.saturating_add(1)
    }

    pub fn buffer(&mut self, label: impl Into<String>, bytes: u64, fill: Fill) -> Result<BufferId> {
        let label = label.into();
        // A buffer that a network does not use is bound as well, so it cannot be empty.
        let bytes = bytes.max(1).next_multiple_of(128);
        if bytes > self.options.max_binding {
            let limit = self.options.max_binding;
            bail!(
                OutOfMemory,
                "buffer {label} needs {bytes} bytes, a binding has at most {limit}; a shorter context would help"
            );
        }
        self.buffers.push(Buffer { label, bytes, fill });
        Ok(self.buffers.len() - 1)
    }

    pub fn words(&mut self, label: impl Into<String>, count: usize) -> Result<BufferId> {
        self.buffer(label, count as u64 * 4, Fill::Zero)
    }

    /// Activations of some tokens, each row padded to whole groups of 32.
    pub fn rows(&mut self, label: impl Into<String>, elements: usize, tokens: usize) -> Result<BufferId> {
        self.words(label, elements.next_multiple_of(32) * tokens)
    }

    /// Adds a vector of tensors, or of zeros, and their lengths, or returns an equal vector that exists.
    pub fn vector(&mut self, label: impl Into<String>, pieces: &[(Option<TensorId>, usize)], add: f32) -> VectorId {
        let (label, pieces) = (label.into(), pieces.iter());
        let pieces: Vec<_> = pieces.map(|&(tensor, len)| Piece { tensor, len }).collect();
        let mut known = self.vectors.iter();
        if let Some(known) = known.position(|vector| vector.pieces == pieces && vector.add == add) {
            return known;
        }
        self.vectors.push(Vector { label, pieces, add });
        self.vectors.len() - 1
    }

    /// The biases of sibling projections, one after another; `None` if no sibling has a bias.
    pub fn biases(&mut self, label: String, siblings: &[&Linear]) -> Option<Bind> {
        if siblings.iter().all(|linear| linear.bias.is_none()) {
            return None;
        }
        let pieces: Vec<_> = siblings.iter().map(|linear| (linear.bias, linear.rows)).collect();
        Some(Bind::Vector(self.vector(label, &pieces, 0.0)))
    }

    pub fn planes(&self, tensor: TensorId) -> Result<Planes> {
        graph::planes(self.tensors, tensor)
    }

    pub fn matrix(&mut self, label: &str, tensors: &[TensorId], stacking: Stacking) -> Result<MatrixId> {
        let limit = self.options.max_binding;
        let matrix = Matrix::stack(label.into(), tensors, stacking, self.tensors, limit)?;
        Ok(self.add_matrix(matrix))
    }

    /// A matrix of the slices of a stack, with this layout and number of columns.
    pub fn sliced(&mut self, label: String, of: (Planes, usize), stack: Stack) -> Result<MatrixId> {
        let limit = self.options.max_binding;
        let matrix = Matrix::sliced(label, of, stack, (self.tensors, self.measured), limit)?;
        Ok(self.add_matrix(matrix))
    }

    /// Adds a matrix, or returns an equal one that exists.
    fn add_matrix(&mut self, matrix: Matrix) -> MatrixId {
        let mut known = self.matrices.iter();
        if let Some(known) = known.position(|known| known.is_same(&matrix)) {
            return known;
        }
        self.matrices.push(matrix);
        self.matrices.len() - 1
    }

    /// The layouts of gate and up projections.
    pub fn gate_up_planes(&self, ffn: &Ffn) -> Result<[Planes; 2]> {
        match &ffn.gate_up {
            GateUp::Fused(both) => Ok([self.planes(both.weight)?; 2]),
            GateUp::Split(gate, up) => Ok([self.planes(gate.weight)?, self.planes(up.weight)?]),
        }
    }

    /// Whether gate and up projections have different layouts, so that no kernel computes both.
    pub fn is_unfused(&self, ffn: &Ffn) -> Result<bool> {
        let [gate, up] = self.gate_up_planes(ffn)?;
        Ok(gate != up)
    }
}

//! Builds a graph of a part of a pipeline: buffers, matrices, vectors, and the steps of a program.

use crate::error::{Result, bail};
use crate::graph::{Buffer, Fill, Graph, Matrix, Piece, Program, Stacking, Step, Vector, planes};
use crate::model::Linear;
use crate::op::{self, Bind, Bound, BufferId, Kv, MatrixId, Op, VectorId, batch_len};
use crate::source::{TensorId, Tensors};

/// A graph in the making.
pub(super) struct Builder<'a> {
    pub tensors: &'a dyn Tensors,
    max_binding: u64,
    buffers: Vec<Buffer>,
    matrices: Vec<Matrix>,
    vectors: Vec<Vector>,
    programs: Vec<Program>,
    steps: Vec<Step>,
    taps: Vec<(usize, BufferId)>,
    /// 32 zeros: the bias of products without one.
    zeros: VectorId,
    /// The buffer whose first words are read back after a run. Nothing reads them: it is there to wait for runs.
    readback: BufferId,
}

/// Rows of activations: the batch that counts them, their buffer, and vectors of 4 from one to the next.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub batch: BufferId,
    pub x: BufferId,
}

impl<'a> Builder<'a> {
    pub fn new(tensors: &'a dyn Tensors, max_binding: u64) -> Result<Builder<'a>> {
        let mut builder = Builder {
            tensors,
            max_binding,
            buffers: Vec::new(),
            matrices: Vec::new(),
            vectors: Vec::new(),
            programs: Vec::new(),
            steps: Vec::new(),
            taps: Vec::new(),
            zeros: 0,
            readback: 0,
        };
        builder.zeros = builder.vector("zeros.32", &[(None, 32)]);
        builder.readback = builder.words("readback", 32)?;
        Ok(builder)
    }

    /// A buffer of zeros. Errors: `OutOfMemory` if it is larger than the largest binding.
    pub fn words(&mut self, label: &str, count: usize) -> Result<BufferId> {
        self.filled(label, count, Fill::Zero)
    }

    /// A buffer with other first contents. Errors: as [`Builder::words`].
    pub fn filled(&mut self, label: &str, count: usize, fill: Fill) -> Result<BufferId> {
        let bytes = (count.max(1) as u64 * 4).next_multiple_of(128);
        if bytes > self.max_binding {
            let limit = self.max_binding;
            bail!(
                OutOfMemory,
                "buffer {label} needs {bytes} bytes, a binding has at most {limit}; a smaller image would help"
            );
        }
        let label = label.into();
        self.buffers.push(Buffer { label, bytes, fill });
        Ok(self.buffers.len() - 1)
    }

    /// A row of activations for each token, padded to whole groups of 32 elements, and whole tiles of 8 rows.
    pub fn rows(&mut self, label: &str, elements: usize, tokens: usize) -> Result<BufferId> {
        let elements = elements.next_multiple_of(32);
        self.words(label, elements * tokens.next_multiple_of(8))
    }

    /// A batch whose operators need the number of its tokens only.
    pub fn batch(&mut self, label: &str) -> Result<BufferId> {
        self.words(label, batch_len(1))
    }

    /// A vector of tensors, or of zeros, and their lengths.
    pub fn vector(&mut self, label: &str, pieces: &[(Option<TensorId>, usize)]) -> VectorId {
        let pieces: Vec<_> = pieces.iter().map(|&(tensor, len)| Piece { tensor, len }).collect();
        let mut known = self.vectors.iter();
        if let Some(known) = known.position(|vector| vector.pieces == pieces) {
            return known;
        }
        self.vectors.push(Vector {
            label: label.into(),
            pieces,
            add: 0.0,
        });
        self.vectors.len() - 1
    }

    /// The vector of a tensor.
    pub fn norm(&mut self, label: &str, tensor: TensorId) -> Bind {
        let len = self.tensors.infos()[tensor].rows_cols().1;
        Bind::Vector(self.vector(label, &[(Some(tensor), len)]))
    }

    /// A matrix of stacked tensors, or an equal one that exists. Errors: those of [`Matrix::stack`].
    pub fn matrix(&mut self, label: &str, tensors: &[TensorId], stacking: Stacking) -> Result<MatrixId> {
        let matrix = Matrix::stack(label.into(), tensors, stacking, self.tensors, self.max_binding)?;
        if let Some(known) = self.matrices.iter().position(|known| known.is_same(&matrix)) {
            return Ok(known);
        }
        self.matrices.push(matrix);
        Ok(self.matrices.len() - 1)
    }

    /// Whether two matrices have the same device layout. Errors: `UnsupportedTensorType`.
    pub fn alike(&self, a: &Linear, b: &Linear) -> Result<bool> {
        Ok(planes(self.tensors, a.weight)? == planes(self.tensors, b.weight)?)
    }

    /// The segments of a matrix, each with its binding, and the first stored rows of its tensors.
    pub fn segments(&self, matrix: MatrixId) -> Vec<(Bind, op::matmul::Params)> {
        let segments = self.matrices[matrix].segments.iter().enumerate();
        let shape = |(i, segment): (usize, &crate::graph::Segment)| {
            let params = op::matmul::Params {
                rows: segment.geometry.rows as u32,
                groups: segment.geometry.groups() as u32,
                row0: segment.row0,
                second_row: segment.part_rows[1],
                third_row: segment.part_rows[2],
                ..op::matmul::Params::default()
            };
            (Bind::Weight(matrix, i), params)
        };
        segments.map(shape).collect()
    }

    /// The bias as an operand; zeros if there is none.
    pub fn bias(&self, bias: Option<VectorId>) -> Bind {
        Bind::Vector(bias.unwrap_or(self.zeros))
    }

    /// Adds a step.
    pub fn emit<P: Bound + Into<Op>>(&mut self, label: &str, params: P, bindings: P::Bindings) {
        let bindings: Vec<Bind> = bindings.into();
        let planes = bindings.iter().find_map(|bind| match *bind {
            Bind::Weight(matrix, _) => Some(self.matrices[matrix].planes),
            _ => None,
        });
        self.steps.push(Step {
            label: label.into(),
            op: params.into(),
            planes,
            bindings,
            width: 1,
            conditions: Vec::new(),
            masked: None,
        });
    }

    /// The number of steps so far.
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Lets callers read a buffer at this point.
    pub fn tap(&mut self, buffer: BufferId) {
        self.taps.push((self.steps.len(), buffer));
    }

    /// `y = linear(x)` for the rows of a batch. Errors: as [`Builder::matrix`].
    pub fn linear(&mut self, label: &str, linear: &Linear, rows: Rows, y: BufferId) -> Result<()> {
        self.products(label, &[linear], rows, y)
    }

    /// Sibling projections of the rows of a batch into `y`, one after another. Siblings with the same layout are one matrix.
    /// Errors: as [`Builder::matrix`].
    pub fn products(&mut self, label: &str, siblings: &[&Linear], rows: Rows, y: BufferId) -> Result<()> {
        let total: usize = siblings.iter().map(|linear| linear.rows).sum();
        let pieces: Vec<_> = siblings.iter().map(|linear| (linear.bias, linear.rows)).collect();
        let has_bias = siblings.iter().any(|linear| linear.bias.is_some());
        let bias = has_bias.then(|| self.vector(&format!("{label}.bias"), &pieces));
        let same = siblings.windows(2).map(|pair| self.alike(pair[0], pair[1]));
        let same = same.collect::<Result<Vec<_>>>()?.into_iter().all(|same| same);
        let stacks: Vec<&[&Linear]> = match same && siblings.len() <= 3 {
            true => vec![siblings],
            false => siblings.chunks(1).collect(),
        };
        let mut first = 0;
        for stack in stacks {
            let tensors: Vec<_> = stack.iter().map(|linear| linear.weight).collect();
            let matrix = self.matrix(label, &tensors, Stacking::Rows)?;
            for (w, params) in self.segments(matrix) {
                let params = op::matmul::Params {
                    row0: params.row0 + first,
                    y_stride: vectors_of(total),
                    has_bias: u32::from(has_bias),
                    ..params
                };
                let [batch, x, y] = [rows.batch, rows.x, y].map(Bind::Buffer);
                let bindings = op::matmul::Bindings {
                    w,
                    batch,
                    x,
                    // No step is masked.
                    list: batch,
                    bias: self.bias(bias),
                    y,
                };
                self.emit(label, params, bindings);
            }
            first += stack.iter().map(|linear| linear.rows as u32).sum::<u32>();
        }
        Ok(())
    }

    /// Ends a program.
    pub fn program(&mut self, name: &'static str, output: BufferId) {
        self.programs.push(Program {
            name,
            steps: std::mem::take(&mut self.steps),
            taps: std::mem::take(&mut self.taps),
            output: Some(output),
        });
    }

    /// The graph.
    pub fn finish(self) -> Graph {
        Graph {
            buffers: self.buffers,
            matrices: self.matrices,
            vectors: self.vectors,
            programs: self.programs,
            readback: self.readback,
            kv: Kv::F32,
            width: 1,
            routed: Vec::new(),
            paged: Vec::new(),
        }
    }
}

/// Vectors of 4 in a row of activations, with padding.
pub(super) fn vectors_of(elements: usize) -> u32 {
    (elements.next_multiple_of(32) / 4) as u32
}

//! A graph's buffers, vectors and weights in host memory.

use crate::dtype::{Order, RowDecoder};
use crate::error::{Result, bail};
use crate::graph::{Buffer, Fill, Graph};
use crate::op::host::{Memory, Rows};
use crate::op::{BufferId, MatrixId, VectorId};
use crate::source::{Stored, TensorId, TensorInfo, Tensors, decoder};
use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

/// Buffers and vectors in host memory. Weights stay in their tensors, and steps decode them row by row.
pub struct HostMemory {
    graph: Arc<Graph>,
    tensors: Arc<dyn Tensors>,
    buffers: Vec<Vec<u32>>,
    vectors: Vec<Vec<f32>>,
    /// Payloads of matrices that are no part of a file.
    made: HashMap<TensorId, Made>,
}

/// A payload, and the order of its rows and columns.
type Made = (Vec<u8>, Order);

impl HostMemory {
    /// Creates and fills the buffers and vectors. Errors: faults in the tensors of vectors and tables, and those of making
    /// payloads.
    pub fn new(graph: Arc<Graph>, tensors: Arc<dyn Tensors>) -> Result<HostMemory> {
        let buffers = graph.buffers.iter().map(|buffer| first_contents(buffer, &*tensors));
        let vectors = graph.vectors.iter().map(|vector| vector.values(&*tensors));
        Ok(HostMemory {
            buffers: buffers.collect::<Result<_>>()?,
            vectors: vectors.collect::<Result<_>>()?,
            made: made(&graph, &*tensors)?,
            graph,
            tensors,
        })
    }
}

fn made(graph: &Graph, tensors: &dyn Tensors) -> Result<HashMap<TensorId, Made>> {
    let mut made = HashMap::new();
    for &id in graph.matrices.iter().flat_map(|matrix| &matrix.parts) {
        if !made.contains_key(&id)
            && let Stored {
                bytes: Cow::Owned(bytes),
                order,
                ..
            } = tensors.stored(id)?
        {
            made.insert(id, (bytes, order));
        }
    }
    Ok(made)
}

fn first_contents(buffer: &Buffer, tensors: &dyn Tensors) -> Result<Vec<u32>> {
    let mut words = buffer.fill.words(tensors)?;
    if let Fill::Rope { positions, .. } = buffer.fill {
        let rows = (0..positions).flat_map(|position| buffer.fill.rope_row(position));
        words.extend(rows.map(f32::to_bits));
    }
    words.resize(buffer.bytes as usize / 4, 0);
    Ok(words)
}

impl HostMemory {
    fn decoder(&self, id: TensorId, info: &TensorInfo) -> Result<Box<dyn RowDecoder + '_>> {
        if let Some((bytes, order)) = self.made.get(&id) {
            return decoder(info, bytes, *order);
        }
        match self.tensors.stored(id)? {
            Stored {
                bytes: Cow::Borrowed(bytes),
                order,
                ..
            } => decoder(info, bytes, order),
            _ => bail!(
                Internal,
                "tensor '{}' was not made when the graph was opened",
                info.name
            ),
        }
    }
}

impl Memory for HostMemory {
    fn buffer(&self, buffer: BufferId) -> Option<&[u32]> {
        self.buffers.get(buffer).map(Vec::as_slice)
    }

    fn buffer_mut(&mut self, buffer: BufferId) -> Option<&mut [u32]> {
        self.buffers.get_mut(buffer).map(Vec::as_mut_slice)
    }

    fn vector(&self, vector: VectorId) -> Option<&[f32]> {
        self.vectors.get(vector).map(Vec::as_slice)
    }

    fn weight(&self, matrix: MatrixId, segment: usize) -> Result<Rows<'_>> {
        let found = self.graph.matrices.get(matrix);
        let Some((matrix, segment)) = found.and_then(|matrix| Some((matrix, matrix.segments.get(segment)?))) else {
            bail!(Internal, "the graph has no segment {segment} of matrix {matrix}");
        };
        let mut rows = 0;
        let mut runs = Vec::new();
        for run in &segment.runs {
            let tensor = matrix.parts.get(run.part).copied();
            let Some((id, info)) = tensor.and_then(|id| Some((id, self.tensors.infos().get(id)?))) else {
                bail!(Internal, "{}: a tensor of the matrix does not exist", matrix.label);
            };
            let (tensor_rows, cols) = info.rows_cols();
            if cols != matrix.cols || run.rows.end > tensor_rows {
                bail!(
                    Internal,
                    "{}: expected rows {:?} of {} columns, tensor '{}' is {tensor_rows} x {cols}",
                    matrix.label,
                    run.rows,
                    matrix.cols,
                    info.name
                );
            }
            runs.push(RunRows {
                stored: rows,
                first: run.rows.start,
                decoder: self.decoder(id, info)?,
            });
            rows += run.rows.len();
        }
        Ok(Rows {
            rows,
            cols: matrix.cols,
            decoder: Box::new(SegmentRows(runs)),
        })
    }
}

/// The rows of a segment, in the order in which they are stored. The first run begins at stored row 0.
struct SegmentRows<'a>(Vec<RunRows<'a>>);

/// Rows of one tensor.
struct RunRows<'a> {
    /// The first stored row.
    stored: usize,
    /// The index of the same row in the tensor.
    first: usize,
    decoder: Box<dyn RowDecoder + 'a>,
}

impl RowDecoder for SegmentRows<'_> {
    fn row(&self, row: usize, out: &mut [f32]) {
        let after = self.0.partition_point(|run| run.stored <= row);
        let run = &self.0[after - 1];
        run.decoder.row(run.first + row - run.stored, out);
    }
}

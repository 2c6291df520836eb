//! Makes rigs: buffers that end with words nothing may write, random tensors, steps, and rounds.

use super::random::{Random, Values};
use super::rig::{BATCH, Rig, Round, Rows};
use crate::dtype::Dtype;
use crate::dtype::planes::Planes;
use crate::error::{Result, bail};
use crate::graph::{
    Buffer, Fill, Graph, Masked, Matrix, Measured, Piece, Program, Selection, Slice, Stack, Stacking, Step, SwitchId,
    Vector,
};
use crate::op::{Bind, Binding, BufferId, Kernel, Kv, Op, Token, batch_len};
use crate::source::{MemoryTensors, TensorId, Tensors};
use std::collections::HashMap;
use std::sync::Arc;

/// Words after each buffer's contents that nothing may write.
const FENCE_WORDS: usize = 64;
/// Most tokens of a round.
pub(super) const MOST_TOKENS: u32 = 64;
/// The switch that is on: masked steps run as the masked variant.
const MASK: SwitchId = 0;

/// An operator with these parameters: u32, or the bits of f32, by name. The first value of a name counts, and names that the
/// operator does not declare have no effect.
pub(super) fn op(kernel: Kernel, values: &[(&str, u32)]) -> Result<Op> {
    let spec = kernel.spec();
    let mut words = Vec::new();
    for (name, _) in spec.params {
        match values.iter().find(|value| value.0 == *name) {
            Some((_, word)) => words.push(*word),
            None => bail!(Internal, "the case has no parameter '{name}' for {}", spec.name),
        }
    }
    Ok(kernel.with_bytes(bytemuck::cast_slice(&words)))
}

/// A rig in the making. Steps bind buffers and vectors under their labels, which are the names of the operators' operands;
/// rounds name their inputs the same way.
pub(super) struct Maker {
    pub random: Random,
    /// Tokens that a step with teams computes side by side.
    pub width: usize,
    /// Bytes that the device binds at once.
    max_binding: u64,
    pub graph: Graph,
    selection: Selection,
    operands: HashMap<String, Bind>,
    pub tensors: MemoryTensors,
    rounds: Vec<Round>,
    rows: Vec<Rows>,
}

impl Maker {
    pub fn new(seed: u64, max_binding: u64) -> Maker {
        let mut maker = Maker {
            random: Random(seed << 32),
            width: 1,
            max_binding,
            graph: Graph {
                buffers: Vec::new(),
                matrices: Vec::new(),
                vectors: Vec::new(),
                programs: vec![Program {
                    name: "case",
                    ..Program::default()
                }],
                readback: BATCH,
                kv: Kv::F32,
                width: 1,
                routed: Vec::new(),
                paged: Vec::new(),
            },
            selection: Selection {
                on: vec![true],
                ..Selection::default()
            },
            operands: HashMap::new(),
            tensors: MemoryTensors::default(),
            rounds: Vec::new(),
            rows: Vec::new(),
        };
        maker.buffer("batch", batch_len(MOST_TOKENS as usize));
        maker
    }

    /// The rig.
    pub fn finish(self) -> Rig {
        Rig {
            tensors: Arc::new(self.tensors),
            graph: self.graph,
            selection: self.selection,
            rounds: self.rounds,
            rows: self.rows,
        }
    }

    /// Binds an operand from now on.
    fn bind(&mut self, label: &str, bind: Bind) {
        self.operands.insert(label.into(), bind);
    }

    fn operand(&self, label: &str) -> Result<Bind> {
        match self.operands.get(label) {
            Some(bind) => Ok(*bind),
            None => bail!(Internal, "the case has no operand '{label}'"),
        }
    }

    /// A buffer of so many words, and its fence.
    pub fn buffer(&mut self, label: &str, words: usize) -> BufferId {
        let buffer = self.graph.buffers.len();
        self.graph.buffers.push(Buffer {
            label: label.into(),
            bytes: (words.next_multiple_of(FENCE_WORDS) + FENCE_WORDS) as u64 * 4,
            fill: Fill::Zero,
        });
        self.bind(label, Bind::Buffer(buffer));
        buffer
    }

    /// A buffer with a row of so many words for each of so many tokens.
    pub fn rows(&mut self, label: &str, words: usize, tokens: usize) {
        self.rows_after(label, 0, words, tokens);
    }

    /// The same, with rows that begin after so many words. Returns the buffer.
    pub fn rows_after(&mut self, label: &str, first: usize, words: usize, tokens: usize) -> BufferId {
        let buffer = self.buffer(label, first + words * tokens);
        self.rows.push(Rows { buffer, first, words });
        buffer
    }

    /// Declares more rows of a buffer, one for each token.
    pub fn more_rows(&mut self, buffer: BufferId, first: usize, words: usize) {
        self.rows.push(Rows { buffer, first, words });
    }

    /// A mask list that holds these words, for the steps from now on, which become masked.
    pub fn list(&mut self, words: Vec<u32>) {
        let list = self.buffer("list", words.len());
        self.selection.contents.push((list, words));
    }

    /// A vector of random elements.
    pub fn vector(&mut self, label: &str, len: usize) -> Result<()> {
        let payload = self.random.payload(Dtype::F32, 1, len, Values::PLAIN)?;
        let tensor = self.tensors.add(label.into(), Dtype::F32, vec![len as u64], payload)?;
        self.pieces(label, Some(tensor), len);
        Ok(())
    }

    /// A vector of zeros, for an operand that a step does not use.
    pub fn zeros(&mut self, label: &str) {
        self.pieces(label, None, 32);
    }

    fn pieces(&mut self, label: &str, tensor: Option<TensorId>, len: usize) {
        self.bind(label, Bind::Vector(self.graph.vectors.len()));
        self.graph.vectors.push(Vector {
            label: label.into(),
            pieces: vec![Piece { tensor, len }],
            add: 0.0,
        });
    }

    /// A tensor of random weights.
    pub fn tensor(&mut self, dtype: Dtype, rows: usize, cols: usize, values: Values) -> Result<TensorId> {
        let payload = self.random.payload(dtype, rows, cols, values)?;
        let name = format!("w{}", self.tensors.infos().len());
        self.tensors.add(name, dtype, vec![rows as u64, cols as u64], payload)
    }

    /// The weight of some tensors, in segments of at most `limit` bytes.
    pub fn stack(&mut self, parts: &[TensorId], stacking: Stacking, limit: u64) -> Result<Matrix> {
        let matrix = Matrix::stack("w".into(), parts, stacking, &self.tensors, limit.min(self.max_binding))?;
        self.graph.matrices.push(matrix.clone());
        Ok(matrix)
    }

    /// The weight of some experts: whole tensors, then tensors of which each segment has the same rows.
    pub fn bank(&mut self, planes: Planes, cols: usize, [first, cut]: [&[Slice]; 2], limit: u64) -> Result<Matrix> {
        let stack = Stack { first, cut, pool: &[] };
        let (tensors, limit) = ((&self.tensors as _, &Measured::default()), limit.min(self.max_binding));
        let matrix = Matrix::sliced("experts".into(), (planes, cols), stack, tensors, limit)?;
        self.graph.matrices.push(matrix.clone());
        Ok(matrix)
    }

    /// Adds a step.
    pub fn step(&mut self, params: impl Into<Op>) -> Result<()> {
        self.segment_step(0, params)
    }

    /// Adds a step with a segment of the weight. It is masked if there is a mask list.
    pub fn segment_step(&mut self, segment: usize, params: impl Into<Op>) -> Result<()> {
        let op = params.into();
        let spec = op.kernel().spec();
        let bind = |binding: &Binding| match binding.is_weight() {
            true => Ok(Bind::Weight(0, segment)),
            false => self.operand(binding.name),
        };
        let mut step = Step {
            label: spec.name.into(),
            op,
            planes: spec.has_weight().then(|| self.graph.matrices[0].planes),
            bindings: spec.bindings.iter().map(bind).collect::<Result<_>>()?,
            width: if spec.threads.is_none() { self.width as u32 } else { 1 },
            conditions: Vec::new(),
            masked: None,
        };
        let list = step.buffer("list");
        step.masked = list.map(|list| Masked { switch: MASK, list });
        self.graph.width = self.graph.width.max(step.width);
        self.graph.programs[0].steps.push(step);
        Ok(())
    }

    /// Adds a round with these tokens and inputs.
    pub fn round(&mut self, tokens: Vec<Token>, inputs: Vec<(&str, Vec<u32>)>) -> Result<()> {
        let input = |(label, words)| match self.operand(label)? {
            Bind::Buffer(buffer) => Ok((buffer, words)),
            other => bail!(Internal, "input '{label}' is {other:?}, expected a buffer"),
        };
        let inputs = inputs.into_iter().map(input).collect::<Result<_>>()?;
        self.rounds.push(Round::new(tokens, inputs));
        Ok(())
    }

    /// The same with a name.
    pub fn named_round(&mut self, name: String, tokens: Vec<Token>, inputs: Vec<(&str, Vec<u32>)>) -> Result<()> {
        self.round(tokens, inputs)?;
        if let Some(round) = self.rounds.last_mut() {
            round.name = name;
        }
        Ok(())
    }
}

/// A token of the vocabulary at a position of a slot.
pub(super) fn token(id: u32, slot: u32, position: u32) -> Token {
    Token {
        id,
        slot,
        position,
        ..Token::default()
    }
}

/// So many tokens of the first slot, from a position on.
pub(super) fn sequence(position: u32, count: u32) -> Vec<Token> {
    let positions = position..position + count;
    positions.map(|position| token(0, 0, position)).collect()
}

/// Runs of so many tokens of the first slot from these positions on.
pub(super) fn sequences(runs: &[(u32, u32)]) -> Vec<Vec<Token>> {
    runs.iter()
        .map(|&(position, count)| sequence(position, count))
        .collect()
}

/// Tokens with these slots and positions.
pub(super) fn tokens_at(places: &[(u32, u32)]) -> Vec<Token> {
    let tokens = places.iter().map(|&(slot, position)| token(0, slot, position));
    tokens.collect()
}

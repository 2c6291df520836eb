//! A case as executors run it: a graph of a few steps, made-up tensors, and the rounds that run it.

use super::judge::UNSET;
use crate::graph::{Graph, Selection};
use crate::op::{BatchShape, BufferId, Token, batch_words};
use crate::source::Tensors;
use std::sync::Arc;

/// The buffer that holds a rig's batch.
pub const BATCH: BufferId = 0;

/// A graph whose first program is the case, and its rounds.
#[derive(Clone)]
pub struct Rig {
    /// The graph.
    pub graph: Graph,
    /// Which variants of the steps run; contents of mask lists.
    pub selection: Selection,
    /// The tensors of its matrices and vectors.
    pub tensors: Arc<dyn Tensors>,
    /// The runs.
    pub rounds: Vec<Round>,
    /// The rows that buffers have for each token. Empty for operators that do not compute token by token.
    pub rows: Vec<Rows>,
}

/// Rows of a buffer, one for each token of a run, one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// The buffer.
    pub buffer: BufferId,
    /// Word at which the first token's row begins.
    pub first: usize,
    /// Words of a row.
    pub words: usize,
}

/// One run of a rig's program.
#[derive(Clone, Debug)]
pub struct Round {
    /// The name in reports.
    pub name: String,
    /// The tokens of its batch.
    pub tokens: Vec<Token>,
    /// First words of buffers. Every other word of every buffer is a NaN that no kernel computes.
    pub inputs: Vec<(BufferId, Vec<u32>)>,
}

impl Round {
    /// A round that is named after its tokens.
    pub fn new(tokens: Vec<Token>, inputs: Vec<(BufferId, Vec<u32>)>) -> Round {
        let place = |token: &Token| match token.slot {
            0 => token.position.to_string(),
            slot => format!("{} of slot {slot}", token.position),
        };
        let places: Vec<_> = tokens.iter().map(place).collect();
        Round {
            name: match &places[..] {
                [] => "no tokens".into(),
                [one] => format!("position {one}"),
                [first, .., last] if is_sequence(&tokens) => format!("positions {first} to {last}"),
                all => format!("positions {}", all.join(", ")),
            },
            tokens,
            inputs,
        }
    }

    /// The shape of its batch.
    pub fn shape(&self) -> BatchShape {
        BatchShape {
            tokens: self.tokens.len() as u32,
            end: self.tokens.iter().map(|token| token.position + 1).max().unwrap_or(0),
        }
    }
}

/// Whether each token directly follows the one before it.
fn is_sequence(tokens: &[Token]) -> bool {
    let follows = |pair: &[Token]| pair[0].slot == pair[1].slot && pair[0].position + 1 == pair[1].position;
    tokens.windows(2).all(follows)
}

impl Rig {
    /// The contents of a buffer before a round.
    pub fn contents(&self, round: &Round, buffer: BufferId) -> Vec<u32> {
        let mut words = vec![UNSET; self.words(buffer)];
        let mut set = |input: &[u32]| words[..input.len()].copy_from_slice(input);
        if buffer == BATCH {
            set(&batch_words(&round.tokens));
        }
        let inputs = self.selection.contents.iter().chain(&round.inputs);
        inputs.filter(|(id, _)| *id == buffer).for_each(|(_, input)| set(input));
        words
    }

    /// Words of a buffer.
    pub fn words(&self, buffer: BufferId) -> usize {
        self.graph.buffers[buffer].bytes as usize / 4
    }

    /// Whether a buffer has a row for each token.
    pub fn has_rows(&self, buffer: BufferId) -> bool {
        self.rows.iter().any(|rows| rows.buffer == buffer)
    }

    /// A buffer by its label.
    pub fn buffer(&self, label: &str) -> Option<BufferId> {
        self.graph.buffers.iter().position(|buffer| buffer.label == label)
    }
}

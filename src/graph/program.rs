//! Graphs, their programs and steps, and selections of the steps that run.

use super::buffer::Buffer;
use super::matrix::{Matrix, Vector};
use super::paged::{Paged, Routed};
use crate::dtype::planes::Planes;
use crate::op::{Access, Bind, BufferId, Grid, Kv, Op};

/// Bytes reserved for a step's parameters: the largest offset alignment that WebGPU lets a device require.
pub const PARAMS_SLOT: u64 = 256;

/// Index of a switch. A [`Selection`] turns switches on and off.
pub type SwitchId = usize;

/// A step runs only while a switch is in this position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Condition {
    /// The switch.
    pub switch: SwitchId,
    /// The position.
    pub on: bool,
}

/// How a step can run as the masked variant of its operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Masked {
    /// The masked variant runs while this switch is on.
    pub switch: SwitchId,
    /// The buffer that is bound as `list`. Its first two words limit the grid.
    pub list: BufferId,
}

/// One dispatch.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Its role, as in `layer.07.attn.q`.
    pub label: String,
    /// The operator with its parameters.
    pub op: Op,
    /// The layout of its weight's planes.
    pub planes: Option<Planes>,
    /// Its bindings, in the order of the operator's declaration.
    pub bindings: Vec<Bind>,
    /// For operators of decoding the largest number of tokens: 1, 2, 4 or 8. Wide operators always compute this
    /// number side by side; those of experts compute as many as the run has. Other operators ignore it and compute
    /// every token of the run.
    pub width: u32,
    /// The step runs only while all of these are true.
    pub conditions: Vec<Condition>,
    /// How it can run as the masked variant, if it can.
    pub masked: Option<Masked>,
}

impl Step {
    /// The binding with a name of the operator's declaration.
    pub fn bind(&self, name: &str) -> Option<Bind> {
        let position = self.op.kernel().spec().position(name)?;
        self.bindings.get(position).copied()
    }

    /// The buffer that is bound to a name.
    pub fn buffer(&self, name: &str) -> Option<BufferId> {
        match self.bind(name) {
            Some(Bind::Buffer(buffer)) => Some(buffer),
            _ => None,
        }
    }

    /// The buffers that are bound: name, buffer, access.
    pub fn buffers(&self) -> impl Iterator<Item = (&'static str, BufferId, Access)> {
        let declared = self.op.kernel().spec().bindings.iter().zip(&self.bindings);
        declared.filter_map(|(binding, bind)| match *bind {
            Bind::Buffer(buffer) => Some((binding.name, buffer, binding.access)),
            _ => None,
        })
    }
}

/// A list of steps that is run as a whole.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Program {
    /// The name in reports.
    pub name: &'static str,
    /// The steps, in order.
    pub steps: Vec<Step>,
    /// Intermediate results that callers can read, such as a layer's output: the number of steps after which a buffer
    /// holds one, and the buffer.
    pub taps: Vec<(usize, BufferId)>,
    /// The buffer with the result, if callers read one.
    pub output: Option<BufferId>,
}

/// Buffers, weights and programs: all that an executor needs.
#[derive(Clone, Debug)]
pub struct Graph {
    /// Buffers of activations and state.
    pub buffers: Vec<Buffer>,
    /// Weights.
    pub matrices: Vec<Matrix>,
    /// Norm weights and biases.
    pub vectors: Vec<Vector>,
    /// The programs. Those without steps are never run.
    pub programs: Vec<Program>,
    /// The buffer whose first [`super::READBACK_WORDS`] words are read back after a run.
    pub readback: BufferId,
    /// Element type of the key-value cache.
    pub kv: Kv,
    /// Largest number of tokens in a decoding run.
    pub width: u32,
    /// Mixtures whose choices are counted.
    pub routed: Vec<Routed>,
    /// Paged banks of experts.
    pub paged: Vec<Paged>,
}

/// Which steps run, and the contents of buffers for that. Only the code that built the graph gives switches a meaning.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Selection {
    /// The position of every switch. Switches past the end are off.
    pub on: Vec<bool>,
    /// The first words of buffers, such as mask lists.
    pub contents: Vec<(BufferId, Vec<u32>)>,
    /// The experts that may be chosen, for tables of paged banks. Tables that are not listed allow all.
    pub allowed: Vec<(BufferId, Vec<bool>)>,
}

/// How a selection runs one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// Index of the step in its program.
    pub step: usize,
    /// Whether the masked variant runs.
    pub masked: bool,
    /// Its grid.
    pub grid: Grid,
    /// The share of the weight, or of the heads in the caches, that the masked variant reads: numerator and
    /// denominator. `None` for the plain variant.
    pub share: Option<[u64; 2]>,
}

impl Selection {
    /// Whether a switch is on.
    pub fn is_on(&self, switch: usize) -> bool {
        self.on.get(switch) == Some(&true)
    }

    /// Whether an expert of a paged bank may be chosen.
    pub fn allows(&self, table: BufferId, expert: usize) -> bool {
        let allowed = self.allowed.iter().find(|(buffer, _)| *buffer == table);
        allowed.is_none_or(|(_, allowed)| allowed.get(expert) != Some(&false))
    }

    /// How the selection runs a step; `None` if the step does not run.
    pub fn resolve(&self, index: usize, step: &Step) -> Option<Resolved> {
        let mut conditions = step.conditions.iter();
        let runs = conditions.all(|condition| self.is_on(condition.switch) == condition.on);
        let masked = step.masked.filter(|masked| self.is_on(masked.switch));
        let counts = masked.map(|masked| self.counts(masked.list));
        runs.then(|| Resolved {
            step: index,
            masked: masked.is_some(),
            grid: counts.map_or(step.op.grid(), |counts| step.op.masked_grid(counts)),
            share: counts.map(|counts| step.op.masked_share(counts)),
        })
    }

    /// The first two words of a list.
    fn counts(&self, list: BufferId) -> [u32; 2] {
        let list = self.contents.iter().find(|(buffer, _)| *buffer == list);
        match list.map(|(_, words)| &words[..]) {
            Some([first, second, ..]) => [*first, *second],
            _ => [0, 0],
        }
    }
}

impl Program {
    /// The steps that a selection runs.
    pub fn resolve(&self, selection: &Selection) -> Vec<Resolved> {
        let steps = self.steps.iter().enumerate();
        steps.filter_map(|(i, step)| selection.resolve(i, step)).collect()
    }
}

impl Graph {
    /// Bytes of all weights on the device.
    pub fn weight_bytes(&self) -> u64 {
        let segments = self.matrices.iter().flat_map(|matrix| &matrix.segments);
        let matrices = segments.map(|segment| segment.geometry.data_bytes());
        let vectors = self.vectors.iter().map(|vector| vector.padded_len() as u64 * 4);
        matrices.sum::<u64>() + vectors.sum::<u64>()
    }

    /// Bytes of all buffers on the device, including those of the steps' parameters.
    pub fn buffer_bytes(&self) -> u64 {
        let buffers: u64 = self.buffers.iter().map(|buffer| buffer.bytes).sum();
        let steps: usize = self.programs.iter().map(|program| program.steps.len()).sum();
        buffers + steps as u64 * PARAMS_SLOT
    }
}

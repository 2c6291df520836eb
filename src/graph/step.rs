//! Steps: one dispatch each, with the conditions under which it runs.

use crate::dtype::planes::Planes;
use crate::op::{Access, Bind, BufferId, Op};

/// Index of a switch. A [`super::Selection`] turns switches on and off.
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

//! Task masks: the switches of a graph that a mask turns on, and the lists that masked steps read.
//!
//! A mask leaves out units: neurons, query heads or experts. If any mask of the model leaves out units that a step
//! computes, lowering gives the step a switch and a list. Selecting a mask sets the switches and fills the lists. The
//! graph does not change. Without a mask it runs the plain variants.

use crate::error::{Result, bail};
use crate::graph::{Graph, Selection, SwitchId, table_words};
use crate::op::{BufferId, LOWEST, TABLE_HEADER, blocks_list, heads_list, outputs_list};
use crate::source::Mask;
pub use crate::source::MaskAxis;

/// Elements that several units use together and that follow the units' own elements: the keys and values of query
/// heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shared {
    /// Consecutive units that use one of them together.
    pub by: usize,
    /// Number of elements of one.
    pub per: usize,
    /// How many there are. After this number they are counted from 0 again, as values follow keys.
    pub count: usize,
}

/// The units of the rows or columns of a weight: element i belongs to unit (first + i) / per if first + i is less
/// than `limit`. Other elements belong to no unit or to several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Axis {
    /// Index of the first element.
    pub first: usize,
    /// Number of elements.
    pub len: usize,
    /// Elements of a unit.
    pub per: usize,
    /// Number of elements that belong to one unit each.
    pub limit: usize,
    /// The units of the other elements. `None`: no mask leaves them out.
    pub shared: Option<Shared>,
}

impl Axis {
    /// Elements of `units` units, with `per` elements each.
    pub fn of(units: usize, per: usize) -> Axis {
        Axis {
            per,
            limit: units * per,
            ..Axis::whole((units * per) as u32)
        }
    }

    /// Elements that no mask leaves out.
    pub fn whole(len: u32) -> Axis {
        Axis {
            first: 0,
            len: len as usize,
            per: 1,
            limit: 0,
            shared: None,
        }
    }

    fn is_active(&self, i: usize, active: &dyn Fn(usize) -> bool) -> bool {
        let at = self.first + i;
        match (at.checked_sub(self.limit), self.shared) {
            (None, _) => active(at / self.per.max(1)),
            (Some(_), None) => true,
            (Some(behind), Some(shared)) => {
                let number = behind / shared.per.max(1) % shared.count.max(1);
                (number * shared.by..(number + 1) * shared.by).any(active)
            }
        }
    }

    /// Whether group number `group` of `size` elements has an active element.
    fn has_active(&self, size: usize, group: usize, active: &dyn Fn(usize) -> bool) -> bool {
        let mut elements = group * size..self.len.min((group + 1) * size);
        elements.any(|i| self.is_active(i, active))
    }
}

/// The contents of a buffer that a mask fills.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// A list of outputs, as the masked `matvec_glu` reads it.
    Outputs(Axis),
    /// A list of blocks of rows and of groups of columns, as the masked matvec and matmul operators read it.
    Listed([Axis; 2]),
    /// A list of query heads, as the masked attention operators read it.
    Heads { heads: usize, kv_heads: usize },
    /// Bits, as `zero_masked` reads them.
    Bits(Axis),
    /// The biases of the logits of this number of experts.
    Logits(usize),
    /// The table of experts; these words are the table without a mask.
    Table(Vec<u32>),
}

impl Content {
    /// Experts of a table; 0 for other contents.
    fn experts(&self) -> usize {
        match self {
            Content::Table(words) => words.len().saturating_sub(TABLE_HEADER) / 2,
            _ => 0,
        }
    }

    /// The words of the buffer. `active`: whether a unit is computed.
    pub fn words(&self, active: &dyn Fn(usize) -> bool) -> Vec<u32> {
        match self {
            Content::Outputs(axis) => outputs_list(axis.len, &|output| axis.is_active(output, active)),
            Content::Listed([rows, cols]) => blocks_list(
                (rows.len.div_ceil(4), &|block| rows.has_active(4, block, active)),
                (cols.len.div_ceil(32), &|group| cols.has_active(32, group, active)),
            ),
            Content::Heads { heads, kv_heads } => heads_list(*heads, *kv_heads, active),
            Content::Bits(axis) => {
                let mut words = vec![0; axis.len.div_ceil(32)];
                for i in (0..axis.len).filter(|&i| axis.is_active(i, active)) {
                    words[i / 32] |= 1 << (i % 32);
                }
                words
            }
            Content::Logits(experts) => {
                let left_out = |expert: usize| expert < *experts && !active(expert);
                let added = |expert| if left_out(expert) { LOWEST } else { 0.0 };
                // The weight of the shared expert may be one more output of the router.
                let all = 0..(experts + 1).next_multiple_of(32);
                all.map(|expert| added(expert).to_bits()).collect()
            }
            Content::Table(whole) => table_words(whole, active),
        }
    }
}

/// A buffer that a mask fills.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    /// The layer invocation, which is the row of the mask.
    pub invocation: usize,
    pub axis: MaskAxis,
    pub buffer: BufferId,
    pub content: Content,
}

/// One application of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invocation {
    pub layer: usize,
    /// Its units of each [`MaskAxis`]; `None` if kernels cannot leave them out.
    pub units: [Option<usize>; 3],
}

/// The meaning of a switch of the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Switch {
    /// On if the mask leaves out the layer.
    LayerOff(usize),
    /// On if the mask leaves out units of this kind in this layer invocation.
    Restricted(usize, MaskAxis),
}

/// The units that the masks of a model can leave out, and the switches and buffers of the graph for that.
#[derive(Clone, Debug, Default)]
pub struct Masking {
    /// The meaning of each switch of the graph.
    pub switches: Vec<Switch>,
    /// The buffers that a mask fills.
    pub targets: Vec<Target>,
    /// The layer invocations, in order.
    pub invocations: Vec<Invocation>,
}

/// Whether a mask leaves out any of the first `units` units of a kind.
pub(super) fn restricts(mask: &Mask, invocation: usize, axis: MaskAxis, units: usize) -> bool {
    (0..units).any(|unit| !mask.unit(axis, invocation, unit))
}

impl Masking {
    /// The index of a switch, which is added if it is new.
    pub(super) fn switch(&mut self, switch: Switch) -> SwitchId {
        match self.switches.iter().position(|known| *known == switch) {
            Some(known) => known,
            None => {
                self.switches.push(switch);
                self.switches.len() - 1
            }
        }
    }

    /// The selection for a mask that [`Masking::check`] accepts, or for none. For the tables of paged banks it has the
    /// allowed experts and no words: executors write these tables, because they know which slots hold which experts.
    pub(super) fn selection(&self, mask: Option<&Mask>, graph: &Graph) -> Selection {
        let is_on = |mask: &Mask, switch| match switch {
            Switch::LayerOff(layer) => !mask.layer(layer),
            Switch::Restricted(invocation, axis) => {
                let units = self.invocations[invocation].units[axis as usize];
                restricts(mask, invocation, axis, units.unwrap_or(0))
            }
        };
        let on = self.switches.iter();
        let mut selection = Selection {
            on: on.map(|&switch| mask.is_some_and(|mask| is_on(mask, switch))).collect(),
            ..Selection::default()
        };
        for target in &self.targets {
            let active = |unit| mask.is_none_or(|mask| mask.unit(target.axis, target.invocation, unit));
            match graph.paged.iter().any(|paged| paged.tables.contains(&target.buffer)) {
                true => {
                    let allowed = (0..target.content.experts()).map(active).collect();
                    selection.allowed.push((target.buffer, allowed));
                }
                false => selection.contents.push((target.buffer, target.content.words(&active))),
            }
        }
        selection
    }

    /// Checks that a mask belongs to this model and leaves out only units that kernels can leave out. Errors: `Usage`
    /// for a mask of another model; `UnsupportedModel`, with the layer.
    pub(super) fn check(&self, mask: &Mask) -> Result<()> {
        let shape = mask.shape();
        let layers = self.invocations.iter().map(|of| of.layer + 1).max().unwrap_or(0);
        if shape.layers != layers || ![layers, self.invocations.len()].contains(&shape.rows) {
            bail!(
                Usage,
                "mask '{}' belongs to another model: it has {} layers, expected {layers}",
                mask.name,
                shape.layers
            );
        }
        let computed = self.invocations.iter().enumerate();
        for (number, invocation) in computed.filter(|(_, invocation)| mask.layer(invocation.layer)) {
            for (axis, most) in MaskAxis::ALL.into_iter().zip([shape.ffn, shape.heads, shape.experts]) {
                let units = invocation.units[axis as usize];
                // Masks have bits of experts for layers without experts too.
                let of_no_use = units.is_none() && axis == MaskAxis::Experts;
                if of_no_use || !restricts(mask, number, axis, units.unwrap_or(most)) {
                    continue;
                }
                let (name, layer) = (&mask.name, invocation.layer);
                match (units, axis) {
                    // The format has one row of bits for a layer, as wide as a dense network.
                    (None, MaskAxis::Neurons) => bail!(
                        UnsupportedModel,
                        "mask '{name}' restricts the neurons of layer {layer}, which is a mixture of experts: expected a \
                         dense layer, because the format does not define which neurons of the experts the {most} bits \
                         stand for; the model can run without a mask"
                    ),
                    (None, _) => bail!(
                        UnsupportedModel,
                        "mask '{name}' restricts the heads of layer {layer}, which has no softmax attention: the format \
                         does not define which heads of a recurrence the {most} bits stand for; the model can run \
                         without a mask"
                    ),
                    (Some(_), _) if !self.targets.iter().any(|t| (t.invocation, t.axis) == (number, axis)) => bail!(
                        Usage,
                        "mask '{name}' belongs to another model: it restricts units of layer {layer} that no mask of this \
                         model restricts"
                    ),
                    (Some(_), _) => {}
                }
            }
        }
        Ok(())
    }
}

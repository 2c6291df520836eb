//! Task masks as a choice among planned steps, and as lists that kernels read.
//!
//! Where a mask of the model restricts something, both ways to compute it are planned: whole, and with a list of what is left.
//! A mask then decides which of them run and fills the lists; nothing else changes, and without a mask the steps are those of
//! a model that has none.

use super::{ABSENT, BufferId, Grid, Plan, Program, Step, Which};
use crate::container::Mask;
use crate::error::{Result, bail};
use crate::kernel::Op;
use std::ops::Range;

/// Added to the logit of an expert that may not be chosen; finite, as fast math may not honour infinities.
const NEVER: f32 = -3.0e38;
/// Words of a list before its entries; see `shaders/lib/listed.wgsl`.
const LIST_HEAD: usize = 4;
/// Words of a table of experts before the experts; see `shaders/lib/experts.wgsl`.
const TABLE_HEAD: usize = 8;

/// What a mask restricts in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Neurons of the feed-forward network.
    Neurons,
    /// Query heads.
    Heads,
    /// Experts of a mixture.
    Experts,
}

/// When steps run, by the mask in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// The layer is on.
    Layer(usize),
    /// The layer is off.
    Bypass(usize),
    /// All units of this part are active at this visit.
    Whole(usize, Part),
    /// Some are not.
    Some(usize, Part),
}

/// What several units of a mask share, behind the units themselves: keys and values of query heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shared {
    /// Neighbouring units that share one.
    pub by: usize,
    /// Elements of one.
    pub per: usize,
    /// How many there are; after so many they begin anew, as values follow keys.
    pub count: usize,
}

/// Where the units of a mask lie along rows or columns: element i of `len` belongs to unit (first + i) / per; elements from
/// `limit` on belong to none, or to several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Axis {
    /// Number of the first element.
    pub first: usize,
    /// How many elements.
    pub len: usize,
    /// Elements of a unit.
    pub per: usize,
    /// Elements that belong to units.
    pub limit: usize,
    /// To which units the others belong; `None`: no mask restricts them.
    pub shared: Option<Shared>,
}

impl Axis {
    /// So many units of so many elements each, and nothing else.
    pub fn of(units: usize, per: usize) -> Axis {
        Axis {
            per,
            limit: units * per,
            ..Axis::whole(units * per)
        }
    }

    /// Elements that no mask restricts.
    pub fn whole(len: usize) -> Axis {
        Axis {
            first: 0,
            len,
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

    /// Numbers of the groups of `size` elements, those with an active element first, and how many these are.
    fn groups(&self, size: usize, active: &dyn Fn(usize) -> bool) -> (Vec<u32>, u32) {
        let on = |group: &usize| {
            let mut elements = group * size..self.len.min((group + 1) * size);
            elements.any(|i| self.is_active(i, active))
        };
        let (mut some, others): (Vec<usize>, Vec<usize>) = (0..self.len.div_ceil(size)).partition(on);
        let count = some.len() as u32;
        some.extend(others);
        (some.into_iter().map(|group| group as u32).collect(), count)
    }
}

/// What a mask makes of a buffer.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// A list of outputs, as `matvec_glu_some` reads it.
    Outputs(Axis),
    /// A list of blocks of rows and of units of columns, as `matvec_some` and `matvec_add_some` read it.
    Listed {
        /// Rows of the segment.
        rows: Axis,
        /// Columns.
        cols: Axis,
    },
    /// A list of query heads, as `attn_block_some`, `attn_merge_some` and `attn_chunk_some` read it; behind their count that of
    /// the key-value heads that they read.
    Heads {
        /// Query heads.
        heads: u32,
        /// Key-value heads.
        kv_heads: u32,
    },
    /// Bits, as `silence` reads them.
    Bits(Axis),
    /// What is added to the logits of so many experts.
    Logits(usize),
    /// The table of experts, here without a mask.
    Table(Vec<u32>),
}

impl Content {
    /// Words of the buffer.
    #[allow(clippy::len_without_is_empty, reason = "no buffer is empty")]
    pub fn len(&self) -> usize {
        match self {
            Content::Outputs(axis) => LIST_HEAD + axis.len,
            Content::Listed { rows, cols } => LIST_HEAD + cols.len.div_ceil(32) + rows.len.div_ceil(4),
            Content::Heads { heads, .. } => LIST_HEAD + *heads as usize,
            Content::Bits(axis) => axis.len.div_ceil(32),
            Content::Logits(experts) => experts.next_multiple_of(32),
            Content::Table(words) => words.len(),
        }
    }

    /// Experts of a table; 0 for anything else.
    fn experts(&self) -> usize {
        match self {
            Content::Table(words) => words.len().saturating_sub(TABLE_HEAD) / 2,
            _ => 0,
        }
    }

    /// What the buffer holds when units are active as `active` says.
    pub fn words(&self, active: &dyn Fn(usize) -> bool) -> Vec<u32> {
        match self {
            Content::Outputs(axis) => {
                let (outputs, count) = axis.groups(1, active);
                [&[count, 0, 0, 0], &outputs[..]].concat()
            }
            Content::Listed { rows, cols } => {
                let (blocks, block_count) = rows.groups(4, active);
                let (units, unit_count) = cols.groups(32, active);
                let head = [block_count, unit_count, (LIST_HEAD + units.len()) as u32, 0];
                [&head, &units[..], &blocks[..]].concat()
            }
            Content::Heads { heads, kv_heads } => {
                let (all, count) = Axis::of(*heads as usize, 1).groups(1, active);
                let by = heads.checked_div(*kv_heads).unwrap_or(0) as usize;
                let (_, kv_count) = Axis::of(*heads as usize, 1).groups(by.max(1), active);
                [&[count, kv_count, 0, 0], &all[..]].concat()
            }
            Content::Bits(axis) => {
                let mut words = vec![0; self.len()];
                for i in (0..axis.len).filter(|&i| axis.is_active(i, active)) {
                    words[i / 32] |= 1 << (i % 32);
                }
                words
            }
            Content::Logits(experts) => {
                let added = |expert: usize| {
                    if expert < *experts && !active(expert) {
                        NEVER
                    } else {
                        0.0
                    }
                };
                (0..self.len()).map(|expert| added(expert).to_bits()).collect()
            }
            Content::Table(whole) => {
                let (head, experts) = whole.split_at(TABLE_HEAD.min(whole.len()));
                let mut words = head.to_vec();
                let pairs: Vec<&[u32]> = experts.chunks_exact(2).collect();
                // Where fewer may be chosen than a token takes, others fill its slots with a weight of zero; they stand for
                // one that may be chosen, so that no weights of others are read.
                let stand_in = (0..pairs.len())
                    .filter(|&expert| active(expert))
                    .find_map(|expert| Some(pairs[expert][0]).filter(|&place| place != ABSENT));
                for (expert, pair) in pairs.iter().enumerate() {
                    match active(expert) {
                        true => words.extend(*pair),
                        false => words.extend([stand_in.unwrap_or(ABSENT), NEVER.to_bits()]),
                    }
                }
                words
            }
        }
    }
}

/// A buffer that a mask fills.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    /// The visit whose row of the mask is meant.
    pub visit: usize,
    /// What of it.
    pub part: Part,
    /// The buffer.
    pub buffer: BufferId,
    /// What it holds.
    pub content: Content,
}

/// What a mask can restrict at a visit of a layer; `None`: nothing that kernels could leave out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visit {
    /// The layer.
    pub layer: usize,
    /// Neurons of its feed-forward network.
    pub neurons: Option<usize>,
    /// Its query heads.
    pub heads: Option<usize>,
    /// Its experts.
    pub experts: Option<usize>,
}

impl Visit {
    fn units(&self, part: Part) -> Option<usize> {
        match part {
            Part::Neurons => self.neurons,
            Part::Heads => self.heads,
            Part::Experts => self.experts,
        }
    }
}

/// Everything that masks choose from.
#[derive(Clone, Debug, Default)]
pub struct Masking {
    /// The programs with all alternatives, by [`Which`] order.
    pub programs: [Program; Which::ALL.len()],
    /// The buffers that a mask fills.
    pub targets: Vec<Target>,
    /// The visits of layers.
    pub visits: Vec<Visit>,
}

/// Whether a unit is active.
fn is_active(mask: &Mask, visit: usize, part: Part, unit: usize) -> bool {
    match part {
        Part::Neurons => mask.ffn(visit, unit),
        Part::Heads => mask.head(visit, unit),
        Part::Experts => mask.expert(visit, unit),
    }
}

/// Whether a mask leaves out any of the first `units` units of a part.
pub(super) fn restricts(mask: &Mask, visit: usize, part: Part, units: usize) -> bool {
    (0..units).any(|unit| !is_active(mask, visit, part, unit))
}

impl Program {
    /// The steps that run where `holds` says which conditions hold, with their numbers among all.
    pub(super) fn chosen(&self, holds: &dyn Fn(When) -> bool) -> Program {
        let mut keep = vec![true; self.steps.len()];
        for (range, when) in &self.conditions {
            if !holds(*when) {
                keep[range.clone()].fill(false);
            }
        }
        if self.conditions.is_empty() {
            return self.clone();
        }
        let kept: Vec<usize> = (0..keep.len()).filter(|&step| keep[step]).collect();
        let before = |end: &usize| kept.partition_point(|step| step < end);
        Program {
            steps: kept.iter().map(|&step| self.steps[step].clone()).collect(),
            layer_ends: self.layer_ends.iter().map(before).collect(),
            hidden: self.hidden.clone(),
            logits: self.logits,
            conditions: Vec::new(),
            numbers: kept,
            shares: Vec::new(),
        }
    }

    /// The condition of the steps of a range.
    pub(super) fn only(&mut self, range: Range<usize>, when: When) {
        if !range.is_empty() {
            self.conditions.push((range, when));
        }
    }
}

impl Plan {
    /// The programs with everything that masks may choose from; without masks those that run.
    pub fn planned(&self) -> &[Program; Which::ALL.len()] {
        self.masking
            .as_ref()
            .map_or(&self.programs, |masking| &masking.programs)
    }

    /// The plan with this mask in force, or none. Buffers and weights are the same; a mask that is open everywhere is as none.
    /// A draft head's own layers are no mask's to restrict.
    ///
    /// Errors: `UnsupportedModel` when the mask restricts what no kernel can leave out, with layer and part; `Usage` for a
    /// mask of another model.
    pub fn with_mask(&self, mask: Option<&Mask>) -> Result<Plan> {
        let mask = mask.filter(|mask| !mask.is_open());
        let Some(masking) = &self.masking else {
            match mask {
                None => return Ok(self.clone()),
                Some(mask) => bail!(Usage, "mask '{}' is of another model: this one has none", mask.name),
            }
        };
        if let Some(mask) = mask {
            masking.check(mask)?;
        }
        let restricted = |visit: usize, part: Part| {
            let units = masking.visits.get(visit).and_then(|visit| visit.units(part));
            mask.is_some_and(|mask| restricts(mask, visit, part, units.unwrap_or(0)))
        };
        let holds = |when: When| match when {
            When::Layer(layer) => mask.is_none_or(|mask| mask.layer(layer)),
            When::Bypass(layer) => mask.is_some_and(|mask| !mask.layer(layer)),
            When::Whole(visit, part) => !restricted(visit, part),
            When::Some(visit, part) => restricted(visit, part),
        };
        let mut plan = self.clone();
        plan.programs = masking.programs.each_ref().map(|program| program.chosen(&holds));
        plan.lists.clear();
        let mut tables: Vec<_> = plan.paged.iter_mut().flat_map(|paged| &mut paged.tables).collect();
        for target in &masking.targets {
            let active = |unit| mask.is_none_or(|mask| is_active(mask, target.visit, target.part, unit));
            match tables.iter_mut().find(|table| table.buffer == target.buffer) {
                // Where the experts of a paged bank are is not the plan's to know.
                Some(table) => table.allowed = (0..target.content.experts()).map(active).collect(),
                None => plan.lists.push((target.buffer, target.content.words(&active))),
            }
        }
        for program in &mut plan.programs {
            for (number, step) in program.steps.iter_mut().enumerate() {
                if let Some((grid, share)) = narrowed(step, &plan.lists) {
                    step.grid = grid;
                    program.shares.push((number, share));
                }
            }
        }
        Ok(plan)
    }
}

/// The grid of a step that reads a list, and which share of its weight or of its caches it reads: so many of so many.
fn narrowed(step: &Step, lists: &[(BufferId, Vec<u32>)]) -> Option<(Grid, [u64; 2])> {
    let list = lists.iter().find(|(buffer, _)| {
        let mut reads = step.bindings.iter();
        reads.any(|bind| *bind == super::Bind::Buffer(*buffer))
    });
    let (count, unit_count) = match list?.1[..] {
        [count, unit_count, ..] => (count, unit_count),
        _ => return None,
    };
    // Of blocks of 4 rows, and of the units of each.
    let of_rows = |rows: u32, units: u32| {
        [
            u64::from(count) * u64::from(unit_count),
            u64::from(rows.div_ceil(4)) * u64::from(units),
        ]
    };
    match &step.op {
        Op::MatvecSome(p) => Some((Grid::Teams(count.max(1)), of_rows(p.rows, p.units))),
        Op::MatmulSome(p) => Some((step.grid, of_rows(p.rows, p.units))),
        Op::MatmulAddSome(p) => Some((step.grid, of_rows(p.rows, p.units))),
        Op::MatmulGluSome(p) => Some((Grid::Threads(count.max(1), 4), of_rows(p.part1, p.units))),
        Op::AttnBlockSome(p) => Some((Grid::Blocks(count.max(1)), [unit_count, p.kv_heads].map(u64::from))),
        Op::AttnChunkSome(p) => Some((Grid::Groups(count.max(1), 4), [unit_count, p.kv_heads].map(u64::from))),
        Op::MatvecAddSome(p) => Some((step.grid, [unit_count, p.units].map(u64::from))),
        Op::MatvecGluSome(p) => Some((Grid::Teams(count.div_ceil(2).max(1)), [count, p.part1].map(u64::from))),
        _ => None,
    }
}

impl Masking {
    /// Errors: as [`Plan::with_mask`].
    fn check(&self, mask: &Mask) -> Result<()> {
        let shape = mask.shape();
        let layers = self.visits.iter().map(|visit| visit.layer + 1).max().unwrap_or(0);
        if shape.layers != layers || ![layers, self.visits.len()].contains(&shape.rows) {
            bail!(
                Usage,
                "mask '{}' is of another model: it has {} layers, wanted {layers}",
                mask.name,
                shape.layers
            );
        }
        for (number, visit) in self
            .visits
            .iter()
            .enumerate()
            .filter(|(_, visit)| mask.layer(visit.layer))
        {
            let parts = [
                (Part::Neurons, shape.ffn),
                (Part::Heads, shape.heads),
                (Part::Experts, shape.experts),
            ];
            for (part, most) in parts {
                let units = visit.units(part);
                // Rows for experts are there for layers without them, too.
                let of_no_use = units.is_none() && part == Part::Experts;
                if of_no_use || !restricts(mask, number, part, units.unwrap_or(most)) {
                    continue;
                }
                let (name, layer) = (&mask.name, visit.layer);
                match (units, part) {
                    // The bits of a row are those of a dense network's width, which no expert has.
                    (None, Part::Neurons) => bail!(
                        UnsupportedModel,
                        "mask '{name}' restricts the neurons of layer {layer}, a mixture of experts: its {most} bits are the \
                         neurons of one dense network, and which of an expert's they would be the format does not say; \
                         --task none runs the full model"
                    ),
                    (None, _) => bail!(
                        UnsupportedModel,
                        "mask '{name}' restricts the heads of layer {layer}, which has no softmax attention: its {most} bits \
                         are query heads, and which of a recurrence's they would be the format does not say; \
                         --task none runs the full model"
                    ),
                    (Some(_), _) if !self.targets.iter().any(|t| (t.visit, t.part) == (number, part)) => bail!(
                        Usage,
                        "mask '{name}' is of another model: it restricts layer {layer} where no mask of this one does"
                    ),
                    (Some(_), _) => {}
                }
            }
        }
        Ok(())
    }
}

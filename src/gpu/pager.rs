//! Paged banks: which experts are present in which slots, and fetching those that a run has chosen.
//!
//! A bank gives the slot that was least recently used to an expert that is not present.

use super::device::Device;
use super::memory::{GraphMemory, READBACK, create, read_words};
use super::upload::overwrite_run;
use crate::error::{Result, bail, error};
use crate::graph::{BufferId, Counters, Graph, Paged, Pause, Selection, Waiting, source, table_words};
use crate::op::{ABSENT, TABLE_HEADER};
use crate::source::Tensors;
use std::collections::HashMap;
use std::sync::Arc;

/// A slot: space for the weights of one expert.
#[derive(Clone, Copy)]
struct Slot {
    /// The member whose weights it holds completely.
    member: Option<usize>,
    /// The value of [`Pager::clock`] when the slot was last used.
    used: u64,
}

/// The state of one paged bank. Experts are numbered by their index in [`Paged::members`].
struct Bank {
    slots: Vec<Slot>,
    /// The slot of each member that is present.
    slot_of: Vec<Option<usize>>,
    /// The words of the table in which all experts may be chosen.
    table: Vec<u32>,
}

/// How often each expert was chosen when the counts were last read, and the buffer through which they are read.
struct Counted {
    counts: Vec<u32>,
    readback: wgpu::Buffer,
}

/// The paged banks of a graph.
pub struct Pager {
    device: Arc<Device>,
    memory: GraphMemory,
    tensors: Arc<dyn Tensors>,
    graph: Arc<Graph>,
    selection: Arc<Selection>,
    banks: Vec<Bank>,
    /// The pauses of each program.
    pauses: Vec<Vec<Pause>>,
    counted: HashMap<BufferId, Counted>,
    /// Advances with every call of [`Pager::make_present`].
    clock: u64,
}

impl Pager {
    /// The banks after the upload of a graph. The caller has to call [`Pager::select`] next, which writes the tables.
    ///
    /// Errors: faults in the tables' tensors.
    pub fn new(
        device: Arc<Device>,
        memory: GraphMemory,
        graph: Arc<Graph>,
        tensors: Arc<dyn Tensors>,
    ) -> Result<Pager> {
        let bank = |paged: &Paged| -> Result<Bank> {
            // Before a selection restricts them, all tables of a bank are equal.
            let table = paged.tables.first().and_then(|&table| graph.buffers.get(table));
            let table = table.ok_or_else(|| error!(Internal, "a paged bank without a table"))?;
            let present = |member: usize| (member < paged.slots).then_some(member);
            let slots = (0..paged.slots).map(Some);
            Ok(Bank {
                slots: slots.map(|member| Slot { member, used: 0 }).collect(),
                slot_of: (0..paged.members.len()).map(present).collect(),
                table: table.fill.words(&*tensors)?,
            })
        };
        let counted = graph.routed.iter().map(|routed| {
            let counted = Counted {
                counts: vec![0; routed.experts],
                readback: create(&device, "read.counts", routed.experts as u64 * 4, READBACK),
            };
            (routed.counts, counted)
        });
        let pauses = graph.programs.iter().map(|program| program.pauses(&graph.paged));
        Ok(Pager {
            banks: graph.paged.iter().map(bank).collect::<Result<_>>()?,
            pauses: pauses.collect(),
            counted: counted.collect(),
            selection: Arc::default(),
            clock: 0,
            device,
            memory,
            tensors,
            graph,
        })
    }

    /// Changes which experts may be chosen, and writes the tables. Errors: the device's.
    pub fn select(&mut self, selection: Arc<Selection>, counters: &mut Counters) -> Result<()> {
        self.selection = selection;
        (0..self.banks.len()).try_for_each(|bank| self.write_tables(bank, counters))?;
        self.device.check()
    }

    /// Writes the places of a bank's experts.
    fn write_tables(&self, bank: usize, counters: &mut Counters) -> Result<()> {
        for &table in &self.graph.paged[bank].tables {
            let words = table_words(&self.banks[bank].table, &|expert| self.selection.allows(table, expert));
            let to = self.memory.buffer(table)?;
            self.device.queue.write_buffer(to, 0, bytemuck::cast_slice(&words));
            counters.write_buffer_calls += 1;
        }
        Ok(())
    }

    /// Where a program waits for experts.
    pub fn pauses(&self, program: usize) -> &[Pause] {
        self.pauses.get(program).map_or(&[], Vec::as_slice)
    }

    /// Submits `encoder` and returns the members that the pause's steps need after it: for each of the pause's banks a
    /// list of groups, none larger than the bank has slots. Members that are present come first.
    ///
    /// Experts that the selection forbids are not among them. A token chooses such an expert only if fewer are allowed
    /// than it takes, and then with weight 0.
    ///
    /// Errors: the device's.
    pub fn wanted(&mut self, pause: &Pause, mut encoder: wgpu::CommandEncoder) -> Result<Vec<Vec<Vec<usize>>>> {
        let counted = self.counted.get_mut(&pause.counts);
        let counted = counted.ok_or_else(|| error!(Internal, "a pause without counts of experts"))?;
        let to = &counted.readback;
        encoder.copy_buffer_to_buffer(self.memory.buffer(pause.counts)?, 0, to, 0, to.size());
        let submission = self.device.queue.submit([encoder.finish()]);
        let counts = read_words(&self.device, to, submission)?;
        let chosen: Vec<bool> = counted.counts.iter().zip(&counts).map(|(a, b)| a != b).collect();
        counted.counts = counts;
        let groups = |&Waiting { bank, table }: &Waiting| {
            let (paged, state) = (&self.graph.paged[bank], &self.banks[bank]);
            let is_wanted =
                |expert| chosen.get(expert) == Some(&true) && self.selection.allows(paged.tables[table], expert);
            let members = paged.members.iter().enumerate();
            let wanted = members.filter(|(_, member)| is_wanted(member.expert));
            let mut wanted: Vec<usize> = wanted.map(|(member, _)| member).collect();
            wanted.sort_by_key(|&member| state.slot_of[member].is_none());
            wanted.chunks(paged.slots.max(1)).map(<[usize]>::to_vec).collect()
        };
        Ok(pause.banks.iter().map(groups).collect())
    }

    /// Bytes that are read back at a pause.
    pub fn count_bytes(&self, pause: &Pause) -> u64 {
        let counted = self.counted.get(&pause.counts);
        counted.map_or(0, |counted| counted.readback.size())
    }

    /// Makes these members of a bank present, at most as many as it has slots. Later submissions see them.
    ///
    /// Errors: faults in their tensors. After an error the members that were fetched completely are present.
    pub fn make_present(&mut self, bank: usize, members: &[usize], counters: &mut Counters) -> Result<()> {
        self.clock += 1;
        let mut missing = Vec::new();
        for &member in members {
            let state = &mut self.banks[bank];
            match state.slot_of[member] {
                Some(slot) => state.slots[slot].used = self.clock,
                None => missing.push(member),
            }
        }
        counters.expert_hits += (members.len() - missing.len()) as u64;
        counters.expert_misses += missing.len() as u64;
        if missing.is_empty() {
            return Ok(());
        }
        let mut missing = missing.into_iter();
        let fetched = missing.try_for_each(|member| self.fetch(bank, member, counters));
        self.write_tables(bank, counters)?;
        fetched?;
        self.device.check()
    }

    /// Gives a slot to a member that is not present. The tables on the device are out of date afterwards.
    fn fetch(&mut self, bank: usize, member: usize, counters: &mut Counters) -> Result<()> {
        let slot = self.free_slot(bank)?;
        let experts = &self.graph.paged[bank].members;
        let state = &mut self.banks[bank];
        // The slot holds no complete expert until the upload is done.
        let old = std::mem::replace(&mut state.slots[slot], Slot { member: None, used: 0 });
        if let Some(old) = old.member {
            state.set_slot(old, experts[old].expert, None);
        }
        counters.paged_bytes += self.upload(bank, slot, member)?;
        let state = &mut self.banks[bank];
        state.slots[slot] = Slot {
            member: Some(member),
            used: self.clock,
        };
        state.set_slot(member, experts[member].expert, Some(slot));
        Ok(())
    }

    /// The slot to overwrite: one whose expert no table allows, else the least recently used one.
    fn free_slot(&self, bank: usize) -> Result<usize> {
        let (paged, state) = (&self.graph.paged[bank], &self.banks[bank]);
        let may_be_chosen = |member: usize| {
            let expert = paged.members[member].expert;
            paged.tables.iter().any(|&table| self.selection.allows(table, expert))
        };
        let slots = state.slots.iter().enumerate();
        let oldest = slots.min_by_key(|(_, slot)| (slot.member.is_some_and(may_be_chosen), slot.used));
        match oldest.filter(|(_, slot)| slot.used != self.clock) {
            Some((number, _)) => Ok(number),
            None => {
                let slots = state.slots.len();
                bail!(
                    Internal,
                    "more experts are needed at once than the {slots} slots of a bank"
                )
            }
        }
    }

    /// Uploads a member's weights to a slot; returns the bytes sent.
    fn upload(&self, bank: usize, slot: usize, member: usize) -> Result<u64> {
        let paged = &self.graph.paged[bank];
        let matrix = |id: usize| &self.graph.matrices[id];
        let runs = paged.runs_of(slot, |id| {
            matrix(id).segments.first().map_or(0, |segment| segment.runs.len())
        });
        let mut bytes = 0;
        for (id, run, projection) in runs {
            let slice = paged.members[member].slices[projection];
            let stored = self.tensors.stored(slice.tensor)?;
            let source = source(matrix(id).planes, &stored)?;
            for (segment, to) in matrix(id).segments.iter().zip(&self.memory.matrices[id]) {
                bytes += overwrite_run(&self.device, segment, to, run, &source, slice.first)?;
            }
            self.tensors.release(slice.tensor);
        }
        Ok(bytes)
    }
}

impl Bank {
    /// Records the slot of a member, which is `expert` in the table.
    fn set_slot(&mut self, member: usize, expert: usize, slot: Option<usize>) {
        self.slot_of[member] = slot;
        if let Some(word) = self.table.get_mut(TABLE_HEADER + 2 * expert) {
            *word = slot.map_or(ABSENT, |slot| slot as u32);
        }
    }
}

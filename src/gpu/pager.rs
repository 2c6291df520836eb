//! Banks that hold some of their experts at a time: which are where, and fetching those that are wanted.
//!
//! Each bank gives the slot that was wanted longest ago to an expert that is not there.

use super::device::Device;
use super::memory::{self, SegmentBuffer};
use super::probe::read_words;
use crate::container::Tensors;
use crate::error::{Result, bail};
use crate::program::{ABSENT, BufferId, Content, Counters, Paged, Pause, Plan, Waiting, Which, source};
use std::collections::HashMap;
use std::sync::Arc;

/// Words before the experts of a table; see `shaders/lib/experts.wgsl`.
const HEADER: usize = 8;

/// What one bank holds.
struct Bank {
    /// For each slot the member that is in it, if one is there as a whole, and when that was last wanted.
    slots: Vec<(Option<usize>, u64)>,
    /// For each member its slot.
    slot_of: Vec<Option<usize>>,
    /// The table of experts without a mask.
    table: Vec<u32>,
}

/// The paged banks of a plan.
pub struct Pager {
    tensors: Arc<dyn Tensors>,
    plan: Arc<Plan>,
    matrices: Vec<Vec<SegmentBuffer>>,
    banks: Vec<Bank>,
    pauses: Vec<Vec<Pause>>,
    /// Counts as they were last read, and the buffer that they are read through.
    counted: HashMap<BufferId, (Vec<u32>, wgpu::Buffer)>,
    /// Rises with every pause.
    now: u64,
}

impl Pager {
    /// What the banks hold after the upload of a plan, which is to be followed then.
    ///
    /// Errors: what the tables' tensors have wrong with them.
    pub fn new(
        device: &Device,
        plan: Arc<Plan>,
        matrices: Vec<Vec<SegmentBuffer>>,
        tensors: Arc<dyn Tensors>,
    ) -> Result<Pager> {
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        let through = |experts: usize| memory::buffer(device, "read.counts", experts as u64 * 4, usage);
        let bank = |paged: &Paged| -> Result<Bank> {
            // Those of other visits say the same.
            let table = paged.tables.first().and_then(|table| plan.buffers.get(table.buffer));
            let Some(table) = table else {
                bail!(Usage, "a bank without a table");
            };
            Ok(Bank {
                slots: (0..paged.slots).map(|member| (Some(member), 0)).collect(),
                slot_of: (0..paged.members.len())
                    .map(|member| (member < paged.slots).then_some(member))
                    .collect(),
                table: table.fill.expert_words(&*tensors)?,
            })
        };
        Ok(Pager {
            banks: plan.paged.iter().map(bank).collect::<Result<_>>()?,
            pauses: pauses(&plan),
            counted: plan
                .routed
                .iter()
                .map(|routed| (routed.counts, (vec![0; routed.experts], through(routed.experts))))
                .collect(),
            now: 0,
            tensors,
            plan,
            matrices,
        })
    }

    /// Takes over which steps run and which experts may be chosen, of a plan with the same banks.
    ///
    /// Errors: the device's.
    pub fn follow(
        &mut self,
        device: &Device,
        buffers: &[wgpu::Buffer],
        plan: Arc<Plan>,
        counters: &mut Counters,
    ) -> Result<()> {
        self.pauses = pauses(&plan);
        self.plan = plan;
        (0..self.banks.len()).for_each(|bank| self.write_tables(device, buffers, bank, counters));
        device.check()
    }

    /// Sends where a bank's experts are.
    fn write_tables(&self, device: &Device, buffers: &[wgpu::Buffer], bank: usize, counters: &mut Counters) {
        let content = Content::Table(self.banks[bank].table.clone());
        for table in &self.plan.paged[bank].tables {
            let words = content.words(&|expert| table.allows(expert));
            let to = &buffers[table.buffer];
            device.queue.write_buffer(to, 0, bytemuck::cast_slice(&words));
            counters.write_buffer_calls += 1;
        }
    }

    /// Where a program waits for experts.
    pub fn pauses(&self, which: Which) -> &[Pause] {
        &self.pauses[which as usize]
    }

    /// The members that a pause's banks have to hold after what `encoder` does, which is submitted: one list of groups for
    /// each bank, each group as large as fits at most. Those that are there come first. An expert that a mask forbids is
    /// never among them: it is chosen only where the mask leaves fewer than a token takes, and with a weight of zero.
    ///
    /// Errors: the device's.
    pub fn wanted(
        &mut self,
        device: &Device,
        buffers: &[wgpu::Buffer],
        pause: &Pause,
        mut encoder: wgpu::CommandEncoder,
    ) -> Result<Vec<Vec<Vec<usize>>>> {
        let Some((before, through)) = self.counted.get_mut(&pause.counts) else {
            bail!(Usage, "the plan does not count what buffer {} does", pause.counts);
        };
        encoder.copy_buffer_to_buffer(&buffers[pause.counts], 0, through, 0, through.size());
        let submission = device.queue.submit([encoder.finish()]);
        let counts = read_words(device, through, submission)?;
        let changed: Vec<bool> = before.iter().zip(&counts).map(|(a, b)| a != b).collect();
        *before = counts;
        let groups = |&Waiting { bank, table }: &Waiting| {
            let (paged, held) = (&self.plan.paged[bank], &self.banks[bank]);
            let members = paged.members.iter().enumerate();
            let is_wanted = |expert| changed.get(expert) == Some(&true) && paged.tables[table].allows(expert);
            let mut wanted: Vec<usize> = members
                .filter(|(_, member)| is_wanted(member.expert))
                .map(|(member, _)| member)
                .collect();
            wanted.sort_by_key(|&member| held.slot_of[member].is_none());
            wanted.chunks(paged.slots.max(1)).map(<[usize]>::to_vec).collect()
        };
        Ok(pause.banks.iter().map(groups).collect())
    }

    /// Bytes that are read back at a pause.
    pub fn count_bytes(&self, pause: &Pause) -> u64 {
        self.counted.get(&pause.counts).map_or(0, |(_, through)| through.size())
    }

    /// Makes a bank hold these members, no more than it has slots. What the device computes later sees them.
    ///
    /// Errors: what their tensors have wrong with them. After one the bank holds what is there as a whole.
    pub fn hold(
        &mut self,
        device: &Device,
        buffers: &[wgpu::Buffer],
        bank: usize,
        members: &[usize],
        counters: &mut Counters,
    ) -> Result<()> {
        self.now += 1;
        let now = self.now;
        let mut missing = Vec::new();
        for &member in members {
            match self.banks[bank].slot_of[member] {
                Some(slot) => self.banks[bank].slots[slot].1 = now,
                None => missing.push(member),
            }
        }
        counters.expert_hits += (members.len() - missing.len()) as u64;
        counters.expert_misses += missing.len() as u64;
        if missing.is_empty() {
            return Ok(());
        }
        let fetched = missing
            .into_iter()
            .try_for_each(|member| self.bring(device, bank, member, counters));
        self.write_tables(device, buffers, bank, counters);
        fetched?;
        device.check()
    }

    /// Gives a slot to a member that is not there. The tables on the device are behind then.
    fn bring(&mut self, device: &Device, bank: usize, member: usize, counters: &mut Counters) -> Result<()> {
        let Paged {
            tables, members: all, ..
        } = &self.plan.paged[bank];
        let held = &self.banks[bank];
        // What the mask in force never wants leaves first.
        let is_of_use = |member: usize| tables.iter().any(|table| table.allows(all[member].expert));
        let slots = held.slots.iter().enumerate();
        let oldest = slots.min_by_key(|(_, (member, used))| (member.is_some_and(is_of_use), *used));
        let Some((slot, &(leaving, used))) = oldest else {
            bail!(Usage, "a bank without slots");
        };
        if used == self.now {
            bail!(
                Usage,
                "more experts are wanted at once than {} slots hold",
                held.slots.len()
            );
        }
        let place = |held: &mut Bank, member: usize, slot: Option<usize>| {
            held.slot_of[member] = slot;
            if let Some(word) = held.table.get_mut(HEADER + 2 * all[member].expert) {
                *word = slot.map_or(ABSENT, |slot| slot as u32);
            }
        };
        // Until all of it has come there is nothing.
        let held = &mut self.banks[bank];
        held.slots[slot] = (None, 0);
        if let Some(leaving) = leaving {
            place(held, leaving, None);
        }
        let bytes = self.fetch(device, bank, slot, member)?;
        counters.paged_bytes += bytes;
        let held = &mut self.banks[bank];
        held.slots[slot] = (Some(member), self.now);
        place(held, member, Some(slot));
        Ok(())
    }

    /// Sends a member's weights to a slot; returns how many bytes that were.
    fn fetch(&self, device: &Device, bank: usize, slot: usize, member: usize) -> Result<u64> {
        let paged = &self.plan.paged[bank];
        let matrix = |id: usize| &self.plan.matrices[id];
        let runs = paged.runs_of(slot, |id| {
            matrix(id).segments.first().map_or(0, |segment| segment.runs.len())
        });
        let mut bytes = 0;
        for (id, run, part) in runs {
            let slice = paged.members[member].parts[part];
            let source = source(matrix(id).planes, slice.tensor, &*self.tensors)?;
            for (segment, to) in matrix(id).segments.iter().zip(&self.matrices[id]) {
                bytes += memory::replace(device, segment, to, run, &source, slice.first)?;
            }
            self.tensors.release(slice.tensor);
        }
        Ok(bytes)
    }
}

/// The pauses of every program.
fn pauses(plan: &Plan) -> Vec<Vec<Pause>> {
    let programs = plan.programs.iter();
    programs.map(|program| program.pauses(&plan.paged)).collect()
}

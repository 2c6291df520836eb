//! Performs a plan on the CPU with the reference kernels: the oracle of every device.
//!
//! Formulas in f64 over the values that the step's buffers hold, rounded where the step stores; weights straight from the
//! file's payloads. Knows plans and tensors, no device, and nothing of how a device's kernel orders its sums.

mod attention;
mod delta_net;
mod linear;
mod listed;
mod masked;
mod moe;
mod tokens;

use crate::container::{TensorId, Tensors};
use crate::dtype::RowDecoder;
use crate::error::{Error, Kind, Result, bail};
use crate::kernel::{self, Op};
use crate::program::{Bind, BufferId, Counters, Ctl, Executor, Extent, Fill, Plan, Step, Ticket, Which};
use cmf_kernels_ref::op::rms_norm::rms_norm;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// A plan in host memory. Runs are finished when they return.
pub struct HostExecutor {
    plan: Arc<Plan>,
    tensors: Arc<dyn Tensors>,
    memory: Memory,
    finished: VecDeque<(u64, Ctl)>,
    tickets: u64,
    counters: Counters,
}

/// What buffers and vectors hold.
struct Memory {
    buffers: Vec<Vec<u32>>,
    vectors: Vec<Vec<f32>>,
}

impl HostExecutor {
    /// Makes every buffer. Weights stay in the file and are decoded row by row when a step needs them.
    ///
    /// Errors: what the vectors' tensors have wrong with them.
    pub fn new(plan: Arc<Plan>, tensors: Arc<dyn Tensors>) -> Result<HostExecutor> {
        let filled = |fill: &Fill, bytes: u64| -> Result<Vec<u32>> {
            let mut words = fill.expert_words(&*tensors)?;
            words.resize(bytes as usize / 4, 0);
            if let Fill::Rope { positions, .. } = fill {
                let rows = (0..*positions).flat_map(|position| fill.rope_row(position));
                words
                    .iter_mut()
                    .zip(rows)
                    .for_each(|(word, value)| *word = value.to_bits());
            }
            Ok(words)
        };
        if !plan.paged.is_empty() {
            bail!(Usage, "experts are paged on devices only");
        }
        let buffers = plan.buffers.iter().map(|b| filled(&b.fill, b.bytes));
        let buffers = buffers.collect::<Result<_>>()?;
        let vectors = plan.vectors.iter().map(|v| v.values(&*tensors));
        let vectors = vectors.collect::<Result<_>>()?;
        let mut executor = HostExecutor {
            memory: Memory { buffers, vectors },
            plan,
            tensors,
            finished: VecDeque::new(),
            tickets: 0,
            counters: Counters::default(),
        };
        executor.fill_lists()?;
        Ok(executor)
    }

    /// Writes what the mask in force makes of buffers.
    fn fill_lists(&mut self) -> Result<()> {
        let plan = self.plan.clone();
        plan.lists
            .iter()
            .try_for_each(|(buffer, words)| self.write(*buffer, words))
    }

    fn buffer(&mut self, buffer: BufferId) -> Result<&mut Vec<u32>> {
        match self.memory.buffers.get_mut(buffer) {
            Some(words) => Ok(words),
            None => bail!(Usage, "the plan has no buffer {buffer}"),
        }
    }
}

impl Executor for HostExecutor {
    fn run(&mut self, which: Which, steps: Range<usize>, extent: Extent) -> Result<()> {
        let plan = self.plan.clone();
        let steps = part(
            &plan.program(which).steps,
            steps.start,
            steps.len(),
            "the program's steps",
        )?;
        for step in steps {
            let mut bound = Bound {
                plan: &plan,
                tensors: &*self.tensors,
                memory: &mut self.memory,
                step,
                columns: step.columns.min(extent.columns) as usize,
            };
            bound.perform().map_err(|err| err.context(&step.label))?;
            self.counters.dispatches += 1;
        }
        Ok(())
    }

    fn submit(&mut self, which: Which, extent: Extent) -> Result<Ticket> {
        self.submit_part(which, 0..self.plan.program(which).steps.len(), extent)
    }

    fn submit_part(&mut self, which: Which, steps: Range<usize>, extent: Extent) -> Result<Ticket> {
        let last = steps.end == self.plan.program(which).steps.len();
        self.run(which, steps, extent)?;
        let ctl = ctl(&self.memory.buffers[self.plan.fixed.ctl])?;
        self.finished.push_back((self.tickets, ctl));
        self.tickets += 1;
        if last {
            self.counters.weight_bytes += self.plan.weight_bytes_read(which);
            let reads = self.plan.kv_reads(which);
            self.counters.kv_bytes += reads.iter().map(|read| read.of_run(extent)).sum::<u64>();
        }
        Ok(Ticket(self.tickets - 1))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Ctl> {
        match self.finished.pop_front() {
            Some((id, ctl)) if id == ticket.0 => Ok(ctl),
            _ => bail!(Usage, "runs are waited for in the order they were submitted"),
        }
    }

    fn select(&mut self, plan: Arc<Plan>) -> Result<()> {
        self.plan = plan;
        self.fill_lists()
    }

    fn replace(&mut self, plan: Arc<Plan>, tensors: Arc<dyn Tensors>, _: &[TensorId]) -> Result<()> {
        let counters = self.counters;
        *self = HostExecutor::new(plan, tensors)?;
        self.counters = counters;
        Ok(())
    }

    fn write(&mut self, buffer: BufferId, words: &[u32]) -> Result<()> {
        let to = part_mut(self.buffer(buffer)?, 0, words.len(), "a write")?;
        to.copy_from_slice(words);
        self.counters.write_buffer_calls += 1;
        Ok(())
    }

    fn read(&mut self, buffer: BufferId, first: usize, count: usize) -> Result<Vec<u32>> {
        Ok(part(self.buffer(buffer)?, first, count, "a read")?.to_vec())
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}

/// `len` elements from `at`; a plan whose step reaches past them is an error of the program.
fn part<'a, T>(all: &'a [T], at: usize, len: usize, what: &str) -> Result<&'a [T]> {
    let end = at.checked_add(len);
    end.and_then(|end| all.get(at..end))
        .ok_or_else(|| outside(all.len(), at, len, what))
}

fn part_mut<'a, T>(all: &'a mut [T], at: usize, len: usize, what: &str) -> Result<&'a mut [T]> {
    let has = all.len();
    let end = at.checked_add(len);
    end.and_then(|end| all.get_mut(at..end))
        .ok_or_else(|| outside(has, at, len, what))
}

fn outside(has: usize, at: usize, len: usize, what: &str) -> Error {
    Error::new(Kind::Usage, format!("{what}: {len} elements from {at} of {has}"))
}

fn ctl(words: &[u32]) -> Result<Ctl> {
    let words = part(words, 0, size_of::<Ctl>() / 4, "ctl")?;
    Ok(bytemuck::pod_read_unaligned(bytemuck::cast_slice(words)))
}

/// Control words as a buffer holds them.
fn ctl_words(ctl: &Ctl) -> [u32; size_of::<Ctl>() / 4] {
    bytemuck::cast(*ctl)
}

/// One step with what its bindings mean.
struct Bound<'a> {
    plan: &'a Plan,
    tensors: &'a dyn Tensors,
    memory: &'a mut Memory,
    step: &'a Step,
    /// Columns of the run that the step computes, where it computes no more.
    columns: usize,
}

impl Bound<'_> {
    fn perform(&mut self) -> Result<()> {
        match &self.step.op {
            Op::Embed(p) => self.embed(p),
            Op::Prep(p) => self.prep(p),
            Op::Norm(p) => self.norm(p),
            Op::AddNorm(p) => self.add_norm(p),
            Op::Cap(p) => self.cap(p),
            Op::Matvec(p) => self.matvec(p),
            Op::MatvecAdd(p) => self.matvec_add(p),
            Op::MatvecGlu(p) => self.matvec_glu(p),
            Op::MatvecSome(p) => self.matvec_some(p),
            Op::MatvecAddSome(p) => self.matvec_add_some(p),
            Op::MatvecGluSome(p) => self.matvec_glu_some(p),
            Op::Silence(p) => self.silence(p),
            Op::Matmul(p) => self.matmul(p),
            Op::MatmulAdd(p) => self.matmul_add(p),
            Op::MatmulGlu(p) => self.matmul_glu(p),
            Op::MatmulSome(p) => self.matmul_some(p),
            Op::MatmulAddSome(p) => self.matmul_add_some(p),
            Op::MatmulGluSome(p) => self.matmul_glu_some(p),
            Op::Glu(p) => self.glu(p),
            Op::Rope(p) => self.rope(p),
            Op::AttnBlock(p) => self.attn_block(p),
            Op::AttnMerge(p) => self.attn_merge(p),
            Op::AttnChunk(p) => self.attn_chunk(p),
            Op::AttnBlockSome(p) => self.attn_block_some(p),
            Op::AttnMergeSome(p) => self.attn_merge_some(p),
            Op::AttnChunkSome(p) => self.attn_chunk_some(p),
            Op::DeltaNet(p) => self.delta_net(p),
            Op::MoeGlu(p) => self.moe_glu(p),
            Op::MoeMatvec(p) => self.moe_matvec(p),
            Op::MoeDown(p) => self.moe_down(p),
            Op::MoeRoute(p) => self.moe_route(p),
            Op::MoeCount(p) => self.moe_count(p),
            Op::MoeLists(p) => self.moe_lists(p),
            Op::MoeMatmulGlu(p) => self.moe_matmul_glu(p),
            Op::MoeMatmulUp(p) => self.moe_matmul_up(p),
            Op::MoeMatmul(p) => self.moe_matmul(p),
            Op::MoeCombine(p) => self.moe_combine(p),
            Op::Sample(p) => self.sample(p),
            Op::LastColumn(p) => self.last_column(p),
            Op::RoundBegin(p) => self.round_begin(p),
            Op::Draft(p) => self.draft(p),
        }
    }

    /// The words of the step's binding number `i`, which is a buffer.
    fn words(&self, i: usize) -> Result<&[u32]> {
        match self.step.bindings.get(i) {
            Some(Bind::Buffer(buffer)) if *buffer < self.memory.buffers.len() => Ok(&self.memory.buffers[*buffer]),
            other => bail!(Usage, "binding {i} is {other:?}, wanted a buffer"),
        }
    }

    /// The elements of the step's binding number `i`, a buffer or a vector.
    fn floats(&self, i: usize) -> Result<&[f32]> {
        match self.step.bindings.get(i) {
            Some(Bind::Vector(vector)) if *vector < self.memory.vectors.len() => Ok(&self.memory.vectors[*vector]),
            _ => Ok(bytemuck::cast_slice(self.words(i)?)),
        }
    }

    fn ctl(&self, i: usize) -> Result<Ctl> {
        ctl(self.words(i)?)
    }

    fn words_mut(&mut self, i: usize, at: usize, len: usize) -> Result<&mut [u32]> {
        match self.step.bindings.get(i) {
            Some(Bind::Buffer(buffer)) if *buffer < self.memory.buffers.len() => {
                part_mut(&mut self.memory.buffers[*buffer], at, len, "a store")
            }
            other => bail!(Usage, "binding {i} is {other:?}, wanted a buffer"),
        }
    }

    /// Rounds results to f32 and stores them from element `at` of binding number `i`.
    fn store(&mut self, i: usize, at: usize, values: &[f64]) -> Result<()> {
        let to = self.words_mut(i, at, values.len())?;
        for (word, &value) in to.iter_mut().zip(values) {
            *word = (value as f32).to_bits();
        }
        Ok(())
    }

    fn embed(&mut self, p: &kernel::Embed) -> Result<()> {
        let ctl = self.ctl(1)?;
        let tokens = part(self.words(2)?, 0, ctl.columns as usize, "tokens")?.to_vec();
        let stride = p.units as usize * 32;
        for (c, token) in tokens.into_iter().enumerate() {
            // The token may lie in another segment.
            let Some(row) = token.checked_sub(p.row0).filter(|&row| row < p.rows) else {
                continue;
            };
            let mut column = vec![0.0; stride];
            {
                let weights = self.rows(0, p.rows)?;
                let mut values = vec![0f32; weights.cols];
                weights.row(row as usize, &mut values);
                for (out, &value) in column.iter_mut().zip(&values) {
                    *out = f64::from(value) * f64::from(p.multiplier);
                }
            }
            self.store(3, c * stride, &column)?;
        }
        Ok(())
    }

    fn prep(&mut self, p: &kernel::Prep) -> Result<()> {
        let len = p.vectors as usize * 4;
        for c in 0..self.ctl(0)?.columns as usize {
            let h = part(self.floats(1)?, c * len, len, "source")?;
            let g = part(self.floats(2)?, 0, len, "g")?;
            let (hg, squares) = prepared(h, g);
            self.store(3, c * len, &hg)?;
            self.store(4, c * (len / 4).next_multiple_of(32), &squares)?;
        }
        Ok(())
    }

    fn add_norm(&mut self, p: &kernel::AddNorm) -> Result<()> {
        let stride = p.vectors as usize * 4;
        let cols = (1.0 / p.inv_cols).round() as usize;
        let eps = f64::from(p.eps);
        for c in 0..self.ctl(0)?.columns as usize {
            let y = part(self.floats(1)?, c * stride, cols, "y")?;
            let post = part(self.floats(2)?, 0, cols, "post")?;
            let h = part(self.floats(4)?, c * stride, cols, "h")?;
            let mut sum = vec![0.0; cols.max(stride)];
            rms_norm(y, post, eps, &mut sum[..cols]);
            sum.iter_mut().zip(h).for_each(|(sum, &h)| *sum += f64::from(h));
            self.store(4, c * stride, &sum)?;
            // The second norm reads what was stored.
            let h = part(self.floats(4)?, c * stride, cols, "h")?;
            let g = part(self.floats(3)?, 0, cols, "g")?;
            let mut x = vec![0.0; cols.max(stride)];
            rms_norm(h, g, eps, &mut x[..cols]);
            self.store(5, c * stride, &x)?;
        }
        Ok(())
    }

    fn cap(&mut self, p: &kernel::Cap) -> Result<()> {
        let stride = p.vectors as usize * 4;
        let (multiplier, cap) = (f64::from(p.multiplier), f64::from(p.cap));
        for c in 0..self.ctl(0)?.columns as usize {
            let y = part(self.floats(1)?, c * stride, stride, "y")?;
            let capped = |value: &f32| match f64::from(*value) * multiplier {
                v if cap == 0.0 => v,
                v => cap * (v / cap).tanh(),
            };
            let capped: Vec<f64> = y.iter().map(capped).collect();
            self.store(1, c * stride, &capped)?;
        }
        Ok(())
    }

    fn norm(&mut self, p: &kernel::Norm) -> Result<()> {
        let stride = p.vectors as usize * 4;
        let cols = (1.0 / p.inv_cols).round() as usize;
        for c in 0..self.ctl(0)?.columns as usize {
            let x = part(self.floats(1)?, c * stride, cols, "x")?;
            let g = part(self.floats(2)?, 0, cols, "g")?;
            let mut y = vec![0.0; cols.max(stride)];
            rms_norm(x, g, f64::from(p.eps), &mut y[..cols]);
            self.store(3, (c * p.y_stride as usize + p.y_first as usize) * 4, &y)?;
        }
        Ok(())
    }
}

/// h·g, and the sum of h² over every 4 elements.
fn prepared(h: &[f32], g: &[f32]) -> (Vec<f64>, Vec<f64>) {
    let hg = h.iter().zip(g).map(|(&h, &g)| f64::from(h) * f64::from(g)).collect();
    let squares = h
        .chunks(4)
        .map(|four| four.iter().map(|&v| f64::from(v) * f64::from(v)).sum());
    (hg, squares.collect())
}

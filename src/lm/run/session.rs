//! The state of one conversation on one executor.

use super::drafting::{DraftNotice, Drafting, Speculated};
use crate::error::{Result, bail};
use crate::graph::{BatchShape, BufferId, Counters, Executor, Routed, Ticket};
use crate::lm::{Plan, ProgramKind, sequence_words};
use crate::op::SlotState;
use crate::source::{TensorId, Tensors};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

/// Steps of a submission before any time is known.
pub(super) const FIRST_STEPS: usize = 16;

/// One conversation on one executor.
pub struct Session {
    pub(super) plan: Plan,
    pub(super) executor: Box<dyn Executor>,
    /// Ids of the cached tokens, by position.
    pub(super) cached: Vec<u32>,
    /// One more than the last position that was run, rejected drafts included. Recurrent states have moved this far.
    pub(super) run_end: usize,
    /// Tokens of the last prefill chunk, until a token is sampled after it; then 0.
    pub(super) last_chunk: usize,
    /// Runs that were not waited for.
    pub(super) in_flight: VecDeque<Ticket>,
    /// Steps of the next submission of a prefill.
    pub(super) submission_steps: usize,
    /// Number of decoding runs of the last answer, and their cost.
    pub(super) decode_cost: (u64, Counters),
    pub(super) drafting: Drafting,
}

impl Session {
    /// A session with an empty cache. `executor` performs the plan's graph under the plan's selection.
    pub fn new(plan: Plan, executor: Box<dyn Executor>) -> Session {
        Session {
            drafting: Drafting::new(&plan),
            plan,
            executor,
            cached: Vec::new(),
            run_end: 0,
            last_chunk: 0,
            in_flight: VecDeque::new(),
            submission_steps: FIRST_STEPS,
            decode_cost: Default::default(),
        }
    }

    /// The plan that it runs.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Totals of the executor.
    pub fn counters(&self) -> Counters {
        self.executor.counters()
    }

    /// Number of decoding runs that the last [`Session::generate`] submitted, plain or speculative, and their cost.
    /// Without the run of the first token, which continues the prefill, and without the writes of the answer's
    /// settings.
    pub fn decode_cost(&self) -> (u64, Counters) {
        self.decode_cost
    }

    /// How often each expert was chosen since the session began, by layer. Empty if the plan does not count them.
    ///
    /// Errors: those of the executor.
    pub fn route_counts(&mut self) -> Result<BTreeMap<usize, Vec<u32>>> {
        let graph = self.plan.graph.clone();
        let mut layers: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
        for &Routed { layer, experts, counts } in &graph.routed {
            let counts = self.executor.read(counts, 0, experts)?;
            // A layer can be applied several times.
            let totals = layers.entry(layer).or_insert_with(|| vec![0; experts]);
            let both = totals.iter_mut().zip(counts);
            both.for_each(|(total, count)| *total = total.wrapping_add(count));
        }
        Ok(layers)
    }

    /// Reads words of one of the graph's buffers. For tests that inspect caches and states. Errors: those of the
    /// executor.
    #[doc(hidden)]
    pub fn read_buffer(&mut self, buffer: BufferId, first: usize, count: usize) -> Result<Vec<u32>> {
        self.executor.read(buffer, first, count)
    }

    /// Ids of the cached tokens.
    pub fn cached(&self) -> &[u32] {
        &self.cached
    }

    /// Empties the cache.
    pub fn clear(&mut self) {
        self.cached.clear();
        self.run_end = 0;
        self.last_chunk = 0;
    }

    /// Changes the mask: runs a plan that [`Plan::with_mask`] made of this one. Empties the cache.
    ///
    /// Errors: those of the executor.
    pub fn select(&mut self, plan: Plan) -> Result<()> {
        self.wait_all()?;
        self.clear();
        self.executor.select(plan.selection.clone())?;
        self.drafting.reset(&plan);
        self.plan = plan;
        Ok(())
    }

    /// Replaces the plan by another plan of the same network. Its tensors differ in `changed`, which is sorted.
    /// Empties the cache.
    ///
    /// Errors: those of [`Executor::replace`]. After an error the session keeps the previous plan.
    pub fn replace(&mut self, plan: Plan, tensors: Arc<dyn Tensors>, changed: &[TensorId]) -> Result<()> {
        self.wait_all()?;
        self.clear();
        let (graph, selection) = (plan.graph.clone(), plan.selection.clone());
        self.executor.replace(graph, selection, tensors, changed)?;
        self.drafting.reset(&plan);
        self.plan = plan;
        Ok(())
    }

    /// Makes the draft head pause when plain decoding is faster. Both are timed. Prompt lookup never pauses.
    pub fn draft_only_while_it_pays(&mut self) {
        self.drafting.only_while_it_pays = true;
    }

    /// Statistics of speculation in the last answer.
    pub fn speculated(&self) -> Speculated {
        self.drafting.statistics
    }

    /// Takes a notice about drafting. Each notice is returned once for a plan.
    pub fn take_notice(&mut self) -> Option<DraftNotice> {
        self.drafting.notice.take()
    }

    pub(super) fn check(&self, tokens: &[u32]) -> Result<()> {
        if tokens.is_empty() {
            bail!(Usage, "the prompt has no tokens");
        }
        if let Some(token) = tokens.iter().find(|&&token| token >= self.plan.vocab) {
            bail!(Usage, "token {token} is not in the vocabulary of {}", self.plan.vocab);
        }
        if tokens.len() > self.plan.ctx as usize {
            bail!(
                ContextFull,
                "the prompt has {} tokens, the context has {}; a longer context would help",
                tokens.len(),
                self.plan.ctx
            );
        }
        Ok(())
    }

    /// Writes the tokens of the next run: `ids` at consecutive positions.
    pub(super) fn write_batch(&mut self, ids: &[u32], position: usize) -> Result<()> {
        let words = sequence_words(ids, position as u32);
        self.executor.write(self.plan.buffers.batch, &words)
    }

    /// Writes the state of the sampler.
    pub(super) fn write_slot(&mut self, state: SlotState) -> Result<()> {
        self.executor.write(self.plan.buffers.slots, state.words())
    }

    /// Submits a whole program.
    pub(super) fn submit(&mut self, kind: ProgramKind, shape: BatchShape) -> Result<()> {
        let steps = self.plan.program(kind).steps.len();
        self.submit_steps(kind, 0..steps, shape)
    }

    pub(super) fn submit_steps(&mut self, kind: ProgramKind, steps: Range<usize>, shape: BatchShape) -> Result<()> {
        let ticket = self.executor.submit(kind as usize, steps, shape)?;
        self.in_flight.push_back(ticket);
        Ok(())
    }

    /// Submits a run that decodes, and counts it.
    pub(super) fn submit_decoding(&mut self, kind: ProgramKind, tokens: u32, end: usize) -> Result<()> {
        let end = end as u32;
        self.submit(kind, BatchShape { tokens, end })?;
        self.decode_cost.0 += 1;
        Ok(())
    }

    /// Waits for the oldest run.
    pub(super) fn wait(&mut self) -> Result<SlotState> {
        let Some(ticket) = self.in_flight.pop_front() else {
            bail!(Internal, "no run is in flight");
        };
        let words = self.executor.wait(ticket)?;
        match SlotState::from_words(&words) {
            Some(state) => Ok(state),
            None => bail!(Internal, "{} words do not hold a sampler state", words.len()),
        }
    }

    pub(super) fn wait_all(&mut self) -> Result<()> {
        while !self.in_flight.is_empty() {
            self.wait()?;
        }
        Ok(())
    }

    /// After an error: waits for all runs and empties the cache, because its contents are unknown.
    pub(super) fn settle<T>(&mut self, result: Result<T>) -> Result<T> {
        if result.is_err() {
            while !self.in_flight.is_empty() {
                // The first error is the one to report.
                let _ = self.wait();
            }
            self.clear();
        }
        result
    }
}

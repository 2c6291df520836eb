//! A plan being run: positions, the tokens whose keys and values are cached, and runs that are in flight.
//!
//! Knows token ids, not text.

mod pace;
#[cfg(test)]
mod tests;

use crate::error::{Result, bail};
use crate::program::{Counters, Ctl, Executor, Extent, Plan, Ticket, Which};
use crate::sampling::{SEEN_IN_PROMPT, Sampling};
use pace::{FIRST_STEPS, Pace};
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Stops work from another thread: after the token or the part of a prompt that is running.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// A token that is not cancelled.
    pub fn new() -> Cancel {
        Cancel::default()
    }

    /// Asks for the work to stop.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether someone asked.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A stop token or stop text.
    Stop,
    /// As many tokens as were asked for.
    Length,
    /// The context is full.
    Context,
    /// Cancelled.
    Interrupted,
}

impl Finish {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Finish::Stop => "stop",
            Finish::Length => "length",
            Finish::Context => "context",
            Finish::Interrupted => "interrupted",
        }
    }
}

/// How an answer is made.
#[derive(Clone, Debug)]
pub struct Generation {
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Tokens that end the answer.
    pub stops: Vec<u32>,
    /// Most tokens of the answer.
    pub max_tokens: usize,
}

/// Gets a position, its logits, and the residual stream after each layer where that was asked for.
pub type LogitsSink<'a> = &'a mut dyn FnMut(usize, &[f32], &[Vec<f32>]) -> Result<()>;

/// One conversation on one device.
pub struct Session {
    plan: Arc<Plan>,
    executor: Box<dyn Executor>,
    /// Tokens whose keys and values are cached, by position.
    cached: Vec<u32>,
    /// Columns of the last prefill chunk, while no token has been sampled after it.
    pending_columns: u32,
    /// Runs that nobody has waited for yet.
    in_flight: VecDeque<Ticket>,
    /// Steps of the next submission of a prefill.
    part: usize,
    /// Runs of the decode program in the last answer, and what they cost.
    decode_cost: (u64, Counters),
}

impl Session {
    /// A session with an empty cache.
    pub fn new(plan: Arc<Plan>, executor: Box<dyn Executor>) -> Session {
        Session {
            plan,
            executor,
            cached: Vec::new(),
            pending_columns: 0,
            in_flight: VecDeque::new(),
            part: FIRST_STEPS,
            decode_cost: Default::default(),
        }
    }

    /// The plan it runs.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Totals of the executor.
    pub fn counters(&self) -> Counters {
        self.executor.counters()
    }

    /// How many runs of the decode program the last [`Session::generate`] submitted, and what they cost together: neither
    /// the first token, which comes from the prompt's last column, nor the settings of the answer are in there.
    pub fn decode_cost(&self) -> (u64, Counters) {
        self.decode_cost
    }

    /// The executor, for harnesses that look at single steps.
    pub fn executor(&mut self) -> &mut dyn Executor {
        self.executor.as_mut()
    }

    /// Tokens that are cached.
    pub fn cached(&self) -> &[u32] {
        &self.cached
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.cached.clear();
        self.pending_columns = 0;
    }

    fn check(&self, tokens: &[u32]) -> Result<()> {
        if tokens.is_empty() {
            bail!(Usage, "the prompt has no tokens");
        }
        if let Some(token) = tokens.iter().find(|&&token| token >= self.plan.vocab) {
            bail!(Usage, "token {token} is not in the vocabulary of {}", self.plan.vocab);
        }
        if tokens.len() > self.plan.ctx as usize {
            bail!(
                ContextFull,
                "the prompt has {} tokens, the context {}; a larger --ctx would help",
                tokens.len(),
                self.plan.ctx
            );
        }
        Ok(())
    }

    fn submit(&mut self, which: Which, extent: Extent) -> Result<()> {
        let ticket = self.executor.submit(which, extent)?;
        self.in_flight.push_back(ticket);
        Ok(())
    }

    /// Waits for the oldest run.
    fn wait(&mut self) -> Result<Ctl> {
        match self.in_flight.pop_front() {
            Some(ticket) => self.executor.wait(ticket),
            None => bail!(Usage, "no run is under way"),
        }
    }

    /// After an error: nothing stays in flight, and nothing that was computed is used again.
    fn settled<T>(&mut self, result: Result<T>) -> Result<T> {
        if result.is_err() {
            while !self.in_flight.is_empty() {
                // The first error is the one that is told.
                let _ = self.wait();
            }
            self.clear();
        }
        result
    }

    fn start(&mut self, token: u32, pos: u32, columns: u32) -> Result<()> {
        let ctl = Ctl {
            token,
            pos,
            columns,
            ..Ctl::default()
        };
        self.executor.write(self.plan.fixed.ctl, bytemuck::cast_slice(&[ctl]))
    }

    /// How many of the first `shared` cached tokens a run may follow: all of them, or none where a recurrent layer's state
    /// has moved on and that of the position is not kept.
    fn reusable(&self, shared: usize) -> usize {
        let moved_on = self.cached.len() - shared;
        match self.plan.kept_states {
            Some(kept) if moved_on >= kept as usize => 0,
            _ => shared,
        }
    }

    /// Caches a prompt, re-using the tokens it shares with what is cached; with recurrent layers only if what is cached
    /// goes no further, or by less than the states that are kept. Returns how many tokens were run, and whether it
    /// was cancelled.
    ///
    /// Errors: `ContextFull`, `Usage` for unknown tokens, and the executor's.
    pub fn prefill(&mut self, tokens: &[u32], cancel: &Cancel) -> Result<(usize, ControlFlow<()>)> {
        self.check(tokens)?;
        let shared = self.cached.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        // The last token is always run: its hidden state is what the answer begins with.
        let shared = shared.min(tokens.len() - 1);
        let shared = self.reusable(shared);
        self.cached.truncate(shared);
        self.pending_columns = 0;
        let result = self.prefill_chunks(&tokens[shared..], cancel);
        let flow = self.settled(result)?;
        Ok((self.cached.len() - shared, flow))
    }

    fn prefill_chunks(&mut self, tokens: &[u32], cancel: &Cancel) -> Result<ControlFlow<()>> {
        let mut flow = ControlFlow::Continue(());
        let mut pace = Pace::new();
        for chunk in tokens.chunks(self.plan.chunk as usize) {
            let extent = self.begin_chunk(chunk)?;
            flow = self.submit_parts(Which::Prefill, extent, cancel, &mut pace)?;
            if flow.is_break() {
                // Of a chunk that was begun nothing counts; its positions are written anew by whatever comes there.
                break;
            }
            self.end_chunk(chunk);
        }
        while !self.in_flight.is_empty() {
            self.wait()?;
        }
        Ok(flow)
    }

    /// Submits a program in parts, as long as nobody cancels it. What has begun is finished where recurrent layers would
    /// lose the state that it began with.
    fn submit_parts(
        &mut self,
        which: Which,
        extent: Extent,
        cancel: &Cancel,
        pace: &mut Pace,
    ) -> Result<ControlFlow<()>> {
        let steps = self.plan.program(which).steps.len();
        let keeps_states = self.plan.kept_states.is_none_or(|kept| extent.columns < kept);
        let mut at = 0;
        while at < steps {
            if (at == 0 || keeps_states) && cancel.is_cancelled() {
                return Ok(ControlFlow::Break(()));
            }
            let end = steps.min(at.saturating_add(self.part));
            let ticket = self.executor.submit_part(which, at..end, extent)?;
            self.in_flight.push_back(ticket);
            pace.submitted(end - at);
            at = end;
            // One part is encoded while another runs, and no more, so that a cancel is not behind a long queue.
            if self.in_flight.len() > 1 {
                self.wait()?;
                self.part = pace.next(self.part);
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    fn begin_chunk(&mut self, chunk: &[u32]) -> Result<Extent> {
        let (pos, columns) = (self.cached.len() as u32, chunk.len() as u32);
        self.executor.write(self.plan.fixed.tokens, chunk)?;
        self.start(0, pos, columns)?;
        Ok(Extent {
            columns,
            end: pos + columns,
        })
    }

    fn end_chunk(&mut self, chunk: &[u32]) {
        self.cached.extend_from_slice(chunk);
        self.pending_columns = chunk.len() as u32;
    }

    /// Samples tokens after a prefill until something ends the answer. Each token goes to `emit`, which may end it too.
    /// The run of the next token is submitted before a token is read.
    ///
    /// Errors: `NonFinite` with the position, and the executor's. The session can be used after them; its cache is empty.
    pub fn generate(
        &mut self,
        generation: &Generation,
        cancel: &Cancel,
        emit: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Finish> {
        let result = self.sample(generation, cancel, emit);
        self.settled(result)
    }

    fn sample(
        &mut self,
        generation: &Generation,
        cancel: &Cancel,
        emit: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Finish> {
        if self.pending_columns == 0 {
            bail!(Usage, "an answer needs a prompt");
        }
        let settings = generation.sampling.words(&generation.stops)?;
        self.decode_cost = Default::default();
        if generation.max_tokens == 0 {
            return Ok(Finish::Length);
        }
        self.executor.write(self.plan.fixed.settings, &settings)?;
        if generation.sampling.penalises() {
            let mut seen = vec![0; self.plan.vocab as usize];
            for &token in &self.cached {
                seen[token as usize] = SEEN_IN_PROMPT;
            }
            self.executor.write(self.plan.fixed.seen, &seen)?;
        }
        let start = self.cached.len();
        let columns = std::mem::take(&mut self.pending_columns);
        let extent = Extent {
            columns,
            end: start as u32,
        };
        self.submit(Which::Head, extent)?;
        let before = self.executor.counters();
        let (mut emitted, mut runs) = (0, 0);
        loop {
            // Token number `emitted` is being computed; it will sit at this position.
            let pos = start + emitted;
            let more = emitted + 1 < generation.max_tokens && pos < self.plan.ctx as usize && !cancel.is_cancelled();
            if more {
                let end = pos as u32 + 1;
                self.submit(Which::Decode, Extent { columns: 1, end })?;
            }
            runs += u64::from(more);
            let ctl = self.wait()?;
            if ctl.stop == 2 {
                bail!(NonFinite, "the logits at position {pos} are not finite numbers");
            }
            emitted += 1;
            if more {
                self.cached.push(ctl.sampled);
            }
            let ended = match emit(ctl.sampled) {
                _ if ctl.stop == 1 => Some(Finish::Stop),
                ControlFlow::Break(()) => Some(Finish::Stop),
                ControlFlow::Continue(()) if cancel.is_cancelled() => Some(Finish::Interrupted),
                ControlFlow::Continue(()) if emitted >= generation.max_tokens => Some(Finish::Length),
                ControlFlow::Continue(()) if !more => Some(Finish::Context),
                ControlFlow::Continue(()) => None,
            };
            if let Some(finish) = ended {
                if more {
                    self.wait()?;
                }
                self.decode_cost = (runs, self.executor.counters().since(&before));
                return Ok(finish);
            }
        }
    }

    /// Teacher-forced logits of every token: the first `prefill` of them in prefill runs, the others one by one through the
    /// decode program. `sink` gets each position's logits and, if asked for, the residual stream after each layer,
    /// `hidden[layer]`.
    ///
    /// Errors: as [`Session::prefill`]; `Usage` when the plan has no such program.
    pub fn logits(&mut self, tokens: &[u32], prefill: usize, hidden: bool, sink: LogitsSink) -> Result<()> {
        self.check(tokens)?;
        self.clear();
        let (first, rest) = tokens.split_at(prefill.min(tokens.len()));
        if !first.is_empty() && self.plan.program(Which::PrefillLogits).steps.is_empty() {
            bail!(Usage, "the plan has no program for the logits of a prompt");
        }
        let mut at = 0;
        for chunk in first.chunks(self.plan.chunk as usize) {
            let extent = self.begin_chunk(chunk)?;
            let columns = self.forward(Which::PrefillLogits, extent, hidden)?;
            self.end_chunk(chunk);
            for (logits, hidden) in columns {
                sink(at, &logits, &hidden)?;
                at += 1;
            }
        }
        let settings = Sampling::greedy().words(&[])?;
        self.executor.write(self.plan.fixed.settings, &settings)?;
        for &token in rest {
            let pos = self.cached.len() as u32;
            self.start(token, pos, 1)?;
            let columns = self.forward(
                Which::Decode,
                Extent {
                    columns: 1,
                    end: pos + 1,
                },
                hidden,
            )?;
            self.cached.push(token);
            for (logits, hidden) in columns {
                sink(at, &logits, &hidden)?;
                at += 1;
            }
        }
        self.pending_columns = 0;
        Ok(())
    }

    /// Runs a program; logits and layer outputs of every column.
    #[allow(
        clippy::type_complexity,
        reason = "one pair per column, named in the documentation of the only caller"
    )]
    fn forward(&mut self, which: Which, extent: Extent, hidden: bool) -> Result<Vec<(Vec<f32>, Vec<Vec<f32>>)>> {
        let plan = self.plan.clone();
        let program = plan.program(which);
        let columns = extent.columns as usize;
        let mut result: Vec<(Vec<f32>, Vec<Vec<f32>>)> = vec![Default::default(); columns];
        let mut done = 0;
        if hidden {
            for &end in &program.layer_ends {
                self.executor.run(which, done..end, extent)?;
                done = end;
                let all = self.columns(program.hidden, plan.hidden as usize, columns)?;
                result
                    .iter_mut()
                    .zip(all)
                    .for_each(|(column, values)| column.1.push(values));
            }
        }
        while done < program.steps.len() {
            let end = program.steps.len().min(done + FIRST_STEPS);
            self.executor.run(which, done..end, extent)?;
            done = end;
        }
        if let Some(buffer) = program.logits {
            let all = self.columns(buffer, plan.vocab as usize, columns)?;
            result
                .iter_mut()
                .zip(all)
                .for_each(|(column, values)| column.0 = values);
        }
        Ok(result)
    }

    /// The first `len` elements of each of the first columns of a buffer whose columns are padded to whole units.
    fn columns(&mut self, buffer: usize, len: usize, columns: usize) -> Result<Vec<Vec<f32>>> {
        let stride = len.next_multiple_of(32);
        let words = self.executor.read(buffer, 0, stride * columns)?;
        let floats: &[f32] = bytemuck::cast_slice(&words);
        Ok(floats
            .chunks_exact(stride)
            .map(|column| column[..len].to_vec())
            .collect())
    }
}

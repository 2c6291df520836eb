//! A plan being run: positions, the tokens whose keys and values are cached, and runs that are in flight.
//!
//! Knows token ids, not text.

mod lookup;
mod pace;
mod phi;
mod speculate;
#[cfg(test)]
mod tests;
mod tuner;

use crate::error::{Result, bail};
use crate::program::{Counters, Ctl, Executor, Extent, Plan, Routed, Ticket, Which};
use crate::sampling::{SEEN_IN_PROMPT, Sampling};
use pace::{FIRST_STEPS, Pace};
use std::collections::{BTreeMap, VecDeque};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub use speculate::{DraftMode, Speculated};

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

/// An answer that is being made.
struct Answering<'a> {
    generation: &'a Generation,
    cancel: &'a Cancel,
    emit: &'a mut dyn FnMut(u32) -> ControlFlow<()>,
    /// Tokens handed out.
    emitted: usize,
    /// Position of the answer's first token.
    start: usize,
}

impl Answering<'_> {
    /// Position of the next token to hand out.
    fn position(&self) -> usize {
        self.start + self.emitted
    }

    /// Position of the last token there can be: the one sampled at the last position of the context has none to run at.
    fn last(&self, ctx: u32) -> usize {
        (self.start.saturating_add(self.generation.max_tokens) - 1).min(ctx as usize)
    }

    /// Hands out what a run sampled, until something ends the answer.
    ///
    /// Errors: `NonFinite` with the position, after the tokens before it.
    fn take(&mut self, ctl: &Ctl, ctx: u32) -> Result<Option<Finish>> {
        let sampled = ctl.sampled();
        for (i, &token) in sampled.iter().enumerate() {
            let position = self.position();
            self.emitted += 1;
            let flow = (self.emit)(token);
            if (ctl.stop == 1 && i + 1 == sampled.len()) || flow.is_break() {
                return Ok(Some(Finish::Stop));
            }
            if self.cancel.is_cancelled() {
                return Ok(Some(Finish::Interrupted));
            }
            if self.emitted >= self.generation.max_tokens {
                return Ok(Some(Finish::Length));
            }
            if position >= ctx as usize {
                return Ok(Some(Finish::Context));
            }
        }
        if ctl.stop == 2 {
            bail!(
                NonFinite,
                "the logits at position {} are not finite numbers",
                self.position()
            );
        }
        Ok(None)
    }
}

/// One conversation on one device.
pub struct Session {
    plan: Arc<Plan>,
    executor: Box<dyn Executor>,
    /// Tokens whose keys and values are cached, by position.
    cached: Vec<u32>,
    /// Positions that have been run, those of drafts that did not stand included: as far as recurrent states have moved.
    run_end: usize,
    /// Columns of the last prefill chunk, while no token has been sampled after it.
    pending_columns: u32,
    /// Runs that nobody has waited for yet.
    in_flight: VecDeque<Ticket>,
    /// Steps of the next submission of a prefill.
    part: usize,
    /// Runs that decoded in the last answer, and what they cost.
    decode_cost: (u64, Counters),
    drafting: speculate::Drafting,
}

impl Session {
    /// A session with an empty cache.
    pub fn new(plan: Arc<Plan>, executor: Box<dyn Executor>) -> Session {
        Session {
            drafting: speculate::Drafting::new(&plan),
            plan,
            executor,
            cached: Vec::new(),
            run_end: 0,
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

    /// How many decoding runs, of one token or a speculative round, the last [`Session::generate`] submitted, and what they
    /// cost together: neither the first token, which comes from the prompt's last column, nor the settings of the answer are
    /// in there.
    pub fn decode_cost(&self) -> (u64, Counters) {
        self.decode_cost
    }

    /// How often each expert was chosen since the session began, by layer, for plans that count: see [`Plan::routed`].
    ///
    /// Errors: the executor's.
    pub fn route_counts(&mut self) -> Result<BTreeMap<usize, Vec<u32>>> {
        let plan = self.plan.clone();
        let mut layers: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
        for &Routed { layer, experts, counts } in &plan.routed {
            let counts = self.executor.read(counts, 0, experts)?;
            // A layer that is visited several times counts each time.
            let layer = layers.entry(layer).or_insert_with(|| vec![0; experts]);
            layer
                .iter_mut()
                .zip(counts)
                .for_each(|(all, count)| *all = all.wrapping_add(count));
        }
        Ok(layers)
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
        self.run_end = 0;
        self.pending_columns = 0;
    }

    /// Runs another choice of the plan's steps from now on, one made by [`Plan::with_mask`]. What is cached is forgotten.
    ///
    /// Errors: the executor's.
    pub fn select(&mut self, plan: Plan) -> Result<()> {
        while !self.in_flight.is_empty() {
            self.wait()?;
        }
        self.clear();
        self.plan = Arc::new(plan);
        self.drafting.begin_with(&self.plan);
        self.executor.select(self.plan.clone())
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
        let mut ctl = Ctl {
            pos,
            columns,
            ..Ctl::default()
        };
        ctl.tokens[0] = token;
        self.write_ctl(&ctl)
    }

    fn write_ctl(&mut self, ctl: &Ctl) -> Result<()> {
        self.executor.write(self.plan.fixed.ctl, bytemuck::cast_slice(&[*ctl]))
    }

    /// How many of the first `shared` cached tokens a run may follow: all of them, or none where a recurrent layer's state
    /// has moved on and that of the position is not kept.
    fn reusable(&self, shared: usize) -> usize {
        let moved_on = self.run_end - shared;
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
        self.run_end = shared;
        self.pending_columns = 0;
        if shared == 0 {
            self.drafting.begin_anew();
        }
        let result = self.prefill_chunks(&tokens[shared..], cancel);
        let flow = self.settled(result)?;
        Ok((self.cached.len() - shared, flow))
    }

    fn prefill_chunks(&mut self, tokens: &[u32], cancel: &Cancel) -> Result<ControlFlow<()>> {
        let mut flow = ControlFlow::Continue(());
        let mut pace = Pace::new();
        let mut rest = tokens;
        while !rest.is_empty() {
            let (chunk, later) = rest.split_at(rest.len().min(self.plan.chunk as usize));
            if let Some(head) = self.plan.fixed.head {
                // The token after the prompt is not known; what stands for it is put right by the first round.
                let mut next = chunk[1..].to_vec();
                next.push(later.first().copied().unwrap_or(0));
                self.executor.write(head.next_tokens, &next)?;
            }
            let extent = self.begin_chunk(chunk)?;
            flow = self.submit_parts(self.drafting.prefill(), extent, cancel, &mut pace)?;
            if flow.is_break() {
                // Of a chunk that was begun nothing counts; its positions are written anew by whatever comes there.
                break;
            }
            self.end_chunk(chunk);
            rest = later;
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
        self.run_end = self.cached.len();
        self.pending_columns = chunk.len() as u32;
    }

    /// Samples tokens after a prefill until something ends the answer. Each token goes to `emit`, which may end it too.
    /// The run of the next token is submitted before a token is read. With a plan that has speculative rounds the tokens are
    /// the same, and come a few at a time.
    ///
    /// Errors: `NonFinite` with the position, and the executor's. The session can be used after them; its cache is empty.
    pub fn generate(
        &mut self,
        generation: &Generation,
        cancel: &Cancel,
        emit: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Finish> {
        let result = self.answer(&mut Answering {
            generation,
            cancel,
            emit,
            emitted: 0,
            start: self.cached.len(),
        });
        self.settled(result)
    }

    fn answer(&mut self, answering: &mut Answering) -> Result<Finish> {
        if self.pending_columns == 0 {
            bail!(Usage, "an answer needs a prompt");
        }
        let generation = answering.generation;
        let settings = generation.sampling.words(&generation.stops)?;
        self.decode_cost = Default::default();
        self.drafting.begin_answer();
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
        self.speculate(answering)
    }

    /// The first token's run: from the last column of the prompt.
    fn submit_head(&mut self) -> Result<()> {
        let end = self.cached.len() as u32;
        self.pending_columns = 0;
        self.submit(Which::Head, Extent { columns: 1, end })
    }

    /// One token a run, the first of which is under way, until something ends the answer.
    fn sample(&mut self, answering: &mut Answering) -> Result<Finish> {
        loop {
            // The token that is being computed will sit at this position.
            let pos = answering.position();
            let more = pos < answering.last(self.plan.ctx) && !answering.cancel.is_cancelled();
            if more {
                let end = pos as u32 + 1;
                self.submit(Which::Decode, Extent { columns: 1, end })?;
            }
            self.decode_cost.0 += u64::from(more);
            let ctl = self.wait()?;
            if more {
                self.cached.extend_from_slice(ctl.sampled());
                self.run_end = self.cached.len();
            }
            if let Some(finish) = answering.take(&ctl, self.plan.ctx)? {
                if more {
                    self.wait()?;
                }
                return Ok(finish);
            }
            if !more {
                return Ok(Finish::Interrupted);
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
            for (&end, &stream) in program.layer_ends.iter().zip(&program.hidden) {
                self.executor.run(which, done..end, extent)?;
                done = end;
                let all = self.columns(stream, plan.hidden as usize, columns)?;
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

//! An executor for tests. It computes a tiny network whose next token depends on the last two, and runs the host
//! implementations of the sampler and of drafting.

use super::answer::Cancel;
use crate::error::{Result, bail};
use crate::graph::{BatchShape, BufferId, Counters, Executor, Graph, Program, READBACK_WORDS, Selection, Step, Ticket};
use crate::lm::{Plan, ProgramKind, RunBuffers};
use crate::op::host::{Memory, Operands, Rows};
use crate::op::{self, BATCH_HEADER, Bind, Kv, MatrixId, Op, Token, VectorId, batch_len, batch_words};
use crate::sampling::SETTINGS_WORDS;
use crate::source::{TensorId, Tensors};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Steps of every program.
pub const STEPS: usize = 100;
/// Tokens of a prefill chunk.
pub const CHUNK: u32 = 8;
pub const VOCAB: u32 = 16;
/// Elements of a row of logits.
const STRIDE: u32 = 32;

const BATCH: BufferId = 0;
const SLOTS: BufferId = 1;
const PAGES: BufferId = 2;
const SETTINGS: BufferId = 3;
const SEEN: BufferId = 4;
const DRAFT_BATCH: BufferId = 5;
const LOGITS: BufferId = 6;

/// A plan for [`FakeExecutor`].
pub fn plan(ctx: u32, drafts: u32, draft_head: bool, kept_states: Option<u32>) -> Plan {
    let step = Step {
        label: String::new(),
        op: op::sample::Params::default().into(),
        planes: None,
        bindings: Vec::new(),
        width: 1,
        conditions: Vec::new(),
        masked: None,
    };
    let program = |kind: &ProgramKind| Program {
        name: kind.name(),
        steps: vec![step.clone(); STEPS],
        taps: Vec::new(),
        output: Some(LOGITS),
    };
    let graph = Graph {
        buffers: Vec::new(),
        matrices: Vec::new(),
        vectors: Vec::new(),
        programs: ProgramKind::ALL.iter().map(program).collect(),
        readback: SLOTS,
        kv: Kv::F16,
        width: drafts + 1,
        routed: Vec::new(),
        paged: Vec::new(),
    };
    Plan {
        graph: Arc::new(graph),
        selection: Arc::default(),
        masking: None,
        buffers: RunBuffers {
            batch: BATCH,
            slots: SLOTS,
            pages: PAGES,
            settings: SETTINGS,
            seen: SEEN,
            draft_batch: draft_head.then_some(DRAFT_BATCH),
        },
        ctx,
        chunk: CHUNK,
        drafts,
        vocab: VOCAB,
        hidden: 32,
        kept_states,
    }
}

/// A token's position, the token before it, and the token itself.
type Context = [u32; 3];

/// The token that the network prefers. The position makes some repetitions differ.
fn next([position, before, token]: Context) -> u32 {
    (before * 4 + token * 3 + 1 + u32::from(position.is_multiple_of(13))) % VOCAB
}

/// The token that the draft head prefers: sometimes another one.
fn guess([position, before, token]: Context) -> u32 {
    // The head runs each token one position early.
    (next([position + 1, before, token]) + u32::from(token.is_multiple_of(3))) % VOCAB
}

struct Buffers(Vec<Vec<u32>>);

impl Memory for Buffers {
    fn buffer(&self, buffer: BufferId) -> Option<&[u32]> {
        self.0.get(buffer).map(Vec::as_slice)
    }

    fn buffer_mut(&mut self, buffer: BufferId) -> Option<&mut [u32]> {
        self.0.get_mut(buffer).map(Vec::as_mut_slice)
    }

    fn vector(&self, _: VectorId) -> Option<&[f32]> {
        None
    }

    fn weight(&self, _: MatrixId, _: usize) -> Result<Rows<'_>> {
        bail!(Internal, "there are no weights")
    }
}

/// The steps of each submission of a prefill.
pub type Log = Arc<Mutex<Vec<Range<usize>>>>;

/// See the head of this file.
pub struct FakeExecutor {
    plan: Plan,
    memory: Buffers,
    /// The network's token at each position, and the draft head's, which is the one after it.
    caches: [Vec<u32>; 2],
    /// Tokens of the last prefill.
    prefilled: usize,
    finished: VecDeque<(u64, [u32; READBACK_WORDS])>,
    tickets: u64,
    counters: Counters,
    pub log: Log,
    /// Time of each step of a prefill.
    pub step: Duration,
    /// Time of a speculative step.
    pub speculative: Duration,
    /// Cancelled during this submission of a prefill, counted from 1.
    pub cancelled_at: usize,
    pub cancel: Cancel,
}

impl FakeExecutor {
    pub fn new(plan: &Plan) -> FakeExecutor {
        let batch = batch_len(CHUNK as usize);
        let words = [
            batch,
            READBACK_WORDS,
            1,
            SETTINGS_WORDS,
            VOCAB as usize,
            batch,
            (STRIDE * CHUNK) as usize,
        ];
        FakeExecutor {
            plan: plan.clone(),
            memory: Buffers(words.map(|len| vec![0; len]).to_vec()),
            caches: [(); 2].map(|()| vec![0; plan.ctx as usize]),
            prefilled: 0,
            finished: VecDeque::new(),
            tickets: 0,
            counters: Counters::default(),
            log: Log::default(),
            step: Duration::ZERO,
            speculative: Duration::ZERO,
            cancelled_at: usize::MAX,
            cancel: Cancel::new(),
        }
    }

    fn tokens(&self, batch: BufferId) -> Vec<Token> {
        let words = &self.memory.0[batch];
        bytemuck::pod_collect_to_vec(&words[BATCH_HEADER..batch_len(words[0] as usize)])
    }

    fn store(&mut self, buffer: BufferId, words: &[u32]) {
        self.memory.0[buffer][..words.len()].copy_from_slice(words);
    }

    /// Caches the tokens of a batch.
    fn cache(&mut self, head: bool, tokens: &[Token]) -> Vec<Context> {
        let cache = &mut self.caches[usize::from(head)];
        let cached = |token: &Token| {
            let position = token.position as usize;
            cache[position] = token.id;
            let before = position.checked_sub(1).map_or(0, |before| cache[before]);
            [token.position, before, token.id]
        };
        tokens.iter().map(cached).collect()
    }

    /// Writes a row of logits: `preferred` has the largest one.
    fn write_logits(&mut self, row: usize, preferred: u32) {
        let row = &mut self.memory.0[LOGITS][row * STRIDE as usize..][..VOCAB as usize];
        row.fill(0);
        row[preferred as usize] = 2f32.to_bits();
    }

    fn operate(&mut self, op: impl Into<Op>, bindings: impl Into<Vec<Bind>>) {
        let op = op.into();
        let bindings: Vec<Bind> = bindings.into();
        let mut operands = Operands {
            spec: op.kernel().spec(),
            bindings: &bindings,
            memory: &mut self.memory,
            kv: Kv::F16,
            width: CHUNK as usize,
            own: CHUNK as usize,
            masked: false,
        };
        op.run(&mut operands).unwrap();
    }

    fn perform(&mut self, kind: ProgramKind, shape: BatchShape) {
        match kind {
            ProgramKind::Prefill | ProgramKind::PrefillLogits => {
                let tokens = self.tokens(BATCH);
                self.prefilled = tokens.len();
                for (row, context) in self.cache(false, &tokens).into_iter().enumerate() {
                    self.write_logits(row, next(context));
                }
                let drafted = self.tokens(DRAFT_BATCH);
                self.cache(true, &drafted);
            }
            ProgramKind::Head => {
                let tokens = self.tokens(BATCH);
                assert_eq!(tokens.len(), self.prefilled, "the head continues the last chunk");
                self.store(BATCH, &batch_words(&tokens[tokens.len() - 1..]));
                self.verify(shape);
            }
            ProgramKind::Decode => self.verify(shape),
            ProgramKind::Speculate => {
                std::thread::sleep(self.speculative);
                if self.plan.buffers.draft_batch.is_some() {
                    self.draft();
                }
                self.verify(shape);
            }
        }
    }

    fn draft(&mut self) {
        let (slots, batch, draft_batch) = (Bind::Buffer(SLOTS), Bind::Buffer(BATCH), Bind::Buffer(DRAFT_BATCH));
        let depth = self.plan.drafts;
        let bindings = op::speculate_begin::Bindings {
            slots,
            batch,
            draft_batch,
        };
        self.operate(op::speculate_begin::Params { depth }, bindings);
        let upcoming = self.tokens(BATCH);
        for token in self.tokens(DRAFT_BATCH) {
            let after = token.position as usize + 1;
            let known = match upcoming[0].position as usize == after {
                true => upcoming[0].id,
                false => self.caches[0][after],
            };
            assert_eq!(
                token.id, known,
                "the draft head catches up at position {}",
                token.position
            );
        }
        for number in 1..=depth {
            let tokens = self.tokens(DRAFT_BATCH);
            if let Some(context) = self.cache(true, &tokens).pop() {
                self.store(DRAFT_BATCH, &batch_words(&tokens[tokens.len() - 1..]));
                self.write_logits(0, guess(context));
                let bindings = op::draft::Bindings {
                    logits: Bind::Buffer(LOGITS),
                    slots,
                    batch,
                    draft_batch,
                };
                self.operate(op::draft::Params { vocab: VOCAB, number }, bindings);
            }
        }
    }

    /// Runs the tokens of the batch and samples.
    fn verify(&mut self, shape: BatchShape) {
        let tokens = self.tokens(BATCH);
        assert!(tokens.len() <= shape.tokens as usize);
        assert!(
            tokens.iter().all(|token| token.position < shape.end),
            "{tokens:?} {shape:?}"
        );
        for (row, context) in self.cache(false, &tokens).into_iter().enumerate() {
            self.write_logits(row, next(context));
        }
        let bindings = op::sample::Bindings {
            settings: Bind::Buffer(SETTINGS),
            logits: Bind::Buffer(LOGITS),
            batch: Bind::Buffer(BATCH),
            slots: Bind::Buffer(SLOTS),
            seen: Bind::Buffer(SEEN),
        };
        let params = op::sample::Params {
            vocab: VOCAB,
            stride: STRIDE,
        };
        self.operate(params, bindings);
    }
}

impl Executor for FakeExecutor {
    fn run(&mut self, program: usize, steps: Range<usize>, shape: BatchShape) -> Result<()> {
        if steps.end == STEPS {
            self.perform(ProgramKind::ALL[program], shape);
        }
        Ok(())
    }

    fn submit(&mut self, program: usize, steps: Range<usize>, shape: BatchShape) -> Result<Ticket> {
        if program == ProgramKind::Prefill as usize {
            std::thread::sleep(self.step * steps.len() as u32);
            let mut log = self.log.lock().unwrap();
            log.push(steps.clone());
            if log.len() == self.cancelled_at {
                self.cancel.cancel();
            }
        }
        self.run(program, steps, shape)?;
        let ticket = self.tickets;
        self.tickets += 1;
        self.counters.submits += 1;
        let readback = self.memory.0[SLOTS].clone().try_into().unwrap();
        self.finished.push_back((ticket, readback));
        assert!(self.finished.len() <= 2, "at most two runs are in flight");
        Ok(Ticket(ticket))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<[u32; READBACK_WORDS]> {
        let (id, readback) = self.finished.pop_front().unwrap();
        assert_eq!(id, ticket.0, "runs are waited for in order");
        Ok(readback)
    }

    fn select(&mut self, _: Arc<Selection>) -> Result<()> {
        Ok(())
    }

    fn replace(&mut self, _: Arc<Graph>, _: Arc<Selection>, _: Arc<dyn Tensors>, _: &[TensorId]) -> Result<()> {
        Ok(())
    }

    fn write(&mut self, buffer: BufferId, words: &[u32]) -> Result<()> {
        self.store(buffer, words);
        self.counters.write_buffer_calls += 1;
        Ok(())
    }

    fn read(&mut self, buffer: BufferId, first: usize, count: usize) -> Result<Vec<u32>> {
        Ok(self.memory.0[buffer][first..first + count].to_vec())
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}

//! Rigs of what chooses tokens: the sampler with settings of every kind over logits of every kind, the draft head's choice,
//! and the beginning of rounds.

use super::random::{Random, words};
use super::{CTL, Maker, Round, SETTINGS};
use crate::container::Tensors;
use crate::error::Result;
use crate::kernel::{self, MAX_COLUMNS, Op};
use crate::parity::cases::{Logits, Sample};
use crate::program::{Bind, BufferId, Ctl, Extent};
use crate::sampling::{Choice, SEEN_IN_PROMPT, Sampling, choose};
use std::sync::Arc;

impl Maker {
    pub(super) fn sample(&mut self, spec: &Sample) -> Result<Arc<dyn Tensors>> {
        let vocab = spec.vocab as usize;
        let stride = vocab.next_multiple_of(32);
        let logits = self.buffer("logits", stride * MAX_COLUMNS as usize);
        let seen = self.buffer("seen", vocab);
        self.step(
            Op::Sample(kernel::Sample {
                vocab: spec.vocab,
                stride: stride as u32,
            }),
            [SETTINGS, logits, CTL, seen].map(Bind::Buffer).to_vec(),
        );
        let all = Sampling {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            ..Sampling::default()
        };
        let with = |temperature, top_k, top_p, min_p| Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
            ..Sampling::default()
        };
        let penalised = |sampling: Sampling| Sampling {
            repeat_penalty: 1.3,
            presence_penalty: 0.4,
            frequency_penalty: 0.2,
            ..sampling
        };
        let settings = [
            Sampling::greedy(),
            all,
            Sampling::default(),
            with(2.0, 1, 1.0, 0.0),
            with(1.0, 7, 1.0, 0.0),
            with(1.0, 100_000, 1.0, 0.0),
            with(1.5, 0, 0.9, 0.0),
            with(0.5, 0, 0.05, 0.0),
            with(1.0, 0, 1.0, 0.2),
            with(1.5, 40, 0.9, 0.05),
            with(0.01, 0, 1.0, 0.0),
            penalised(Sampling::greedy()),
            penalised(with(1.0, 20, 0.9, 0.01)),
        ];
        for sampling in &settings {
            for draw in 0..spec.draws {
                let columns = 1 + draw % MAX_COLUMNS;
                let mut values = Vec::new();
                for _ in 0..columns {
                    values.extend(self.logits(spec.logits, vocab));
                    values.resize(values.len().next_multiple_of(stride), 0.0);
                }
                if spec.logits == Logits::Broken {
                    // In the last column, so that those before it are sampled.
                    let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
                    let last = (columns as usize - 1) * stride;
                    values[last + (self.random.bits() % vocab as u64) as usize] = bad[draw as usize % 3];
                }
                let stops = match draw % 3 {
                    // Sometimes every token of a small vocabulary, the last of the list among them.
                    0 => (0..16).collect(),
                    1 => vec![(self.random.bits() % vocab as u64) as u32],
                    _ => Vec::new(),
                };
                let seed = self.random.bits();
                let settings = Sampling {
                    seed,
                    ..sampling.clone()
                };
                // Most tokens are new, some were in the prompt, some were sampled up to three times.
                let marks = |bits: u64| match bits % 8 {
                    0 => SEEN_IN_PROMPT,
                    1 => SEEN_IN_PROMPT | ((bits >> 8) as u32 % 4),
                    2 => (bits >> 8) as u32 % 4,
                    _ => 0,
                };
                let seen_before: Vec<u32> = (0..vocab).map(|_| marks(self.random.bits())).collect();
                // A round in four comes after the end of an answer, which stays as it is.
                let mut ctl = Ctl {
                    pos: (self.random.bits() % 5000) as u32,
                    columns,
                    step: draw,
                    stop: u32::from(draw % 4 == 3),
                    count: 9,
                    drafted: 9,
                    last: 9,
                    ..Ctl::default()
                };
                // Most drafts are what will be sampled.
                let words_of = settings.words(&stops)?;
                let mut counted = seen_before.clone();
                for column in 0..columns as usize {
                    let logits = &values[column * stride..][..vocab];
                    ctl.tokens[column] = 3;
                    if let Choice::Token(token) = choose(logits, &words_of, &counted, ctl.pos + column as u32 + 1)
                        && !self.random.bits().is_multiple_of(8)
                    {
                        ctl.tokens[column + 1] = token;
                        counted[token as usize] += u32::from(sampling.penalises());
                    }
                }
                self.rounds.push(Round {
                    name: format!("{settings:?} at position {}", ctl.pos),
                    inputs: vec![
                        (SETTINGS, words_of),
                        (logits, words(&values)),
                        (seen, seen_before),
                        (CTL, bytemuck::cast_slice(&[ctl]).to_vec()),
                    ],
                    extent: Extent { columns, end: columns },
                });
            }
        }
        self.tensors()
    }

    /// The draft head's choice, in and after a round.
    pub(super) fn draft(&mut self, spec: &Sample) -> Result<Arc<dyn Tensors>> {
        let logits = self.buffer("logits", spec.vocab as usize);
        let draft = self.buffer("draft", size_of::<Ctl>() / 4);
        let number = 3;
        self.step(
            Op::Draft(kernel::Draft {
                vocab: spec.vocab,
                number,
            }),
            [logits, CTL, draft].map(Bind::Buffer).to_vec(),
        );
        for (columns, pos, last) in [(1, 20, 30), (1, 28, 30), (1, 29, 30), (0, 28, 30)] {
            let values = self.logits(spec.logits, spec.vocab as usize);
            let state = Ctl {
                tokens: [5; MAX_COLUMNS as usize + 1],
                pos,
                columns,
                last,
                ..Ctl::default()
            };
            let inputs = vec![(logits, words(&values))];
            self.controlled(Ctl { columns: 4, ..state }, (draft, state), inputs);
        }
        self.tensors()
    }

    /// The beginning of a round: after a prompt, after rounds, near the last position and after the end.
    pub(super) fn round_begin(&mut self, depth: u32) -> Result<Arc<dyn Tensors>> {
        let draft = self.buffer("draft", size_of::<Ctl>() / 4);
        let op = Op::RoundBegin(kernel::RoundBegin { depth });
        self.step(op, [CTL, draft].map(Bind::Buffer).to_vec());
        for (pos, count, last, stop) in [
            (1, 1, 30, 0),
            (20, 3, 30, 0),
            (28, depth + 1, 30, 0),
            (29, 1, 30, 0),
            (30, 2, 30, 0),
            (20, 2, 30, 1),
            (20, 0, 30, 2),
        ] {
            let ctl = Ctl {
                tokens: [7, 11, 12, 13, 14, 15, 16, 17, 18],
                pos,
                columns: 1,
                stop,
                count,
                last,
                ..Ctl::default()
            };
            self.controlled(ctl, (draft, Ctl::default()), Vec::new());
        }
        self.tensors()
    }

    /// A round that begins with these control words, and those of the draft head.
    fn controlled(&mut self, ctl: Ctl, draft: (BufferId, Ctl), mut inputs: Vec<(BufferId, Vec<u32>)>) {
        inputs.push((CTL, bytemuck::cast_slice(&[ctl]).to_vec()));
        inputs.push((draft.0, bytemuck::cast_slice(&[draft.1]).to_vec()));
        self.rounds.push(Round {
            name: format!("{ctl:?}, {:?}", draft.1),
            inputs,
            extent: Extent { columns: 1, end: 1 },
        });
    }

    fn logits(&mut self, kind: Logits, vocab: usize) -> Vec<f32> {
        let value = |bits: u64| match kind {
            Logits::Spread | Logits::Broken => Random::unit(bits) * 9.0,
            Logits::Ties => ((bits >> 40) % 5) as f32 * -0.5,
            Logits::Flat => -1.25,
        };
        let mut next = || {
            let bits = self.random.bits();
            match value(bits) {
                // Half of the zeros are negative.
                0.0 => [0.0, -0.0][(bits & 1) as usize],
                value => value,
            }
        };
        (0..vocab).map(|_| next()).collect()
    }
}
